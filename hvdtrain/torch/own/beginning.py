"""How a program's run begins: its folder, its checkpoint, and one state on all ranks."""

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import OwnSampling
from hvdtrain.core.settings import OwnIntervals
from hvdtrain.run.ending import Ending
from hvdtrain.run.loop import Hooks
from hvdtrain.run.own import in_own_words, open_own
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.meter import Meter
from hvdtrain.torch.own import notes, settings
from hvdtrain.torch.own.gradients import LoopAverager
from hvdtrain.torch.own.order import Best
from hvdtrain.torch.own.program import Program
from hvdtrain.torch.own.run import Run
from hvdtrain.torch.state import State
from hvdtrain.torch.trainer import Buffers, Replica


@dataclass(frozen=True)
class Place:
    """Where a program's run is: its folder, its trackers, and the ranks that train it."""

    folder: Path
    trackers: tuple[str, ...]
    ending: Ending
    engine: str
    own: Engine
    compression: str
    buffers: Buffers = "local"


def begin_run(place: Place, program: Program, intervals: OwnIntervals, best: Best) -> Run:
    """The program's run, continued from its folder's last checkpoint. Raises HvdtrainError."""
    program.check(place.own.device)
    program.began = settings.given(program.optimizers, program.schedulers)  # before a checkpoint's take their place
    state = State(program.model, program.optimizers, program.scaler)
    replica = Replica(place.own, program.model, state, Meter(place.own.device), buffers=place.buffers)
    with in_own_words("world.run"):
        run = open_own(place.folder, program, "torch", place.engine, intervals, place.ending, place.trackers)
        hooks = Hooks(run, replica, OwnSampling(0, 0, place.own.size, program.seed, draws=DRAWS))
    if hooks.resumed_from:
        note = program.restore(hooks.resumed_from["program"], hooks.progress.step)
        if note:
            hooks.note(note)
    if place.own.size > 1 and (note := notes.of_batch_norms(program.model)):
        hooks.note(note)
    averager = LoopAverager(program.model, place.own, place.compression) if place.own.size > 1 else None
    return Run(hooks, program, averager, best)
