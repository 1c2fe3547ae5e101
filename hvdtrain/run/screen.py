"""Rank 0's output: lines, and where they end at a terminal a sign of life by the clock.

Straight at a terminal that is a line at the bottom, repainted. Through a launcher it is a line of its own where nothing
was printed for some seconds. In a file there is none.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.run.display import Display

if TYPE_CHECKING:
    from rich.text import Text

REPAINTS = 2
"""A second."""
LOOKS = 0.25
"""Seconds between two looks whether a line is due."""
SPINNER = "|/-\\"


class Activity(Protocol):
    """What happens now, in words that follow the clock."""

    silence: float
    """Seconds without a line after which `line` is printed."""

    def bar(self, width: int) -> str:
        """For the bottom of the terminal."""

    def line(self) -> str:
        """For the log."""


class Wait:
    """Something to be waited for, as in "importing PyTorch"; `text` may be called for it."""

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
        """Shows from now on what happens, in that way."""
        self.close()
        self.display, self._closed = display, threading.Event()
        if display == "bar":
            self._live = self._started()
        elif display == "lines":
            threading.Thread(target=self._work, args=(self._closed,), name="screen", daemon=True).start()

    def waiting(self, text: str | Callable[[], str]) -> None:
        """What is waited for from now on."""
        self.show(Wait(text))

    def show(self, activity: Activity) -> None:
        """What happens from now on."""
        self._now = activity
        if self._live:
            self._live.refresh()

    def print(self, line: str) -> None:
        """A line of the log."""
        self._printed = time.monotonic()
        if self._live:
            self._live.console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Shows nothing more by the clock."""
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
"""This process's. Nothing but its lines until it is opened, on rank 0 of a recipe's run."""
