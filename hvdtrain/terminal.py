"""What a person sees at a terminal, and what Ctrl-C does.

`Status` shows what a command does now. `Screen` shows what rank 0 of a run does now: at a terminal in a line at the
bottom, which is repainted; through a launcher, and in a user's program, in a new line whenever nothing was printed for
some seconds.

Ctrl-C never shows a traceback: the first one ends the program in order, a second one at once. Where the reader of the
output leaves, as `head` does, or the terminal is closed, the program continues silently.
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

INTERRUPTED = 128 + signal.SIGINT
TIME_LIMIT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # a job script has SLURM send one before its time limit
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # the job, the container, the terminal or the session is about to end
STOP_SIGNALS = (*END_SIGNALS, *TIME_LIMIT_SIGNALS)
Display = Literal["bar", "shared", "lines", "file"]
"""How a screen shows what happens: in one line that is repainted; in short lines from time to time, at a terminal where
a program may repaint a line of its own, or for a launcher, which would make a line of each repaint; or not at all."""
SILENCE, LONGEST_SILENCE = 3.0, 30.0
"""Seconds without output after which another line is printed: at first, and at most."""
SILENT_SHARE = 1 / 20
"""The part of the time so far after which another line is printed: a day is not to fill the terminal."""
LOOKS = 0.25
"""Seconds between two checks whether a line is due."""
REPAINTS = 2
"""Repaints of the line in a second."""
ERASED = "\r\x1b[K"
"""Erases the terminal's last line, which may be a program's own progress bar."""
LOG = "INFO - "
"""How a line of the log begins."""
SPINNER = "|/-\\"
PLAIN: Any = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
"""The options with which rich prints a text as it is."""
Show = Callable[[str], None]
"""The type of a function that shows what is done now."""


def hidden(_: object) -> None:
    """A `Show` that shows nothing."""


def counted(number: int, thing: str) -> str:
    """As `1 rank`, `1,024 ranks` and `2 classes`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith(("s", "tch", "nch")) else "s")


def folded(line: str, columns: int | None) -> list[str]:
    """A line of the log in lines of at most so many columns, unless a word is longer; None: as it is."""
    if columns is None or len(line) <= columns or not line.startswith(LOG):
        return [line]
    text = line.removeprefix(LOG).replace(": ", ":\xa0")  # a name stays beside its number
    title = re.match(r"\S+ {2,}", text)  # as that of the plan's lines
    indent = " " * (len(title[0]) if title else 2)
    width = max(columns - len(LOG), 2 * len(indent))
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [LOG + each.replace(":\xa0", ": ") for each in lines]


def spinner() -> str:
    """The character that shows that time passes."""
    return SPINNER[int(time.monotonic() * REPAINTS) % len(SPINNER)]


class Activity:
    """What happens now: a text, or what a function returns, and the seconds since it began."""

    def __init__(self, text: str | Callable[[], str]) -> None:
        self._text, self._since = text, time.monotonic()

    def bar(self, width: int) -> str:
        """The text for the bottom of the terminal."""
        return f"{spinner()} {self.line()}"

    def line(self) -> str:
        """The text for a line of the log."""
        text = self._text if isinstance(self._text, str) else self._text()
        seconds = int(time.monotonic() - self._since)
        return f"{text} ({seconds} s)" if seconds else text


