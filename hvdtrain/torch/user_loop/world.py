"""`join`, which gives a program's own loop its ranks."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from hvdtrain.core.compatibility import EngineSpec, check_plugin
from hvdtrain.core.recipe import Recipe, of_program
from hvdtrain.core.settings import TRACKERS
from hvdtrain.core.sharing import of_all
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES, Setup
from hvdtrain.errors import HvdtrainError, LoopError, WorldError
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks import world as ranks
from hvdtrain.ranks.agreement import named
from hvdtrain.run import engine as engines
from hvdtrain.run.process import RankProcess, end, start
from hvdtrain.run.session import Best, intervals_of, open_program
from hvdtrain.run.setup import connect, keep_memory
from hvdtrain.terminal import SCREEN
from hvdtrain.torch import models
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.objective import of_set
from hvdtrain.torch.state import State
from hvdtrain.torch.trainer import Buffers, Replica, opened
from hvdtrain.torch.user_loop.gather import is_array, kind, over_ranks, rows
from hvdtrain.torch.user_loop.hooks import LoopHooks
from hvdtrain.torch.user_loop.kept import the_scaler
from hvdtrain.torch.user_loop.program import Program, given_settings
from hvdtrain.torch.user_loop.run import Run

CHOICES = {
    "engine": ("auto", *(name for name, row in ENGINES.items() if "torch" in row.classes and not row.devices)),
    "device": ("auto", "cpu", "cuda"),
}
"""The values that `join` takes, and HVDTRAIN_ENGINE and HVDTRAIN_DEVICE."""


@contextlib.contextmanager
def join(
    engine: str = "auto", device: str = "auto", *, compression: str = "none", insecure_rendezvous: bool = False
) -> Iterator["World"]:
    """Joins this process with the other ranks, until the block ends, and watches over all of them.

    The ranks are those of horovodrun, mpirun, srun or torchrun; without a launcher there is one rank.

    An HvdtrainError inside the block ends the process as it does for `python -m hvdtrain.torch`: with one line on
    stderr and the error's exit code. Any other exception is reported to the other ranks and raised again.

    Args:
        engine: local, horovod or ddp. auto is HVDTRAIN_ENGINE; where that is not set, local for one process and horovod
            for several.
        device: cpu or cuda. auto is HVDTRAIN_DEVICE; where that is not set, a GPU if there is one.
        compression: the type in which gradients are communicated: none (their own), fp16, fp64, or with ddp bf16.
        insecure_rendezvous: lets ranks join that cannot prove that they belong to this run.

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
        process = start(insecure=insecure_rendezvous)
    except HvdtrainError as error:
        end(error.exit_code)
    with process:
        joining, process.output = process.world, "folder to world.run"
        settings, row = _chosen(joining.topology, os.environ, engine, device, compression)
        process.journal.enter("rendezvous")
        connect(joining, row)
        with ranks.joined(joining, "torch", row.name, os.environ):
            keep_memory(settings.device)
            setup = Setup(settings, joining.topology, (), engines.endpoints(joining))
            library = opened(row.name, setup)
            chosen = named("recipe", {"engine": row.name, "device": settings.device, "compression": compression})
            with engines.joined(joining, process.journal, row.name, library, chosen):
                SCREEN.waiting("before the training")
                world = World(process, row.name, library, compression)
                with contextlib.ExitStack() as closing:
                    closing.push(lambda kind, *_: world.close(kind))
                    try:
                        yield world
                    except SystemExit:
                        if (run := world._runs.last) and run.is_over:
                            world.finish()
                        raise
                    world.finish()
    if process.code:
        end(process.code)


def _chosen(
    topology: Topology, environ: Mapping[str, str], engine: str, device: str, compression: str
) -> tuple[Recipe, EngineSpec]:
    """The engine and its settings. Raises LoopError and WorldError."""
    given = {"engine": engine, "device": device}
    chosen = {
        key: environ.get(f"HVDTRAIN_{key.upper()}", value) if value == "auto" else value for key, value in given.items()
    }
    for key, value in chosen.items():
        if value not in CHOICES[key]:
            raise LoopError(f"{key} must be one of {', '.join(CHOICES[key])}, got {value!r}.")
    row = registry.choose(chosen["engine"], topology)
    if compression not in (known := row.compressions("torch")):
        raise LoopError(f"compression must be one of {', '.join(known)} with engine {row.name}, got {compression!r}.")
    if not row.launcher and topology.size > 1:
        raise WorldError(
            f"engine {row.name} trains one rank alone, but {topology.launcher} started {topology.size}; take horovod "
            "or ddp, or start one process."
        )
    if row.name == "horovod":
        check_plugin(topology, "torch", environ)
    return of_program(device=chosen["device"], compression=compression), row


