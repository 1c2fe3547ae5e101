"""`python -m hvdtrain watch [RUN]`: a run, queued or running, at the terminal until it ends."""

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import pydantic
import tyro

from hvdtrain.core import flags
from hvdtrain.tools.watch import picture, target
from hvdtrain.tools.watch.frame import Frame
from hvdtrain.tools.watch.target import Target

SECONDS = 1.0
"""Between two looks into the folder."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Shows a run until it ends: progress, time left, slowest rank, last events, the SLURM job's state.

    The exit code is 0, or 1 where the run failed.
    """

    run: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(help="run folder, or a SLURM job's number; left out: the newest run in runs/", metavar="RUN"),
    ] = ""
    once: Annotated[bool, tyro.conf.arg(help="print it once and end, as where the output is no terminal")] = False


def main(argv: Sequence[str]) -> int:
    """Shows the run; the exit code. Raises RecipeError where there is none."""
    options = flags.parse(Options, "python -m hvdtrain watch", argv)
    watched = target.find(options.run)
    try:
        if options.once or not sys.stdout.isatty():
            return _once(watched)
        return _live(watched)
    except KeyboardInterrupt:
        return 0


def _once(watched: Target) -> int:
    from rich.console import Console

    frame = watched.frame(waits=True)
    Console().print(picture.of(frame, time.time()))
    return _code(frame)


def _live(watched: Target) -> int:
    from rich.live import Live

    frame = watched.frame()
    with Live(picture.of(frame, time.time(), live=True), auto_refresh=False) as live:
        while not frame.is_over:
            time.sleep(SECONDS)
            frame = watched.frame()
            live.update(picture.of(frame, time.time(), live=not frame.is_over), refresh=True)
    return _code(frame)


def _code(frame: Frame) -> int:
    return int(frame.state == "failed")
