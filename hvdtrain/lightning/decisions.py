"""What all ranks must decide alike: what callbacks and schedulers monitor, the next epoch, and where an epoch ends."""

from collections.abc import Hashable, Iterable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
)

from hvdtrain.core.samples import Samples
from hvdtrain.errors import LoopError
from hvdtrain.ranks import agreement
from hvdtrain.run.loop import Among
from hvdtrain.run.session import check_next
from hvdtrain.torch.models import fingerprint

AGAIN = "it would look for its value anew at each start; find it before, with one process, and give it to the module"
REFUSED: dict[Any, str] = {
    BatchSizeFinder: AGAIN,
    LearningRateFinder: AGAIN,
    ModelPruning: "it renames parameters while it trains, and looks at each rank's own first weights; prune afterwards",
}
NOT_RESUMED = {
    BaseFinetuning: "it gives the optimizer parameters while it trains; train each stage in a folder of its own",
    OnExceptionCheckpoint: "Lightning would resume from its file, not from the run's folder; leave it out",
    SpikeDetection: "Lightning cannot load what it saves of it; leave it out",
}


def refuse(callbacks: Iterable[Callback], what: str, kinds: dict[Any, str] = REFUSED) -> None:
    """Raises LoopError for a callback that would silently change what is trained."""
    for kind, why in kinds.items():
        for name in (type(each).__name__ for each in callbacks if isinstance(each, kind)):
            raise LoopError(f"{what} does not go with {name}: {why}.")


class Decisions(Callback):
    """Compares over the ranks what EarlyStopping, ModelCheckpoint and ReduceLROnPlateau monitor, before they read it;
    and after each epoch, the number of the next one and its LRs. `compares`: also the weights, after batches 1, 2, 4,
    8, ..., after each epoch, and after the first batch of other parameters that learn."""

    def __init__(self, among: Among, *, compares: bool) -> None:
        self._among, self._compares, self._batches = among, compares, 0
        self._learned: set[Hashable] = set()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        check_next("value", trainer.current_epoch, _lrs(trainer), self._among)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        check_next("value", None, _lrs(trainer), self._among)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples = getattr(getattr(trainer, "datamodule", None), "samples", None)
        if not batch_idx and isinstance(samples, Samples):  # of GlobalBatches
            samples.compare(self._among)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.end_batch()
        self._batches, learns = self._batches + 1, strategy.learning
        if learns not in self._learned or self._batches & (self._batches - 1) == 0:
            self._learned.add(learns)
            self._compare_replicas(trainer)
        if any(each.reduce_on_plateau and each.interval == "step" for each in trainer.lr_scheduler_configs):
            self._compare(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        agreement.check({"training: batches of this epoch": _read(trainer)}, *self._among)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._compare(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        _check_end(trainer)
        self.on_validation_start(trainer)
        self._compare(trainer)
        self._compare_replicas(trainer)

    def _compare_replicas(self, trainer: Any) -> None:
        if self._compares and next(trainer.lightning_module.parameters(), None) is not None:
            mark = fingerprint(trainer.lightning_module, with_statistics=False)
            agreement.check_replicas(mark, {}, self._batches, *self._among, trainer.strategy.cause)

    def _compare(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        if found := {name: float(metrics[name]) for name in sorted(monitored(trainer)) if name in metrics}:
            agreement.check(agreement.named("value", found), *self._among)


def monitored(trainer: Trainer) -> set[str]:
    """The names of the logged values that callbacks and schedulers decide by."""
    deciding: list[Any] = [*trainer.callbacks]  # type: ignore[attr-defined]
    deciding += [each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    return {each.monitor for each in deciding if getattr(each, "monitor", None)}


def _lrs(trainer: Trainer) -> dict[str, list[float]]:
    return {f"LR {i}": [float(of["lr"]) for of in each.param_groups] for i, each in enumerate(trainer.optimizers)}


def _check_end(trainer: Trainer) -> None:
    """Raises LoopError where an epoch has ended before its length."""
    loop, batches = trainer.fit_loop.epoch_loop, trainer.num_training_batches
    read = _read(trainer)
    if read < batches and not (trainer.should_stop or loop._is_training_done):
        error = LoopError(
            f"the training data of rank {trainer.global_rank} ended after {read} of {batches} batches, for more of "
            f"which other ranks would wait; give Trainer(limit_train_batches={read}) or data of equal length."
        )
        error.everywhere = False
        raise error


def _read(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready
