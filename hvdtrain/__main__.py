"""`python -m hvdtrain` and the program `hvdtrain`: Ctrl-C ends them without a traceback, whenever it comes."""

# Nothing else here: until `run` listens, Ctrl-C is a traceback of Python's own.
import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT


def run() -> None:
    """Runs the command line and ends with its exit code."""
    # Where it is ignored, as behind `nohup`, it stays so.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if listens:
            signal.signal(signal.SIGINT, _first)
        from hvdtrain.cli import main

        code = main()
    except KeyboardInterrupt:  # before there was a command to interrupt, or after
        code = INTERRUPTED
    if listens:
        signal.signal(signal.SIGINT, _end)
    if code == INTERRUPTED:
        # Without the interpreter's own end, which waits for threads, and which another Ctrl-C would interrupt.
        try:
            sys.stdout.flush()
        finally:
            _end()
    sys.exit(code)


def _first(*_: object) -> None:
    """The command puts its things in order; who does not want to wait for that interrupts it again."""
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    run()
