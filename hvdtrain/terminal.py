"""What a person at a terminal sees while a command takes its time: one line that moves by the clock.

In a file or a pipe nothing of it appears.
"""

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Status:
    """A spinner, a text and the seconds so far at the bottom of the terminal, until the block ends.

    Nothing where stderr is no terminal. What the block prints stands above it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._progress: Progress | None = None

    def update(self, text: str) -> None:
        """Shows another text."""
        self._text = text
        if self._progress:
            self._progress.update(self._progress.task_ids[0], description=text)

    def print(self, line: str) -> None:
        """A line of the command's output, above the status."""
        if self._progress and sys.stdout.isatty():
            self._progress.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def __enter__(self) -> "Status":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.table import Column

            description = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
            console = Console(stderr=True)
            self._progress = Progress(
                SpinnerColumn(), description, TimeElapsedColumn(), console=console, transient=True, expand=True
            )
            self._progress.add_task(self._text, total=None)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None