class Screen:
    """Prints lines and shows what happens now. Any thread may print."""

    def __init__(self, columns: int | None = None, *, on_stderr: bool = False) -> None:
        """`columns`: how many a line may take; None for a file. `on_stderr`: where activities are shown."""
        self.display: Display = "file"
        self.columns = columns
        self._on_stderr = on_stderr
        self._now: Activity | None = None
        self._opened = self._printed = time.monotonic()
        self._closed = threading.Event()
        self._live: Any = None

    def open(self, display: Display, columns: int | None = None) -> None:
        """Begins to show activities in this way, in lines of so many columns."""
        self.close()
        self.display, self.columns, self._closed = display, columns, threading.Event()
        self._opened = time.monotonic()
        if display == "bar":
            self._live = self._started()
        elif display != "file":
            threading.Thread(target=self._work, args=(self._closed,), name="screen", daemon=True).start()

    def waiting(self, text: str | Callable[[], str]) -> None:
        """Shows from now on that the run waits for what the text names, as "importing PyTorch"."""
        self.show(Activity(text))

    def show(self, activity: Activity) -> None:
        """Shows this activity from now on."""
        self._now = activity
        if self._live:
            self._live.refresh()

    def print(self, line: str) -> None:
        """Prints a line of the log, above the progress bars of tqdm, if there are any."""
        self._printed = time.monotonic()
        text = "\n".join(folded(line, self.columns))
        tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if self._live and sys.stdout and sys.stdout.isatty():
            self._live.console.print(text, **PLAIN)
        elif getattr(tqdm, "_instances", None):
            tqdm.write(text)
            sys.stdout.flush()
        else:
            try:
                print(f"{ERASED if self.display == 'shared' else ''}{text}", flush=True)
            except OSError as error:  # the launcher is gone, which is another thread's to report, or stdout is closed
                if error.errno not in {errno.EPIPE, errno.EBADF}:
                    raise

    def close(self) -> None:
        """Shows no more activities; `print` still prints."""
        self._now = None
        self._closed.set()
        live, self._live = self._live, None
        if live:
            live.stop()
        self.display = "file"

    def _started(self) -> Any:
        """The line at the bottom; None where rich is not installed."""
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            return None
        # The lines of a stream that goes to the same terminal appear above.
        live = Live(
            get_renderable=self._rendered,
            console=Console(file=sys.stderr if self._on_stderr else sys.stdout),
            refresh_per_second=REPAINTS,
            transient=True,
            redirect_stdout=bool(sys.stdout) and sys.stdout.isatty(),
            redirect_stderr=bool(sys.stderr) and sys.stderr.isatty(),
        )
        live.start()
        live.console.show_cursor(True)  # a killed process could not show it again
        return live

    def _rendered(self) -> Any:
        from rich.text import Text

        now, width = self._now, (self._live.console.width if self._live else 80) - len("^C")
        return Text(now.bar(width) if now else "", no_wrap=True, overflow="ellipsis", end="")

    def _work(self, closed: threading.Event) -> None:
        while not closed.wait(LOOKS):
            now, clock = self._now, time.monotonic()
            silence = min(max(SILENCE, SILENT_SHARE * (clock - self._opened)), LONGEST_SILENCE)
            if now and clock - self._printed >= silence:
                with contextlib.suppress(OSError, ValueError):  # the reader may be gone
                    if self._on_stderr:
                        self._printed = time.monotonic()
                        print(now.line(), file=sys.stderr, flush=True)
                    else:
                        self.print(f"{LOG}{now.line()}")


class Status(Screen):
    """Shows a spinner, a text and the seconds so far at the bottom of the terminal, until the block ends.

    Where stderr is not a terminal, nothing is shown. What the block prints appears above the status. With `as_lines`,
    for a launcher that passes lines on to a terminal, the status is a line on stderr every few seconds.
    """

    def __init__(self, text: str, *, as_lines: bool = False) -> None:
        super().__init__(on_stderr=True)
        self._text, self._as_lines, self._all = text, as_lines, Activity(lambda: self._text)

    def update(self, text: str) -> None:
        """Shows another text; the seconds are those since the block began."""
        self._text = text
        self.show(self._all)

    def __enter__(self) -> "Status":
        if self._as_lines:
            print(self._text, file=sys.stderr, flush=True)
            self.open("lines")
        elif sys.stderr and sys.stderr.isatty():  # stderr is None where it was closed
            self.open("bar")
        self.show(self._all)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


SCREEN = Screen()
"""The screen of this process. It only prints lines until it is opened, which rank 0 of a run does."""


def listen() -> None:
    """Handles Ctrl-C and readers that leave, as the module says; called before slow imports.

    Where Ctrl-C is ignored, as behind nohup, it stays ignored.
    """
    for name in ("stdout", "stderr"):
        if isinstance(out := getattr(sys, name), io.TextIOWrapper):  # it is None where it was closed
            raw = _Output(out.fileno(), "w", closefd=False)
            buffer: Any = raw if out.write_through else io.BufferedWriter(raw)
            how = (out.encoding, out.errors, None, out.line_buffering, out.write_through)
            setattr(sys, name, io.TextIOWrapper(buffer, *how))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _first)
        sys.excepthook = _quiet
        sys.unraisablehook = _quiet_at_the_end


class _Output(io.FileIO):
    """A stream that discards its output once nobody reads it any more."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.EIO}:  # of a pipe, of a terminal
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self.fileno())
            return len(content)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpones the first Ctrl-C to the end of the block: an exception while a framework is imported would abort its
    C++ code."""
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
    """Ends without a traceback after a Ctrl-C that nothing caught, as during an import."""
    if issubclass(kind, KeyboardInterrupt):
        _end()
    sys.__excepthook__(kind, error, trace)


def _quiet_at_the_end(unraisable: Any) -> None:
    """Ends without a traceback after a Ctrl-C while the interpreter shuts down."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)
