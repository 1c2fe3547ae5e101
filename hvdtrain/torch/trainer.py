"""The PyTorch part of a run on one rank: engine, model, updates, data and validation."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from hvdtrain import processors
from hvdtrain.core import user_code
from hvdtrain.core.metrics import Totals, check_names
from hvdtrain.core.network import EXAMPLES, counted_examples, end_of
from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress, train_requests, valid_requests
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.engines import registry
from hvdtrain.engines.registry import Setup
from hvdtrain.errors import OutOfMemoryError, PlanError, RecipeError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.stacks import takes_long
from hvdtrain.run import engine as engines
from hvdtrain.run import trainer
from hvdtrain.run.run import Run
from hvdtrain.torch import models, optimizers, resumable
from hvdtrain.torch.averaging import Averager
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine, process_settings, seed, take_threads
from hvdtrain.torch.engines.cuda_graph import is_one_graph, record_cuda_graph
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.finetuning import weights
from hvdtrain.torch.finetuning.parts import Freezing
from hvdtrain.torch.memory import Kept, lack
from hvdtrain.torch.objective import Objective, StepOutput
from hvdtrain.torch.profiler import Profiler
from hvdtrain.torch.state import State
from hvdtrain.torch.step import NOTHING, Step, autocast, norm_of, unwatched
from hvdtrain.torch.user_loop.gather import JOINED
from hvdtrain.torch.user_loop.kept import Looks

Buffers = Literal["local", "average", "rank_0"]


class Replica(trainer.Replica):
    """A rank's model, for every kind of loop."""

    engine: Engine
    state: State
    own_hooks = 1
    """How many hooks a parameter has of ours, on several ranks: the averager's."""
    remedy = 'give buffers: average or rank_0 (world.run: buffers="average")'

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        state: State,
        *,
        same_statistics: bool = False,
        buffers: Buffers = "local",
    ) -> None:
        """`same_statistics`: whether BatchNorm has the same statistics on all ranks in every step. `buffers`: which
        value the other buffers get after each update."""
        self.engine, self.model, self.state, self.meter = engine, model, state, Meter(engine.device)
        self._same_statistics, self._buffers, self.whole = same_statistics, buffers, resumable.whole(model)
        self.averager: Averager | None = None
        """What averages the gradients over the ranks; None on one rank."""
        self.notes: list[str] = []
        """Lines of the log on the loss, after the first step."""

    def totals(self) -> Totals:
        return self.meter.take()

    def gradient_norm(self) -> float | None:
        return norm_of(self.model.parameters())

    def average_statistics(self) -> None:
        models.average_statistics(self.whole, self.engine)

    def share_buffers(self) -> None:
        """Called after each update, in which the ranks may have changed their buffers by their own examples."""
        if self._buffers != "local":
            models.share_buffers(self.whole, self.engine, self._buffers)

    def after_first_step(self) -> list[str]:
        self.state.values()  # which raises where no checkpoint could hold them
        named, among = models.other_buffers(self.whole), (self.engine.rank, self.engine.size, self.engine.sum)
        unlike = agreement.of_unlike_buffers(named, models.digest, among, "buffers", "rank 0's", self.remedy)
        return self.notes + unlike + self._of_hooks()

    def _of_hooks(self) -> list[str]:
        """A line for the log on hooks of the user's that see a gradient before it is averaged."""
        named = [
            name
            for name, each in (self.model.named_parameters() if self.averager else ())
            if each._backward_hooks or len(each._post_accumulate_grad_hooks or ()) > self.own_hooks
        ]
        rule = "gradients before they are averaged over the ranks: what is not linear in them, as clipping, depends on"
        remedy = "the number of ranks; take optimizer.register_step_pre_hook"
        return [f"hooks of {', '.join(named[:4])} see each rank's {rule} {remedy}"] if named else []

    def fingerprints(self) -> list[int]:
        return [models.fingerprint(self.model, with_statistics=self._same_statistics)]

    settings = staticmethod(process_settings)

    def learns(self) -> Hashable:
        return self.averager.parameters.learning if self.averager else ()

    def watch(self, enabled: bool) -> None:
        if self.averager:
            self.averager.evidence.watch(enabled, self.model.parameters() if enabled else ())

    @property
    def cause(self) -> str:
        return self.averager.evidence.cause if self.averager else "weights"