class Runs:
    """The runs of a program in its ranks, one after another."""

    def __init__(self, process: RankProcess, name: str, engine: Engine, compression: str) -> None:
        self._process, self._name, self._engine, self._compression = process, name, engine, compression
        self._trained: dict[Path, torch.nn.Module] = {}
        """The model of each run, by the run's folder."""
        self.last: Run | None = None

    def end_last(self, folder: Path, model: torch.nn.Module) -> None:
        """Ends the run before one of this model in this folder. Raises LoopError where none may follow."""
        if self.last:
            if not (self.last.is_over or self.last.is_left):
                raise LoopError(
                    'the run before this one has epochs left; end it first, by run.stop("why") in its last epoch or by '
                    "break, or train both models as one Module."
                )
            self.last.finish()
            self.last.close()
        if self._trained.setdefault(folder.absolute(), model) is not model:
            raise LoopError(
                f"{folder} is the folder of another model's run in this program, which it would continue; give each "
                "run a folder of its own, as of each fold."
            )

    def begin(
        self, folder: Path, program: Program, intervals: Recipe, best: Best, trackers: Sequence[str], buffers: Buffers
    ) -> Run:
        """Begins to train the program in the folder; see `World.run`."""
        kept = State(program.model, program.optimizers, program.scaler, given=program.state)
        replica = Replica(self._engine, program.model, kept, buffers=buffers)
        run = open_program(folder, program, "torch", self._name, intervals, self._process, best, tuple(trackers))
        self.last = Run(LoopHooks(run, replica, program, best, self._compression), len(self._trained))
        return self.last


