"""What all ranks must decide alike: what callbacks and schedulers monitor, the next epoch, and where an epoch ends; and
whether the module's loss is a mean, as they average its gradients."""

import contextlib
import copy
import itertools
import operator
import time
import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hvdtrain.core.objective import of_halves
from hvdtrain.errors import LoopError
from hvdtrain.lightning import private
from hvdtrain.ranks import agreement
from hvdtrain.run.loop import Communicator
from hvdtrain.run.samples import DRAWN, Found, Samples, marks_of, shape_text
from hvdtrain.run.session import check_next
from hvdtrain.torch.data import Examples
from hvdtrain.torch.models import fingerprint
from hvdtrain.torch.objective import cut
from hvdtrain.torch.objective.means import no_means
from hvdtrain.untrusted import one_line

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
    and after each epoch, the number of the next one and its LRs; and labels of the program's data loaders. `compares`:
    also the weights, after batches 1, 2, 4, 8, ..., after each epoch, and after the first batch of other parameters
    that learn."""

    def __init__(self, among: Communicator, sample_check: Literal["on", "off"] = "on", *, compares: bool) -> None:
        self._among, self._compares, self._batches = among, compares, 0
        self._learned: set[Hashable] = set()
        self._validated = 0.0
        """When the last validation ended, by this rank's clock."""
        self._samples, self._labels = Samples(sample_check), dict[bool, dict[int, Labels]]()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        check_next("value", trainer.current_epoch, _lrs(trainer), self._among)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        check_next("value", None, _lrs(trainer), self._among)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples = getattr(getattr(trainer, "datamodule", None), "samples", None)
        if not batch_idx and isinstance(samples, Samples):  # of GlobalBatches
            samples.compare(self._among)
        elif not batch_idx:
            self._look(trainer.fit_loop, True)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.end_batch()
        self._batches, learns = self._batches + 1, strategy.learning
        if learns not in self._learned or self._batches & (self._batches - 1) == 0:
            self._learned.add(learns)
            self._compare_replicas(trainer)
        if self._compares:
            strategy.is_watched = self._batches & (self._batches + 1) == 0
        if every := getattr(trainer, "_val_check_time_interval", None):  # of Lightning 2.6; rank 0's clock decides
            since = max(self._validated, private.began(trainer))
            is_due = strategy.broadcast(time.monotonic() - since >= every)
            private.set_validated(trainer, float("-inf" if is_due else "inf"))
        if any(each.reduce_on_plateau and each.interval == "step" for each in trainer.lr_scheduler_configs):
            self._compare(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        agreement.check_values({"training: batches of this epoch": _read(trainer)}, *self._among)
        self._look(trainer.fit_loop.epoch_loop.val_loop, False)

    def _look(self, loop: Any, is_training: bool) -> None:
        """Compares labels of some examples of the loaders that have a sampler of each rank's part of one data set."""
        every = getattr(private.loaders(loop), "flattened", ())
        loaders = [each for each in every if isinstance(getattr(each, "sampler", None), DistributedSampler)]
        before = self._labels.get(is_training, {})
        now = {id(each): before.get(id(each)) or Labels(each) for each in loaders}
        self._labels[is_training] = now
        for labels in now.values():
            self._samples.look(labels, 0, [(None, is_training or None)])
        self._samples.compare(self._among)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._validated = time.monotonic()
        if not trainer.sanity_checking:
            self._compare(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        _check_end(trainer)
        agreement.check_values({"training: batches of this epoch": _read(trainer)}, *self._among)
        self._compare(trainer)
        self._compare_replicas(trainer)

    def _compare_replicas(self, trainer: Any) -> None:
        if self._compares and next(trainer.lightning_module.parameters(), None) is not None:
            mark = fingerprint(trainer.lightning_module, with_statistics=False)
            agreement.check_replicas(mark, {}, self._batches, *self._among, trainer.strategy.cause)

    def _compare(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        if found := {name: float(metrics[name]) for name in sorted(monitored(trainer)) if name in metrics}:
            agreement.check_values(agreement.named("value", found), *self._among)


class Labels(Examples):
    """The data set of a program's own data loader. No seed makes its samples alike, so of these the whole numbers and
    texts are compared that are the same when they are read again."""

    most_looks = 2

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader.dataset, "the data set of a DataLoader")
        self._loader = loader

    def look(self, seed: int, seconds: float, is_training: bool, number: int = 0) -> Found:
        until, random = time.monotonic() + seconds, np.random.default_rng([seed, len(self), number])
        indices = random.choice(len(self), min(len(self), MOST_LABELS), replace=False).tolist()
        pairs = list[Any]()
        with self.generators.alone(), contextlib.suppress(Exception):  # what reading raises is left to training
            self.generators.seed(seed)
            read = iter(_reader(self._loader, [index for index in indices for _ in range(2)], seconds))
            pairs += itertools.takewhile(lambda _: time.monotonic() < until, zip(read, read, strict=True))
        same = [all(of) for of in zip(*(map(operator.eq, *pair) for pair in pairs), strict=False)]
        parts = [[part if is_same else DRAWN for part, is_same in zip(one, same, strict=False)] for one, _ in pairs]
        marks = {str(index): [one[0], *of[1:]] for index, (one, _), of in zip(indices, pairs, parts, strict=False)}
        found = {"name": self.name, "examples": len(self), "is_training": is_training, "again": number > 0}
        return {**found, "marks": marks, "is_random": True, "seconds": seconds - until + time.monotonic()}


MOST_LABELS = 4


def _reader(loader: DataLoader[Any], indices: list[int], seconds: float) -> DataLoader[Any]:
    """Reads these samples where the loader would, in a process of its own: one that opens a file keeps it there."""
    workers = min(1, loader.num_workers)
    return DataLoader(
        loader.dataset,
        batch_size=None,
        sampler=indices,
        collate_fn=_labels_of,
        num_workers=workers,
        timeout=seconds * workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
    )


def _labels_of(sample: Any) -> list[Any]:
    """The marks of the whole numbers and texts in a sample; of lists, images and crops augmentation makes others."""
    exact = tree_map(
        lambda each: each if _is_label(each) else None, sample, is_leaf=lambda each: isinstance(each, list)
    )
    return [one_line(shape_text(sample, shows=True), 160), *marks_of(exact)[1:]]


def _is_label(value: Any) -> bool:
    own = np.asarray(value)
    return own.size == 1 and own.dtype.kind in "biuSU"


def no_mean(module: LightningModule, batch: Any, *rest: Any) -> list[str]:
    """A line of the log where training_step shows, by the halves of a batch, that its loss is no mean over examples, or
    cannot show it. It is computed in inference by copies of the module that have no Trainer; nothing else changes."""
    sizes = [len(each) for each in tree_leaves(batch) if isinstance(each, torch.Tensor) and each.dim()]
    loaders = tree_leaves(getattr(module._trainer, "train_dataloader", None))
    known = {getattr(each, "batch_size", None) for each in loaders} - {None}
    is_half = any(each.element_size() == 2 for each in module.parameters())
    kept = {id(each): each for each in vars(module).values() if isinstance(each, Dataset | DataLoader)}

    def measured(part: slice) -> Any:
        own = copy.deepcopy(module, dict(kept)).eval()
        own = own.float() if is_half else own
        data = tree_map_only(torch.Tensor, lambda one: cut(one, part, sizes[0]), batch)
        with _Alone():
            loss = type(own).training_step(own, data, *rest)  # what torch.compile makes of it is the module's
        return loss["loss"] if isinstance(loss, Mapping) else loss

    if not sizes or not module.automatic_optimization or (known and sizes[0] not in known):  # as [time, examples]
        return []
    name, remedy = f"of {type(module).__name__}", "compute it of self.all_gather(..., sync_grads=True), or hl.mean_loss"
    quiet = contextlib.redirect_stdout(None), contextlib.redirect_stderr(None)
    with isolate_rng(), torch.no_grad(), warnings.catch_warnings(), quiet[0], quiet[1]:
        warnings.simplefilter("ignore")  # that self.log has no Trainer
        return of_halves(name, measured, sizes[0], remedy, "a copy of the module, without a Trainer and in inference,")


def name_no_mean(module: LightningModule | None, loss: torch.Tensor, by_halves: Iterable[str]) -> None:
    """Prints on rank 0 what the graph of the loss shows, else what its halves have shown."""
    for line in no_means(loss, 0, type(module).__name__, "hl.mean_loss makes it one") or by_halves:
        rank_zero_info(line)


class _Alone(TorchDispatchMode):
    """Raises RuntimeError where ranks communicate, whose sum is no longer that of a batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("it communicates")
        return func(*args, **(kwargs or {}))


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
    if read < batches and not (trainer.should_stop or private.is_training_done(loop)):
        error = LoopError(
            f"the training data of rank {trainer.global_rank} ended after {read} of {batches} batches, for more of "
            f"which other ranks would wait; give Trainer(limit_train_batches={read}) or data of equal length."
        )
        error.everywhere = False
        raise error


def _read(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready
