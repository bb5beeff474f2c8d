"""The command line: flags and configuration files, validation, preparation, and the main function."""
