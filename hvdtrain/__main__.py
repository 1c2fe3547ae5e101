"""`python -m hvdtrain` and the program `hvdtrain`."""

# Nothing else here: until `listen` is called, Ctrl-C is a traceback of Python's own.
import sys

from hvdtrain import terminal


def run() -> None:
    """Runs the command line and ends with its exit code."""
    terminal.listen()
    from hvdtrain.cli import main

    sys.exit(main())


if __name__ == "__main__":
    run()