class World:
    """This rank among all ranks of a program; made by `join`.

    `rank` is this rank's number, from 0 to `size` - 1; `local_rank` is its number on its host. `device` is the
    torch.device on which it computes.

    Examples:
        >>> import hvdtrain.torch as ht
        >>> with ht.join() as world:
        ...     world.rank, world.size, world.is_rank_0, world.mean(total=30, count=40)
        (0, 1, True, 0.75)
    """

    def __init__(self, process: RankProcess, name: str, engine: Engine, compression: str) -> None:
        self.rank, self.size, self.device = engine.rank, engine.size, engine.device
        self.local_rank, self.is_rank_0 = process.topology.local_rank, engine.rank == 0
        self._engine, self._runs = engine, Runs(process, name, engine, compression)

    def print(self, *values: object) -> None:
        """Prints on rank 0 alone."""
        if self.is_rank_0:
            print(*values, flush=True)

    def sum(self, value: Any) -> Any:
        """The sum of the ranks' numbers, a float; or of their NumPy arrays or tensors of one shape, of the same kind,
        dtype and device, with the gradient that `gather` explains. Every rank calls it, and has the same sum. Raises
        LoopError."""
        return self._shared(_summed, value)

    def gather(self, value: Any) -> Any:
        """The ranks' NumPy arrays or tensors, joined by rank along their first axis, whose lengths may differ; of
        dictionaries, lists and tuples with arrays the same of each value; of numbers, texts, None, and dictionaries and
        lists of these, the list of the ranks' values. Every rank calls it. Raises LoopError.

        A gradient flows back: a rank's own part gets the sum of the gradients that all ranks' losses have for it. As
        gradients are averaged over the ranks, they are those of the mean of the ranks' losses, which is the loss of one
        process that has the whole batch; multiply no loss by the number of ranks. Where a rank puts its own tensor in
        the place of its part, its own loss reaches that tensor directly, and once too.
        """
        return self._shared(over_ranks, value)

    def _shared(self, function: Callable[[Any, Engine], Any], value: Any) -> Any:
        result = function(value, self._engine)
        averager = self._runs.last and self._runs.last._averager
        if averager and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(result)):
            averager.is_forward_shared = True
        return result

    def metric(self, metric: Any) -> Any:
        """The metric of torchmetrics, or an object for a pair (update, compute), whose update(outputs, targets) and
        reset() are this rank's and whose compute() is over all: every rank calls it. Raises LoopError, RecipeError."""
        if (made := of_set(metric, name := type(metric).__name__, self._engine)) is not None:
            return made
        rule = "a pair (update, compute) or a metric of torchmetrics"
        raise LoopError(f"world.metric takes {rule}, got a {name}; for a mean call world.mean.")

    def mean(self, total: Any, count: Any) -> float:
        """The exact mean over the ranks: the sum of their totals, divided by the sum of their counts; NaN where all
        counts are 0. Every rank calls it."""
        total, count = self._engine.sum(np.array([float(total), float(count)])).tolist()
        return total / count if count else float("nan")

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same model, in which every BatchNorm1d, 2d and 3d now normalises by the statistics of the global batch.
        To be called before the optimizer is made. Raises RecipeError for a layer that cannot be changed so."""
        return models.with_sync_batch_norm(model, self._engine)

    def run(
        self,
        folder: str | Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | Sequence[torch.amp.GradScaler] | None = None,
        state: Mapping[str, Any] | None = None,
        seed: int = 0,
        highest: str | None = None,
        lowest: str | None = None,
        log_every_steps: int = 20,
        check_replicas_every_steps: int = 100,
        checkpoint_every_steps: int | Literal["auto"] | None = None,
        checkpoint_every_epochs: int = 1,
        keep_checkpoints: int = 2,
        mtbf_hours: float | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        buffers: Buffers = "local",
        sample_check: Literal["on", "off"] = "on",
    ) -> Run:
        """Begins to train this model in this folder, or continues from the folder's last checkpoint. Every rank calls
        it.

        All ranks get rank 0's weights, buffers and optimizer state. From now on each backward() averages the gradients
        over the ranks. The objects of the program are not wrapped, and their states are part of each checkpoint.

        Args:
            folder: the run folder, for checkpoints, metrics and logs.
            model: a model whose parameters and buffers are on this rank's device.
            optimizer: the optimizer of the model, or a tuple of several. Modules beside the model whose parameters they
                update, such as a loss with centers, are trained and kept with it.
            scheduler: its learning-rate scheduler, or a tuple of several; each has state_dict() and load_state_dict().
            scaler: the loss scale of float16, or a tuple of them; left out, the only one that the program has made.
            state: what else the program keeps, by name, the same on all ranks: objects with state_dict() and
                load_state_dict(), such as an average of the weights; tensors and arrays; dictionaries and lists of
                them, of numbers and texts, which the program changes in place.
            seed: the seed of the samples' order and of each step's random numbers.
            highest: the reported metric that is highest in the best checkpoint, which is kept beside the newest.
            lowest: the reported metric that is lowest in it. By default the best checkpoint has the lowest valid_loss,
                or where that is not reported, the lowest training loss.
            log_every_steps: steps between two lines of the log.
            check_replicas_every_steps: steps between two comparisons of the ranks' weights; they also come after
                updates 1, 2, 4 and so on.
            checkpoint_every_steps: steps between two checkpoints inside of an epoch. With auto the run chooses the
                interval by the cost of a checkpoint and `mtbf_hours`.
            checkpoint_every_epochs: epochs between two checkpoints.
            keep_checkpoints: the number of newest checkpoints that are kept.
            mtbf_hours: mean hours between two failures of the job.
            trackers: the names that --tracker takes; () for none.
            buffers: the values that buffers outside of BatchNorm have after each step: those of each rank (local, until
                the epoch ends), the average over the ranks, or rank_0's.
            sample_check: whether a few examples of each set are read and compared over the ranks and with the
                checkpoint; off for sets that are slow to read or that reading changes.

        Raises LoopError where the ranks could not train as one, OutputError and CheckpointError.
        """
        intervals, best = intervals_of(locals()), (highest, lowest)
        self._runs.end_last(Path(folder), model)
        if wrong := next((name for name in trackers if name not in TRACKERS), None):
            raise LoopError(f"trackers must be of {', '.join(TRACKERS)}, got {wrong!r}.")
        if buffers not in get_args(Buffers):
            raise LoopError(f"buffers must be one of {', '.join(get_args(Buffers))}, got {buffers!r}.")
        first, *more = _all(scaler) or (the_scaler() or torch.amp.GradScaler(enabled=False),)
        given = {f"scaler_{number}": each for number, each in enumerate(more, 2)} | dict(state or {})
        program = Program(model, _all(optimizer), _all(scheduler), first, seed, given, self.size == 1)
        program.check_program(self.device)
        # Now, as the checkpoint's settings replace them below.
        program.began = given_settings(program.optimizers, program.schedulers)
        return self._runs.begin(Path(folder), program, intervals, best, trackers, buffers)

    def finish(self) -> None:
        """Ends the run, if there is one; `join` calls it at the end of its block."""
        if self._runs.last:
            self._runs.last.finish()

    def close(self, error: type[BaseException] | None = None) -> None:
        """Closes the run's files, with the error that has ended the block, if any."""
        if self._runs.last:
            self._runs.last.close(error)


def _summed(value: Any, engine: Engine) -> Any:
    if not is_array(value):
        return float(engine.sum(np.array([float(value)]))[0])
    own = torch.as_tensor(value)
    kinds = of_all(kind(own), engine)
    if kinds.count(kinds[0]) < len(kinds) or own.dtype == torch.bool:
        raise LoopError(
            f"world.sum adds numbers of one dtype and shape on all ranks, got {kinds}; convert them before."
        )
    if kinds[0][2:]:
        return rows(own, engine).to(torch.promote_types(own.dtype, torch.float64)).sum(0).to(own.dtype)
    own = own.detach()
    parts = torch.view_as_real(own.to(torch.complex128)) if own.is_complex() else own
    wide = (parts.double() if parts.is_floating_point() else parts.long()).cpu()
    total = torch.as_tensor(engine.sum(np.ascontiguousarray(wide.numpy()).ravel())).reshape(wide.shape)
    total = torch.view_as_complex(total) if own.is_complex() else total
    result = total.to(own.device, own.dtype)
    if wide.dtype == torch.int64 and not torch.equal(result.cpu().long(), total):
        raise LoopError(f"world.sum: the sum is too large for {own.dtype}; convert to int64 before.")
    return result.numpy() if isinstance(value, np.ndarray) else result


def _all(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)
