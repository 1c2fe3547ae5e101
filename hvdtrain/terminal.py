"""What a person at a terminal sees while a command takes its time: one line that moves by the clock.

In a file or a pipe nothing of it appears.
"""

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SILENCE = 3.0
"""Seconds after which a status of lines prints another."""
LOOKS = 0.25


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
