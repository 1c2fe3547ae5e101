"""`python -m hvdtrain` and the program `hvdtrain`."""

# Import nothing else here: until `listen` is called, Ctrl-C shows a traceback.
import sys

from hvdtrain import terminal


def run() -> None:
    """Runs the command line and ends with its exit code."""
    terminal.listen()
    from hvdtrain.cli import main

    sys.exit(main())


if __name__ == "__main__":
    run()