class RecipeReplica(Replica):
    """A rank's model of a recipe, and its updates; `step` is what `Step` is given beside the plan's values."""

    profiler: Profiler | None = None
    parts: int = 1
    dataset: Dataset
    _note: Callable[[str], None]

    def __init__(self, plan: Plan, classes: int | None, engine: Engine, *, is_new: bool = True, **step: Any) -> None:
        """`is_new`: whether no checkpoint will replace the weights, as rank 0 knows."""
        self.plan, self.recipe = plan, plan.recipe
        torch.backends.cudnn.benchmark = self.recipe.cudnn_benchmark
        model = models.build(self.recipe, classes, engine, plan.end)
        begins = is_new and self.recipe.init_from and engine.rank == 0  # which broadcasts its weights
        self.begun = [weights.start(self.recipe, model)] if begins else []
        self._first, self._freezing = Totals(0.0, 0.0), Freezing(self.recipe, model)
        step["global_batch"] = plan.global_batch
        self.step = Step(self.recipe, engine, model, plan.schedule.peak_lr, plan.weight, **step)
        self.step.objective.classes = classes
        self.step.objective.weigh(plan.class_weights, engine.device)
        name, owner = "recipe step" if self.recipe.step else "recipe loss", self.step.objective.owner
        held = owner.to(engine.device).parameters() if isinstance(owner, torch.nn.Module) else ()
        if any(each.requires_grad for each in held):
            raise RecipeError(
                f"{name.partition(' ')[2]} {self.recipe.step or self.recipe.loss} has parameters that learn, and a "
                "recipe's optimizer updates those of the model alone; put them into the model, and name a step in "
                "place of a loss, or freeze them."
            )
        whole = resumable.Whole(model, {name: owner} if isinstance(owner, torch.nn.Module) else {})
        state = State(whole, [self.step.optimizer], self.step.scaler, self.step.ema)
        is_same = self.recipe.batch_norm != "local"
        super().__init__(engine, model, state, same_statistics=is_same, buffers=self.recipe.buffers)
        self.averager, self.notes = getattr(engine, "averager", None), self.step.objective.notes
        self.own_hooks += bool(self.step.noise)
        self.whole, self._looks, self._owners = whole, Looks(whole, ()), {"the model": model, name: owner}
        self._looks.attributes(self._owners)

    def begin_epoch(self, epoch: int) -> None:
        """Sets training mode, and what learns in this epoch."""
        models.training_mode(self.model, self.recipe)
        self._freezing.enter(epoch)
        optimizers.start(self.recipe, self.step.optimizer)

    def update(self, batch: Sequence[Any], lr: float, step: int) -> None:
        seed(self.recipe.seed, step, self.engine.rank, self.engine.device)
        self.step.set_lr(lr)
        self.step.fitting.parts, self.step.fitting.most = self.parts, self.plan.micro_batch
        try:
            made = self.step.update(batch)
        except Exception as error:
            if asked := lack(error):
                raise self._out_of_memory(asked, step) from None
            raise
        self.parts = self.step.fitting.parts
        for seen in made:
            self.meter.add(seen)
            if self.recipe.init_from and step == 0:
                self._first += Totals(float(seen.loss) * seen.count, seen.count)
        self.share_buffers()
        if self.profiler:
            for line in self.profiler.step():
                self._note(line)

    def _out_of_memory(self, asked: str, step: int) -> OutOfMemoryError:
        r, device = self.recipe, self.engine.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else processors.peak_memory()
        keys = ["checkpoint_activations: true"] * (not r.checkpoint_activations)
        keys += ["fit_memory: true"] * (not r.fit_memory)
        where = trainer.Place(self.plan, self.dataset, self.engine.rank, step)
        return trainer.out_of_memory(where, asked, peak, kept_by_module, keys)

    def gradient_norm(self) -> float | None:
        return self.step.gradient_norm()

    def gradient_noise(self) -> NDArray[np.float64] | None:
        return self.step.noise.take() if self.step.noise else None

    def after_first_step(self) -> list[str]:
        groups = optimizers.lr_groups(self.step.optimizer, self.step.lr_ratios)
        lines = [f"LR of the optimizer's groups: {groups}"] if groups else []
        lines += trainer.first_loss(self.recipe, self._first, self.engine.sum)
        return [*lines, *(self.step.unmet or ()), *super().after_first_step(), *self._looks.attributes(self._owners)]

    def averaged(self) -> AbstractContextManager[None]:
        """Within the block the model has the weights with which a run validates."""
        return self.step.ema.swapped_in() if self.step.ema else contextlib.nullcontext()


