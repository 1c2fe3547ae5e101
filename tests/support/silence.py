"""How long a command says nothing at a terminal, by hand: `python tests/support/silence.py --columns 80 -- COMMAND`.

Runs COMMAND in a terminal of its own (tmux) and looks at the screen five times a second. Prints when the first words
stood there, the longest time in which nothing on the screen changed, the exit code, and the last screen.
`--keep FOLDER` leaves there a screen of each second, to be looked at. The exit code is 1 where a limit is broken: 1 s
to the first words, 5 s of silence.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FIRST_WORDS, SILENCE = 1.0, 5.0
INTERVAL = 0.2


class Seen(NamedTuple):
    """Seconds until the first words, and of the longest silence with when it began; the exit code; the last screen."""

    first_words: float
    silence: float
    began: float
    code: int
    screen: str


class Terminal:
    """A tmux server with one window, which stays when its command has ended."""

    def __init__(self, columns: int, lines: int, command: Sequence[str], folder: Path) -> None:
        self.socket, self.code = f"silence-{os.getpid()}", folder / "code"
        shell = f"{shlex.join(command)}; echo $? > {shlex.quote(str(self.code))}; exec sleep infinity"
        size = ["-x", str(columns), "-y", str(lines)]
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, shell, ";", "set", "-g", "status", "off")

    def tmux(self, *arguments: str) -> str:
        """What tmux prints."""
        command = ["tmux", "-L", self.socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def screen(self) -> str:
        """The lines that stand in the window."""
        return self.tmux("capture-pane", "-p").rstrip()

    def ended(self) -> int | None:
        """The command's exit code; None while it runs."""
        text = self.code.read_text() if self.code.exists() else ""
        return int(text) if text else None


@contextlib.contextmanager
def terminal(columns: int, lines: int, command: Sequence[str]) -> Iterator[Terminal]:
    """The command in a terminal of that size, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        opened = Terminal(columns, lines, command, Path(folder))
        try:
            yield opened
        finally:
            opened.tmux("kill-server")


def watch(columns: int, lines: int, command: Sequence[str], keep: Path | None = None) -> Seen:
    """Runs the command to its end and looks at its screen all the while."""
    began = changed = time.monotonic()
    before, longest, words, code = "", (0.0, 0.0), None, None
    with terminal(columns, lines, command) as window:
        while code is None:
            code = window.ended()
            screen, now = window.screen(), time.monotonic()
            longest = max(longest, (now - changed, changed - began))
            if screen != before:
                changed, before, words = now, screen, words or now - began
            if keep:
                (keep / f"{now - began:04.0f}.txt").write_text(screen + "\n")
            time.sleep(INTERVAL)
    return Seen(words or now - began, *longest, code, before)


def main() -> int:
    """Watches one command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="new or empty folder for a screen of each second")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # so that the terminal is closed
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    seen = watch(options.columns, options.lines, options.command, options.keep)
    print(seen.screen)
    print(f"--\nfirst words after {seen.first_words:.1f} s; longest silence {seen.silence:.1f} s, ", end="")
    print(f"from {seen.began:.1f} s on; exit code {seen.code}; {options.columns} columns")
    return int(seen.first_words > FIRST_WORDS or seen.silence > SILENCE)


if __name__ == "__main__":
    sys.exit(main())
