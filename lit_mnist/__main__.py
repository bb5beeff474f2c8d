"""`python -m lit_mnist` is the command `lit-mnist`."""

import sys

from lit_mnist.cli.entry import entry

if __name__ == "__main__":
    # The help and the next commands to type name the program.
    sys.argv[0] = "lit-mnist"
    entry()
