"""Ctrl-C without a traceback, whenever it comes: the first ends what runs in order, a second at once.

Nor is there one where the reader of the output leaves, as `head` does, or the terminal is closed: the program does all
that it was started for.
"""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT


def listen() -> None:
    """To be called before slow imports. Where Ctrl-C is ignored, as behind nohup, it stays so."""
    for name in ("stdout", "stderr"):
        if isinstance(out := getattr(sys, name), io.TextIOWrapper):  # None where it was closed
            raw = _Output(out.fileno(), "w", closefd=False)
            buffer: Any = raw if out.write_through else io.BufferedWriter(raw)
            how = (out.encoding, out.errors, None, out.line_buffering, out.write_through)
            setattr(sys, name, io.TextIOWrapper(buffer, *how))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _first)
        sys.excepthook = _quiet
        sys.unraisablehook = _quiet_at_the_end


class _Output(io.FileIO):
    """Discards what nobody reads any more."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.EIO}:  # a pipe's, a terminal's
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self.fileno())
            return len(content)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Around the import of a framework, whose C++ an exception would abort: the first Ctrl-C counts at its end."""
    if signal.getsignal(signal.SIGINT) is not _first:
        yield
        return
    came: list[bool] = []

    def later(*_: object) -> None:
        if came:
            _end()
        came.append(True)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _first)
    if came:
        _first(signal.SIGINT, None)


def _first(*_: object) -> None:
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


def _quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Nobody has caught it: it came during an import, or after everything."""
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)


def _quiet_at_the_end(unraisable: Any) -> None:
    """It came while the interpreter waits for threads or takes itself apart."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)
