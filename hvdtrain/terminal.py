"""What a person at a terminal sees, and Ctrl-C.

`Status` is a command's: one line that moves by the clock, and nothing in a file or a pipe. `Screen` is rank 0's: lines,
and at a terminal a sign of life by the clock. Straight at a terminal that is a line at the bottom, repainted; through a
launcher a line of its own where nothing was printed for some seconds.

Ctrl-C gives no traceback, whenever it comes: the first ends what runs in order, a second at once. Nor is there one
where the reader of the output leaves, as `head` does, or the terminal is closed: the program does all its work.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

INTERRUPTED = 128 + signal.SIGINT
TIME_LIMIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # what a job script has SLURM send before its time limit
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # an end is near, of the job, the container, the terminal or the session
STOP_SIGNALS = (*END_SIGNALS, *TIME_LIMIT_SIGNALS)
Display = Literal["bar", "lines", "file"]
"""A line that is repainted; through a launcher, which would make a line of each repaint, short lines from time to
time; nothing but the log."""
SILENCE = 3.0
"""Seconds after which a status of lines prints another."""
LOOKS = 0.25
"""Seconds between two looks whether a line is due."""


Show = Callable[[str], None]
"""Shows what is done now."""


def hidden(text: str) -> None:
    """Shows nothing."""


class Status:
    """A spinner, a text and the seconds so far at the bottom of the terminal, until the block ends.

    Nothing where stderr is no terminal. What the block prints stands above it. With `as_lines`, for a launcher that
    passes lines on to a terminal, it is a line on stderr wherever the text has been the same, or is new, for 3 s.
    """

    def __init__(self, text: str, *, as_lines: bool = False) -> None:
        self._text = text
        self._as_lines = as_lines
        self._ended = threading.Event()
        self._progress: Progress | None = None

    def update(self, text: str) -> None:
        """Shows another text."""
        self._text = text
        if self._progress:
            self._progress.update(self._progress.task_ids[0], description=text)

    def print(self, line: str) -> None:
        """A line of the command's output, above the status."""
        if self._progress and sys.stdout.isatty():
            self._progress.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def __enter__(self) -> "Status":
        if self._as_lines:
            threading.Thread(target=self._print_lines, name="status", daemon=True).start()
        elif sys.stderr and sys.stderr.isatty():  # none where it was closed
            self._progress = _progress()
        if self._progress:
            self._progress.add_task(self._text, total=None)
            self._progress.start()
            self._progress.console.show_cursor(True)  # a process that is killed could not give it back
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _print_lines(self) -> None:
        began = time.monotonic()
        print(self._text, file=sys.stderr, flush=True)
        printed = began
        while not self._ended.wait(LOOKS):
            if (now := time.monotonic()) - printed >= SILENCE:
                print(f"{self._text} ({now - began:.0f} s)", file=sys.stderr, flush=True)
                printed = now


def _progress() -> "Progress | None":
    """What draws the line on stderr; None where rich is missing, as on a machine with few packages."""
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column
    except ImportError:
        return None
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        expand=True,
        redirect_stdout=sys.stdout.isatty(),
    )


if TYPE_CHECKING:
    from rich.text import Text

REPAINTS = 2
"""Repaints of the line in a second."""
SPINNER = "|/-\\"


class Activity(Protocol):
    """What happens now, as text that follows the clock."""

    silence: float
    """Seconds without a line after which `line` is printed."""

    def bar(self, width: int) -> str:
        """The text for the bottom of the terminal."""

    def line(self) -> str:
        """The text for a line of the log."""


class Wait:
    """A wait that is shown to the user. `text` is what to show, as "importing PyTorch", or a function that
    returns it."""

    silence = 3.0

    def __init__(self, text: str | Callable[[], str]) -> None:
        self._text, self._since = text, time.monotonic()

    def bar(self, width: int) -> str:
        return f"{SPINNER[int(time.monotonic() * REPAINTS) % len(SPINNER)]} {self.line()}"

    def line(self) -> str:
        text = self._text if isinstance(self._text, str) else self._text()
        seconds = int(time.monotonic() - self._since)
        return f"{text} ({seconds} s)" if seconds else text


class Screen:
    """Lines, and what happens now. Any thread may print."""

    def __init__(self) -> None:
        self.display: Display = "file"
        self._now: Activity | None = None
        self._printed = time.monotonic()
        self._closed = threading.Event()
        self._live: Any = None

    def open(self, display: Display) -> None:
        """Begins to show what happens, in that way."""
        self.close()
        self.display, self._closed = display, threading.Event()
        if display == "bar":
            self._live = self._started()
        elif display == "lines":
            threading.Thread(target=self._work, args=(self._closed,), name="screen", daemon=True).start()

    def waiting(self, text: str | Callable[[], str]) -> None:
        """Shows from now on that the run waits for this."""
        self.show(Wait(text))

    def show(self, activity: Activity) -> None:
        """Shows from now on this activity."""
        self._now = activity
        if self._live:
            self._live.refresh()

    def print(self, line: str) -> None:
        """Prints a line of the log."""
        self._printed = time.monotonic()
        if self._live:
            self._live.console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Ends what `open` began: nothing more is shown by the clock."""
        self._now = None
        self._closed.set()
        live, self._live = self._live, None
        if live:
            live.stop()
        self.display = "file"

    def _started(self) -> Any:
        from rich.console import Console
        from rich.live import Live

        # stderr too, so that a line of it stands above; but it may end elsewhere.
        live = Live(
            get_renderable=self._rendered,
            console=Console(file=sys.stdout),
            refresh_per_second=REPAINTS,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        live.console.show_cursor(True)  # a process that is killed could not give it back
        return live

    def _rendered(self) -> "Text":
        from rich.text import Text

        now, width = self._now, self._live.console.width if self._live else 80
        return Text(now.bar(width) if now else "", no_wrap=True, overflow="ellipsis", end="")

    def _work(self, closed: threading.Event) -> None:
        while not closed.wait(LOOKS):
            now = self._now
            if now and time.monotonic() - self._printed >= now.silence:
                with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
                    self.print(f"INFO - {now.line()}")


SCREEN = Screen()
"""The screen of this process. It shows lines alone until it is opened, on rank 0 of a recipe's run."""


def listen() -> None:
    """Installs these handlers; to be called before slow imports. Where Ctrl-C is ignored, as behind nohup, it
    stays so."""
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
    """A stream that discards its output once nobody reads it."""

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
    """Ends without a traceback for a Ctrl-C that nobody has caught, as during an import."""
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)


def _quiet_at_the_end(unraisable: Any) -> None:
    """The same for a Ctrl-C that comes while the interpreter shuts down."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)
