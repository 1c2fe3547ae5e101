"""A run of somebody's own program, whoever's loop it has: its folder, its log and what its checkpoints say."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.core.compatibility import Framework
from hvdtrain.core.settings import OwnIntervals
from hvdtrain.core.totals import Totals
from hvdtrain.errors import DivergedError, HvdtrainError, LoopError
from hvdtrain.run import trackers
from hvdtrain.run.ending import Ending
from hvdtrain.run.folder import Identity, ResumePoint, hold, resume_point
from hvdtrain.run.reporter import Events, OwnReporter, Reporter
from hvdtrain.run.run import BaseRun
from hvdtrain.run.trackers import Trackers


class Program(Protocol):
    """What a run is asked for beside its tensors."""

    @property
    def identity(self) -> str:
        """What two runs must share to exchange checkpoints."""

    @property
    def state_bytes(self) -> int:
        """Of a checkpoint."""

    @property
    def lr(self) -> float:
        """The learning rate now."""

    def metadata(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it beside tensors, as JSON."""


@dataclass(frozen=True)
class OwnRun(BaseRun):
    """What the loop's hooks need of a program's run."""

    program: Program

    def metadata(self, *given: Any) -> dict[str, Any]:
        return {**super().metadata(*given), "program": self.program.metadata()}

    def _opened(self, folder: Path, events: Events | None, step: int, to_trackers: Trackers) -> Reporter:
        return OwnReporter(folder, events, step, trackers=to_trackers)

    def check_finite(self, totals: Totals, step: int) -> None:
        if not math.isfinite(totals.loss):
            raise DivergedError(
                f"the training loss is {totals.loss} at step {step}; lower the learning rate (now "
                f"{self.program.lr:g}), warm it up, or clip the gradients."
            )


def open_own(
    path: Path,
    program: Program,
    framework: Framework,
    engine: str,
    intervals: OwnIntervals,
    ending: Ending,
    names: tuple[str, ...] = ("tensorboard",),
) -> OwnRun:
    """The program's run; rank 0 holds its folder, and has its checkpoint. `names`: its trackers.
    Raises HvdtrainError."""
    trackers.check(names)
    if wrong := next((name for name, value in asdict(intervals).items() if value is not None and value < 1), None):
        raise LoopError(f"{wrong} must be at least 1, got {asdict(intervals)[wrong]}.")
    about = {"framework": framework, "engine": engine, "ranks": ending.topology.size, "model": program.identity}
    identity = Identity(
        path.name,
        framework,
        program.identity,
        (f"run         {path.name}: {program.identity}",),
        {"run.json": json.dumps(about, indent=1)},
        program.state_bytes,
        intervals.keep_checkpoints,
    )
    folder, resume = None, ResumePoint()
    if ending.topology.is_rank_0:
        folder = hold(path)
        resume = resume_point(folder, identity)
        ending.world.liveness.on_lost = lambda reason: folder.write_status("failed", error=reason)
    ending.began, ending.folder = True, folder
    return OwnRun(identity, intervals, engine, (), folder, resume, ending.world, program, trackers=names)


@contextlib.contextmanager
def in_own_words(taker: str) -> Iterator[None]:
    """A program has no flags: what remedies say of --output is said of the folder that `taker` is given."""
    try:
        yield
    except HvdtrainError as error:
        error.args = (re.sub(r"give (another|a writable) --output", rf"give {taker} \1 folder", str(error)),)
        raise
