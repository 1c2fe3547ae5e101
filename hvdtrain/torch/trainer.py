"""PyTorch's part of a run on one rank: model, updates, data and validation."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from hvdtrain.core.progress import Progress, train_requests, valid_requests
from hvdtrain.core.totals import Totals
from hvdtrain.run import guard
from hvdtrain.run.reporter import Events
from hvdtrain.run.run import Run
from hvdtrain.torch import devices, models
from hvdtrain.torch.compiling import record_cuda_graph
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.meter import Meter
from hvdtrain.torch.opening import is_one_graph
from hvdtrain.torch.profiling import Profiler
from hvdtrain.torch.state import State, lr_groups
from hvdtrain.torch.step import Step, autocast, norm_of, unwatched

Buffers = Literal["local", "average", "rank_0"]
REMEDY = 'give buffers: average or rank_0 (world.run: buffers="average")'


class Replica:
    """A rank's model, whoever makes the updates; see `hvdtrain.run.loop.Replica`."""

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        state: State,
        meter: Meter,
        *,
        same_statistics: bool = False,
        buffers: Buffers = "local",
    ) -> None:
        """`same_statistics`: whether the ranks' BatchNorm has the same statistics in every step. `buffers`: what
        becomes of the other buffers after each update."""
        self.engine, self.model, self.state, self.meter = engine, model, state, meter
        self._same_statistics, self._buffers = same_statistics, buffers
        self.notes: list[str] = []
        """What the first step's loss has shown, for the log."""

    def events(self, folder: Path, first_step: int) -> Events:
        from tensorboardX import SummaryWriter  # a second of imports, and rank 0's alone

        return SummaryWriter(str(folder), purge_step=first_step, write_to_disk=True)  # type: ignore[no-any-return]

    def totals(self) -> Totals:
        return self.meter.take()

    def gradient_norm(self) -> float | None:
        return norm_of(self.model.parameters())

    def average_statistics(self) -> None:
        models.average_statistics(self.model, self.engine)

    def share_buffers(self) -> None:
        """After an update, in which each rank may have changed its buffers by its own examples."""
        if self._buffers != "local":
            models.share_buffers(self.model, self.engine, self._buffers)

    def after_first_step(self) -> list[str]:
        names = models.unlike_buffers(self.model, self.engine)
        return self.notes + guard.of_unlike_buffers(names, "buffers", "rank 0's", REMEDY)

    def fingerprints(self) -> list[int]:
        return [models.fingerprint(self.model, with_statistics=self._same_statistics)]

    def settings(self) -> dict[str, Any]:
        return devices.settings()


class Trainer(Replica):
    """Trains a run's model; see `hvdtrain.run.loop.Trainer`."""

    def __init__(self, run: Run, engine: Engine) -> None:
        recipe, self.plan, self.dataset = run.recipe, run.plan, run.dataset
        self.recipe = recipe
        torch.backends.cudnn.benchmark = recipe.cudnn_benchmark
        model = models.build(recipe, run.dataset.classes, engine)
        name = "local" if type(engine) is LocalEngine else run.engine
        self.profiler = Profiler(run.folder.path, engine.device) if run.folder and recipe.profile else None
        self._phase = self.profiler.phase if self.profiler else unwatched
        self._note: Callable[[str], None] = lambda text: None
        self.step = Step(
            recipe,
            engine,
            model,
            self.plan.peak_lr,
            self.plan.weight,
            self._phase,
            in_one=name == "local",
            record=record_cuda_graph if is_one_graph(recipe, name, engine.device) else None,
        )
        self.step.objective.classes = run.dataset.classes
        state = State(model, [self.step.optimizer], self.step.scaler, self.step.ema)
        super().__init__(
            engine,
            model,
            state,
            Meter(engine.device),
            same_statistics=recipe.batch_norm != "local",
            buffers=recipe.buffers,
        )
        self.notes = self.step.objective.notes
        self.loader = Loader(recipe, run.dataset, engine.device)

    def batches(self, progress: Progress) -> Iterator[list[Any]]:
        """This rank's micro-batches of each update that is left of the epoch."""
        models.training_mode(self.model, self.recipe)
        updates, requests = train_requests(self.plan, progress, self.engine.rank)
        batches = self.loader.batches(self.dataset.train, requests)
        for _ in updates:
            with self._phase("data"):
                batch = [next(batches) for _ in range(self.recipe.accumulation_steps)]
            yield batch

    def update(self, batch: list[Any], lr: float, step: int) -> None:
        devices.seed(self.recipe.seed, step, self.engine.rank, self.engine.device)
        self.step.set_lr(lr)
        for seen in self.step.update(batch):
            self.meter.add(seen)
        self.share_buffers()
        if self.profiler:
            for line in self.profiler.step():
                self._note(line)

    def gradient_norm(self) -> float | None:
        return self.step.gradient_norm()

    def after_first_step(self) -> list[str]:
        groups = lr_groups(self.step.optimizer, self.step.lr_ratios)
        return [*([f"LR of the optimizer's groups: {groups}"] if groups else []), *super().after_first_step()]

    def validate(self) -> Totals:
        """Totals of this rank's part: no example twice or padded."""
        self.model.eval()
        averaged = self.step.ema.swapped_in() if self.step.ema else contextlib.nullcontext()
        with averaged, torch.inference_mode(), autocast(self.recipe, self.engine.device):
            for batch in self.loader.batches(self.dataset.valid, valid_requests(self.plan, self.engine.rank)):
                self.meter.add(self.step.evaluate(batch))
        return self.totals()

    @contextlib.contextmanager
    def profiled(self, note: Callable[[str], None]) -> Iterator[None]:
        self._note = note
        with self.profiler or contextlib.nullcontext():
            yield
        for line in self.profiler.lacking() if self.profiler else ():
            note(line)
