"""How far a run has come, and what each rank reads next. The global batch is the same for any number of ranks."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core.metrics import Totals
from hvdtrain.core.plan import Plan
from hvdtrain.core.recipe.stopping import Patience, Rule, rule_of
from hvdtrain.core.schedule import Plateau

Indices = NDArray[np.int64]
T = TypeVar("T")

WINDOW = 4096
"""How many neighbouring examples are shuffled where ranks read shard after shard; some 500 MB of ImageNet."""

BLOCK = 64
"""How many neighbouring examples come several times before others do, where they are repeated."""

ROUNDS = 8
"""Rounds of a Feistel network: twice the four that suffice with random functions (Luby and Rackoff 1988)."""


class Permutation:
    """A pseudo-random permutation of 0 … n - 1 by seed and epoch, of which each place is computed when it is asked for.

    A Feistel network permutes the numbers of an even number of bits; what it leads outside of n goes through it again
    until it is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n, self._half = n, np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._keys = np.random.default_rng([seed, epoch, 0]).integers(2**64, size=(ROUNDS, 1), dtype=np.uint64)

    def __getitem__(self, places: Indices) -> Indices:
        found = self._mixed(places.astype(np.uint64))
        while (outside := np.flatnonzero(found >= self._n)).size:
            found[outside] = self._mixed(found[outside])
        return found.astype(np.int64)

    def _mixed(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & ((np.uint64(1) << self._half) - np.uint64(1))
        for key in self._keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # wraps, as splitmix64 does
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> (np.uint64(64) - self._half))
        return left << self._half | right


@dataclass(frozen=True)
class Epoch:
    """The order of the examples in one epoch, and the draws that augment them: both follow from seed and epoch."""

    order: Indices | Permutation
    draws: NDArray[np.float32]
    by_place: bool = False
    """Whether a row of draws is of a place in the order, as an example may come several times; else of an example."""

    @classmethod
    def by_shard(
        cls, shards: Sequence[int], seed: int, epoch: int, draws: int, global_batch: int, size: int
    ) -> "Epoch":
        """Like `shuffled`, for ranks that read shard after shard; `shards` holds the number of examples in each.

        The shards, in random order, are divided into runs of equal length, one for each rank. Examples are shuffled
        within each WINDOW of a run. So the order depends on the batch and the number of ranks, and `local_batch` reads
        the rank's own run.
        """
        random = np.random.default_rng([seed, epoch, 0])
        run = _permuted(shards, random)
        batches = len(run) // global_batch
        cuts = [batches * (global_batch * rank // size) for rank in range(size + 1)]
        runs = [_mixed(run[first:last], random).reshape(batches, -1) for first, last in itertools.pairwise(cuts)]
        order = np.concatenate([np.concatenate(runs, axis=1).ravel(), run[batches * global_batch :]])
        return cls(order, _drawn(len(run), seed, epoch, draws))

    @classmethod
    def shuffled(cls, examples: int, seed: int, epoch: int, draws: int) -> "Epoch":
        """A permutation of the examples, and `draws` uniform numbers in [0, 1) for each of them."""
        return cls(np.random.default_rng([seed, epoch, 0]).permutation(examples), _drawn(examples, seed, epoch, draws))

    @classmethod
    def by_index(cls, examples: int, seed: int, epoch: int) -> "Epoch":
        """Like `shuffled` without draws, for any number of examples: it takes neither memory nor time for them."""
        return cls(Permutation(examples, seed, epoch), np.empty((examples, 0), np.float32))

    @classmethod
    def by_item(cls, items: Sequence[int], seed: int, epoch: int, draws: int) -> "Epoch":
        """Like `shuffled`, for examples that are computed item by item; `items` holds the number of examples in each.
        Items are permuted; the examples of an item stay together and share their draws."""
        order = _permuted(items, np.random.default_rng([seed, epoch, 0]))
        return cls(order, np.repeat(_drawn(len(items), seed, epoch, draws), items, axis=0))

    @classmethod
    def balanced(cls, labels: Indices, seed: int, epoch: int, draws: int) -> "Epoch":
        """As many examples as there are labels, each class alike often: those of a small class come several times, as
        permutations one after the other, and of a large one some are left out. Where the classes do not divide the
        number, drawn ones have one example more."""
        random = np.random.default_rng([seed, epoch, 0])
        by_label = np.argsort(labels, kind="stable")
        classes = np.split(by_label, np.flatnonzero(np.diff(labels[by_label])) + 1)
        places = [len(labels) * k // len(classes) for k in range(len(classes) + 1)]
        chosen = []
        for kind, (first, last) in zip(random.permutation(len(classes)), itertools.pairwise(places), strict=True):
            times = range(-(-(last - first) // len(classes[kind])))
            drawn = [random.permutation(classes[kind]) for _ in times]
            chosen.append(np.concatenate([by_label[:0], *drawn])[: last - first])
        return cls(random.permutation(np.concatenate(chosen)), _drawn(len(labels), seed, epoch, draws), by_place=True)

    @classmethod
    def repeated(cls, examples: int, repeats: int, seed: int, epoch: int, draws: int) -> "Epoch":
        """As many examples as ever, each of a part of them `repeats` times, near one another, with draws of their own.

        Each BLOCK of a permutation comes so often, permuted anew: partners 2k and 2k + 1 are different examples, and
        others each time. Source: Hoffer et al. 2020, arXiv:1901.09335; Berman et al. 2019, arXiv:1902.05509.
        """
        random = np.random.default_rng([seed, epoch, 0])
        part = random.permutation(examples)[: -(-examples // repeats)]
        blocks = (part[first : first + BLOCK] for first in range(0, len(part), BLOCK))
        order = np.concatenate([random.permutation(block) for block in blocks for _ in range(repeats)])[:examples]
        return cls(order, _drawn(examples, seed, epoch, draws), by_place=True)

    def request(self, places: Indices) -> "Request":
        """What is read for these places of the order."""
        indices = self.order[places]
        return indices, self.draws[places if self.by_place else indices]

    def local_batch(self, start: int, global_batch: int, rank: int, size: int) -> Indices:
        """A rank's examples, [global_batch / size, rounded down or up], of the global batch that begins at `start`."""
        return self.order[start + np.arange(global_batch * rank // size, global_batch * (rank + 1) // size)]


def _drawn(count: int, seed: int, epoch: int, draws: int) -> NDArray[np.float32]:
    return np.random.default_rng([seed, epoch, 1]).random((count, draws), dtype=np.float32)


def _permuted(sizes: Sequence[int], random: np.random.Generator) -> Indices:
    """The indices of runs of these sizes, with the runs in random order."""
    firsts = np.cumsum([0, *sizes])
    return np.concatenate([np.arange(firsts[k], firsts[k + 1]) for k in random.permutation(len(sizes))])


def _mixed(run: Indices, random: np.random.Generator) -> Indices:
    return np.concatenate([run[:0], *(random.permutation(run[k : k + WINDOW]) for k in range(0, len(run), WINDOW))])


def shard(examples: int, rank: int, size: int) -> Indices:
    """The rank's indices among 0 … examples - 1. Over all ranks each index occurs once."""
    return np.arange(examples * rank // size, examples * (rank + 1) // size)


Request = tuple[np.ndarray, np.ndarray | None]
"""What a batch is read from: indices [n], and the draws [n, plan.draws] that augment them, or None."""


@dataclass(frozen=True)
class UserSampling:
    """What takes the place of a plan where the user's own loop trains, in `size` equal local batches."""

    global_batch: int
    train_examples: int
    size: int
    seed: int = 0
    epochs: int = 1
    max_steps: int | None = None
    accumulation_steps: int = 1
    draws: int = 0
    shards: tuple[int, ...] = ()
    items: tuple[int, ...] = ()
    labels: Indices | None = None
    repeats: int = 1
    by_index: bool = False


RunLength: TypeAlias = Plan | UserSampling
"""The length of a run, and what each rank reads in each update."""


@dataclass
class Progress:
    """How far a run has come. `sample` counts the examples that were used in this epoch."""

    step: int = 0
    epoch: int = 0
    sample: int = 0
    plateau: Plateau = field(default_factory=Plateau)
    train: Totals = field(default_factory=lambda: Totals(0.0, 0.0))
    ended: str = ""
    """Why the run is over, whatever epochs are left; "" where it is not."""
    patience: Patience = field(default_factory=Patience)
    parts: int = 1
    """Into how many parts each micro-batch is divided, so that it fits into memory."""

    def metadata(self) -> dict[str, Any]:
        """The progress as a JSON mapping, which `Progress.of` reads."""
        metadata = asdict(self)
        # JSON has no infinity.
        metadata["plateau"]["best"] = None if self.plateau.best == math.inf else self.plateau.best
        return metadata

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> "Progress":
        plateau, train = Plateau(**metadata["plateau"]), Totals(**metadata["train"])
        plateau = replace(plateau, best=math.inf if plateau.best is None else plateau.best)
        train = replace(train, metrics={name: (total, count) for name, (total, count) in train.metrics.items()})
        patience = Patience(**metadata.get("patience", {}))
        done = metadata["step"], metadata["epoch"], metadata["sample"]
        return cls(*done, plateau, train, metadata["ended"], patience, metadata.get("parts", 1))

    def updates(self, length: RunLength) -> int:
        """How many updates of the epoch are made."""
        return self.sample // max(1, length.global_batch)

    def is_epoch_done(self, length: RunLength) -> bool:
        """Whether fewer examples than a batch are left of the epoch."""
        return self.sample + length.global_batch > length.train_examples

    def is_stopped(self, length: RunLength) -> bool:
        """Whether `max_steps` updates are made."""
        return length.max_steps is not None and self.step >= length.max_steps

    def is_over(self, length: RunLength) -> bool:
        """Whether no epoch is left."""
        return bool(self.ended) or self.epoch >= length.epochs or self.is_stopped(length)

    def is_done(self, length: RunLength) -> bool:
        """Whether the last update of the run is made. This counts epochs, not steps: where the batch is given for each
        rank, a resumed run may have another global batch than before."""
        return bool(self.ended) or self.is_stopped(length) or self.epoch + self.is_epoch_done(length) >= length.epochs

    @property
    def ending(self) -> str:
        """How the run has ended before its last epoch, in one line."""
        how = "stopped early at" if self.patience.is_over else "ended after"
        return f"{how} epoch {self.epoch}: {self.ended}"

    def next_epoch(self, plan: Plan, valid: Mapping[str, float]) -> "Progress":
        """The start of the next epoch, given the validation metrics of this one by their names in metrics.jsonl. Raises
        RecipeError where the one that decides on the run's end is missing."""
        plateau = plan.schedule.after_epoch(self.plateau, self.epoch + 1, valid["valid_loss"])
        after = Progress(self.step, self.epoch + 1, plateau=plateau, patience=self.patience, parts=self.parts)
        if rule := rule_of(plan.recipe):
            after.observe(rule, valid)
        return after

    def observe(self, rule: Rule, values: Mapping[str, float]) -> None:
        """Ends the run where, by this rule, the metrics of the epoch that was the last have not been better for too
        long. Raises RecipeError."""
        self.patience = rule.observe(self.patience, self.epoch, values)
        self.ended = rule.why(self.patience) or self.ended

    def judge_again(self, rule: Rule | None) -> None:
        """Trains on where the run was over by an early stop, and the rule is gone, or would wait longer."""
        if self.patience.is_over:
            self.patience = rule.judged(self.patience) if rule else replace(self.patience, is_over=False)
            self.ended = self.ended if self.patience.is_over else ""

    def after_steps(self, length: RunLength) -> "Progress":
        """Where a run without a plan continues after the steps of an epoch: in the next epoch, unless `max_steps` has
        ended this one early."""
        inside = self.is_stopped(length) and not self.is_epoch_done(length)
        return self if inside else Progress(self.step, self.epoch + 1, ended=self.ended, patience=self.patience)

    def lr(self, plan: Plan) -> float:
        """The LR of the next update."""
        return plan.schedule.lr(self.epoch + self.sample / (plan.steps_per_epoch * plan.global_batch), self.plateau)

    def advance(self, length: RunLength) -> None:
        """Counts one update."""
        self.step += 1
        self.sample += length.global_batch


class Lazy(Sequence[T]):
    """Items that are made each time they are asked for, by their numbers."""

    def __init__(self, make: Callable[[int], T], numbers: range) -> None:
        self._make, self._numbers = make, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        at = self._numbers[place]
        return Lazy(self._make, at) if isinstance(at, range) else self._make(at)


def train_requests(plan: RunLength, progress: Progress, rank: int) -> tuple[range, Sequence[Request]]:
    """What is left of the epoch: where the global batch of each update begins in the epoch's order, and the rank's
    micro-batches, `accumulation_steps` of them for each update."""
    order, parts = _epoch(plan, progress.epoch), plan.accumulation_steps
    starts = range(progress.sample, plan.train_examples - plan.global_batch + 1, plan.global_batch)
    first, last = (plan.global_batch * number // plan.size for number in (rank, rank + 1))
    size = (last - first) // parts

    def request(number: int) -> Request:
        begin = starts[number // parts] + first + number % parts * size
        return order.request(np.arange(begin, begin + size))

    return starts, Lazy(request, range(len(starts) * parts))


def _epoch(plan: RunLength, epoch: int) -> Epoch:
    if plan.shards:
        return Epoch.by_shard(plan.shards, plan.seed, epoch, plan.draws, plan.global_batch, plan.size)
    if plan.labels is not None:
        return Epoch.balanced(plan.labels, plan.seed, epoch, plan.draws)
    if plan.items:
        return Epoch.by_item(plan.items, plan.seed, epoch, plan.draws)
    if plan.repeats > 1:
        return Epoch.repeated(plan.train_examples, plan.repeats, plan.seed, epoch, plan.draws)
    if plan.by_index:
        return Epoch.by_index(plan.train_examples, plan.seed, epoch)
    return Epoch.shuffled(plan.train_examples, plan.seed, epoch, plan.draws)


def valid_requests(plan: Plan, rank: int) -> Sequence[Request]:
    """The rank's batches of the validation set. Over all ranks each example is read once."""
    return each_once(plan.valid_examples, plan.micro_batch, rank, plan.size)


def each_once(examples: int, batch: int, rank: int, size: int) -> Sequence[Request]:
    """The rank's examples in batches of at most `batch`. Over all ranks each example is read once."""
    mine = shard(examples, rank, size)
    return Lazy(lambda begin: (mine[begin : begin + batch], None), range(0, len(mine), batch))


def due(step: int, every: int | None) -> bool:
    """Whether something that is done `every` so many steps is due after this step; None is never."""
    return every is not None and step % every == 0
