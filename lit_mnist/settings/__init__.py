"""The sections of an experiment's configuration: frozen dataclasses, whose docstrings are the command line's help."""