class Trainer(RecipeReplica, trainer.Trainer):
    """Trains the model of a recipe's run."""

    def __init__(self, run: Run, engine: Engine) -> None:
        recipe, self.dataset = run.recipe, run.dataset
        name = "local" if type(engine) is LocalEngine else run.engine
        self.profiler = Profiler(run.folder.path, engine.device) if run.folder and recipe.profile else None
        self._phase = self.profiler.phase if self.profiler else unwatched
        record = record_cuda_graph if is_one_graph(recipe, name, engine.device) else None
        how: dict[str, Any] = {"phase": self._phase, "in_one": name == "local", "record": record}
        how["is_new"] = run.resume.checkpoint is None
        super().__init__(run.plan, run.dataset.classes, engine, **how)
        self.loader = Loader(recipe, run.dataset, engine.device)
        self.loader.samples = run.samples

    def batches(self, progress: Progress) -> Iterator[list[Any]]:
        """This rank's micro-batches, of each update that is left of the epoch."""
        self.begin_epoch(progress.epoch)
        updates, requests = train_requests(self.plan, progress, self.engine.rank)
        batches = self.loader.batches(self.dataset.train, requests)
        for _ in updates:
            with self._phase("data"):
                batch = [next(batches) for _ in range(self.recipe.accumulation_steps)]
            yield batch

    @takes_long
    def validate(self) -> Totals:
        """The totals of this rank's part of the validation set, no example of which is repeated or padded."""
        self.model.eval()
        with self.averaged(), torch.inference_mode(), autocast(self.recipe, self.engine.device):
            for batch in self.loader.batches(self.dataset.valid, valid_requests(self.plan, self.engine.rank)):
                self.meter.add(self.step.evaluate(batch))
        return self.step.objective.metrics.added_to(self.totals())

    @contextlib.contextmanager
    def profiled(self, note: Callable[[str], None]) -> Iterator[None]:
        self._note = note
        with self.profiler.trace if self.profiler else contextlib.nullcontext():
            yield
        for line in self.profiler.lacking() if self.profiler else ():
            note(line)


class Meter:
    """Adds up loss, examples and metrics on the device, so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] | None = None
        self._loss, self._count = self._zero(), 0
        self._metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, seen: StepOutput) -> None:
        """Adds a batch. Raises RecipeError where its metrics have other names than those of the batches before."""
        names = sorted(seen.metrics)
        if self._names is None:
            self._names = names
            self._metrics = {name: (self._zero(), self._zero()) for name in names}
        check_names(names, self._names)
        self._loss.add_(seen.loss, alpha=seen.count)
        self._count += seen.count
        for name, pair in seen.metrics.items():
            for total, of_batch in zip(self._metrics[name], pair, strict=True):
                total.add_(of_batch)

    def take(self) -> Totals:
        """The sums since the last call."""
        sums = [self._loss, *(total for pair in self._metrics.values() for total in pair)]
        loss, *rest = torch.stack(sums).tolist()
        totals = Totals.from_numbers(self._metrics, [loss, self._count, *rest])
        self._count = 0
        for total in sums:
            total.zero_()
        return totals

    @torch.inference_mode(False)  # in which the names of the metrics may be seen first
    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)


def engine_of(run: Run) -> AbstractContextManager[Engine]:
    """See `hvdtrain.run.engine.of_run`."""
    return engines.of_run(run, open_engine)


def open_engine(run: Run) -> Engine:
    """The engine of the run, joined with the other ranks and bound to its device."""
    return opened(run.engine, engines.setup_of(run))


def opened(name: str, setup: Setup) -> Engine:
    """The engine of that name, joined with the other ranks and bound to its device."""
    take_threads(setup.topology)
    engine: Engine = registry.load(name, "torch").open(setup)
    JOINED[:] = [engine]
    return engine


def kept_by_module(recipe: Recipe, dataset: Dataset, *, examples: int) -> list[tuple[str, int]]:
    """How many bytes of so many examples forward keeps for backward, in training; of the model, whose name is "", and
    of its modules, the largest first.

    Counts EXAMPLES of them, on the device "meta" in float32 and float64, on the CPU in mixed precision and where the
    code needs numbers. Raises HvdtrainError where it fails there too.
    """
    device = torch.device("cpu")
    objective = Objective(recipe, LocalEngine(device))
    batch: Any = next(Loader(recipe, dataset, device).batches(dataset.train, [counted_examples(dataset)]))

    def counted(where: str) -> list[tuple[str, int]]:
        with torch.device(where):
            model = models.build(alone, dataset.classes, LocalEngine(torch.device(where)), end_of(recipe, dataset))
        models.training_mode(model, recipe)
        moved = tree_map_only(torch.Tensor, lambda one: one.to(where), batch)
        with autocast(recipe, device), Kept(model) as kept:
            objective.measure(objective.forward(model, objective.inputs(moved)), moved, training=True)
        return [(name, size * examples // EXAMPLES) for name, size in (("", kept.bytes), *kept.modules())]

    alone = recipe.model_copy(update={"batch_norm": "frozen" if recipe.batch_norm == "frozen" else "local"})
    if autocast(recipe, device) is NOTHING:
        with contextlib.suppress(Exception):  # an operation that the device does not have
            return counted("meta")
    try:
        return counted("cpu")
    except Exception as error:
        raise PlanError(f"{recipe.step or recipe.model}: {user_code.reason(error)}") from error
