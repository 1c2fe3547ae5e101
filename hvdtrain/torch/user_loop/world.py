"""`join`: the ranks of a program that keeps its own loop."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from hvdtrain.core.compatibility import EngineSpec, check_plugin
from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import UserSampling
from hvdtrain.core.settings import UserEngineSettings, UserIntervals
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES, Setup
from hvdtrain.errors import HvdtrainError, LoopError, WorldError
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import world as ranks
from hvdtrain.ranks.agreement import named
from hvdtrain.record.trackers import MODULES
from hvdtrain.run import engine as engines
from hvdtrain.run.ending import Ending, begin, end
from hvdtrain.run.main import connect, keep_memory
from hvdtrain.run.session import Best, UserHooks, in_programs_words, intervals_of, open_program
from hvdtrain.torch import models, resumable
from hvdtrain.torch.averaging import LoopAverager
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.state import State
from hvdtrain.torch.trainer import Buffers, Replica, opened
from hvdtrain.torch.user_loop.program import Program, of_batch_norms
from hvdtrain.torch.user_loop.run import Run

CHOICES = {
    "engine": ("auto", *(name for name, row in ENGINES.items() if "torch" in row.classes and not row.devices)),
    "device": ("auto", "cpu", "cuda"),
}
"""What `join` may be given, or HVDTRAIN_ENGINE and HVDTRAIN_DEVICE."""
TRACKERS = ("tensorboard", *MODULES)


@contextlib.contextmanager
def join(
    engine: str = "auto", device: str = "auto", *, compression: str = "none", insecure_rendezvous: bool = False
) -> Iterator["World"]:
    """This process's world until the end of the block: its rank, its device, and the watch over all ranks.

    Ranks are those of horovodrun, mpirun, srun or torchrun; without a launcher there is one. `engine` is local, horovod
    or ddp, and auto takes HVDTRAIN_ENGINE, else local for one process and horovod for several; `device` is cpu or cuda,
    and auto takes HVDTRAIN_DEVICE, else a GPU where there is one. `compression` of communicated gradients: none, fp16,
    bf16 (ddp) or fp64.

    An HvdtrainError inside the block ends the process, as `python -m hvdtrain.torch` would: one line on stderr and the
    error's exit code. Another exception passes through, once the other ranks know of it.

    Examples:
        >>> import hvdtrain.torch as ht
        >>> with ht.join() as world:
        ...     world.print(f"rank {world.rank} of {world.size}")
        rank 0 of 1
    """
    try:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LoopError(
                "a process that reads data imports the program: put what it does below if __name__ == '__main__'."
            )
        ending = begin(insecure=insecure_rendezvous)
    except HvdtrainError as error:
        end(error.exit_code)
    with ending:
        joining = ending.world
        settings, row = _chosen(joining.topology, os.environ, engine, device, compression)
        ending.journal.enter("rendezvous")
        connect(joining, row)
        with ranks.joined(joining, "torch", row.name, os.environ):
            keep_memory(settings.device)
            setup = Setup(settings, joining.topology, (), engines.endpoints(joining))
            own = opened(row.name, setup)
            chosen = named("recipe", {"engine": row.name, "device": settings.device, "compression": compression})
            with engines.joined(joining, ending.journal, row.name, own, own.rank, own.size, chosen):
                world = World(ending, row.name, own, compression)
                with contextlib.ExitStack() as closing:
                    closing.push(lambda kind, *_: world.close(kind))
                    yield world
                    world.finish()
    if ending.code:
        end(ending.code)


def _chosen(
    topology: Topology, environ: Mapping[str, str], engine: str, device: str, compression: str
) -> tuple[UserEngineSettings, EngineSpec]:
    """The engine and what it is opened with. Raises LoopError and WorldError."""
    given = {"engine": engine, "device": device}
    chosen = {
        key: environ.get(f"HVDTRAIN_{key.upper()}", value) if value == "auto" else value for key, value in given.items()
    }
    for key, value in chosen.items():
        if value not in CHOICES[key]:
            raise LoopError(f"{key} must be one of {', '.join(CHOICES[key])}, got {value!r}.")
    row = registry.choose(chosen["engine"], topology.launcher)
    if compression not in row.compressions:
        raise LoopError(
            f"compression must be one of {', '.join(row.compressions)} with engine {row.name}, got {compression!r}."
        )
    if not row.launcher and topology.size > 1:
        raise WorldError(
            f"engine {row.name} trains one rank alone, but {topology.launcher} started {topology.size}; take horovod "
            "or ddp, or start one process."
        )
    if row.name == "horovod":
        check_plugin(topology, "torch", environ)
    return UserEngineSettings(device=chosen["device"], compression=compression), row  # type: ignore[arg-type]


class World:
    """The ranks of a program, as one of them sees them; made by `join`.

    Examples:
        >>> import hvdtrain.torch as ht
        >>> with ht.join() as world:
        ...     world.rank, world.size, world.is_rank_0, world.mean(total=30, count=40)
        (0, 1, True, 0.75)
    """

    def __init__(self, ending: Ending, name: str, engine: Engine, compression: str) -> None:
        self.rank, self.size, self.device = engine.rank, engine.size, engine.device
        self.local_rank, self.is_rank_0 = ending.topology.local_rank, engine.rank == 0
        self._ending, self._name, self._engine, self._compression = ending, name, engine, compression
        self._run: Run | None = None
        self._trained: dict[Path, torch.nn.Module] = {}
        """The model of each run, by its folder."""

    def print(self, *values: object) -> None:
        """Prints on rank 0 alone."""
        if self.is_rank_0:
            print(*values, flush=True)

    def sum(self, value: Any) -> float:
        """The sum of the ranks' numbers, on every rank. Every rank calls it."""
        return float(self._engine.sum(np.array([float(value)]))[0])

    def mean(self, total: Any, count: Any) -> float:
        """The exact mean over the ranks: their totals, added, divided by their counts, added. Every rank calls it."""
        total, count = self._engine.sum(np.array([float(total), float(count)])).tolist()
        return total / count if count else float("nan")

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with every BatchNorm1d, 2d and 3d normalising by the statistics of the global batch; to be called
        before the optimizer is made."""
        return models.with_sync_batch_norm(model, self._engine)

    def run(
        self,
        folder: str | Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        highest: str | None = None,
        lowest: str | None = None,
        log_every_steps: int = 20,
        guard_every_steps: int = 100,
        checkpoint_every_steps: int | Literal["auto"] | None = None,
        checkpoint_every_epochs: int = 1,
        keep_checkpoints: int = 2,
        mtbf_hours: float | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        buffers: Buffers = "local",
    ) -> Run:
        """The training of this model, in this folder, from where its last checkpoint is; every rank calls it.

        All ranks get rank 0's weights, buffers and optimizer state, and from now on backward() leaves the gradients
        averaged over the ranks. `model` and `optimizer` stay what they are, and so do `scheduler` and `scaler`, whose
        states are part of each checkpoint; several optimizers or schedulers are given as a tuple. `seed` is that of
        the order of the samples and of the random numbers of each step. The best checkpoint, which is kept beside the
        newest, is that of the reported metric `highest` or `lowest`; left out: of the lowest valid_loss, where it is
        reported, else of the lowest training loss. With `checkpoint_every_steps` auto the run decides, by what a
        checkpoint costs and `mtbf_hours`, the mean hours between failures of the job. `trackers`: tensorboard, wandb,
        mlflow, or none of them. `buffers`: what the model's forward pass writes into buffers other than BatchNorm's is
        local to a rank until an epoch's end, or after each step the ranks' average, or rank_0's.

        Raises LoopError where the ranks would not train as one, OutputError, CheckpointError.
        """
        intervals = intervals_of(locals())
        if self._run and not (self._run.is_over or self._run.is_left):
            raise LoopError(
                'the run before this one has epochs left; end it first, by run.stop("why") in its last epoch or by '
                "break, or train both models as one Module."
            )
        self.finish()
        self.close()
        if self._trained.setdefault(Path(folder).absolute(), model) is not model:
            raise LoopError(
                f"{folder} is the folder of another model's run in this program, which it would continue; give each "
                "run a folder of its own, as of each fold."
            )
        if wrong := next((name for name in trackers if name not in TRACKERS), None):
            raise LoopError(f"trackers must be of {', '.join(TRACKERS)}, got {wrong!r}.")
        if buffers not in get_args(Buffers):
            raise LoopError(f"buffers must be one of {', '.join(get_args(Buffers))}, got {buffers!r}.")
        program = Program(model, _all(optimizer), _all(scheduler), scaler or torch.amp.GradScaler(enabled=False), seed)
        self._run = self._begin(Path(folder), program, intervals, (highest, lowest), tuple(trackers), buffers)
        return self._run

    def _begin(
        self,
        folder: Path,
        program: Program,
        intervals: UserIntervals,
        best: Best,
        trackers: tuple[str, ...],
        buffers: Buffers,
    ) -> Run:
        """The program's run, continued from its folder's last checkpoint. Raises HvdtrainError."""
        engine, model = self._engine, program.model
        program.check(engine.device)
        # Before a checkpoint's take their place.
        program.began = resumable.given_settings(program.optimizers, program.schedulers)
        state = State(model, program.optimizers, program.scaler)
        replica = Replica(engine, model, state, buffers=buffers)
        extent = UserSampling(0, 0, engine.size, program.seed, draws=DRAWS)
        with in_programs_words("world.run"):
            run = open_program(folder, program, "torch", self._name, intervals, self._ending, trackers)
            hooks = UserHooks(run, replica, extent, best)
        if engine.size > 1 and (note := of_batch_norms(model)):
            hooks.note(note)
        return Run(hooks, program, LoopAverager(model, engine, self._compression) if engine.size > 1 else None)

    def finish(self) -> None:
        """The block has come to its end: the run too."""
        if self._run:
            self._run.finish()

    def close(self, error: type[BaseException] | None = None) -> None:
        """Closes the run's files, which an error may have ended."""
        if self._run:
            self._run.close(error)


def _all(given: Any) -> tuple[Any, ...]:
    """One, several or none."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)
