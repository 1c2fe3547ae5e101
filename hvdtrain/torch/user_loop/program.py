"""The objects that a program trains, checked and made resumable, and the order in which its loop calls its run."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Sampler

from hvdtrain.core.progress import Progress
from hvdtrain.errors import LoopError
from hvdtrain.run.session import LONGEST_REASON, RESERVED, Best
from hvdtrain.torch import resumable
from hvdtrain.torch.models import curve_line
from hvdtrain.torch.user_loop.kept import Looks, alive, beside, check_state, load_scheduler, of_scheduler
from hvdtrain.untrusted import printable, quoted

ENDS = "the next epoch", "a break out of run.epochs()"
PARTS = (
    "for an update of k batches read run.batches(data, k * batch_size); for each part of zip(x.chunk(k), y.chunk(k)) "
    "call backward() of its loss / k under `with run.accumulating(is_not_last):`; then optimizer.step() and run.step()"
)
UNEQUAL = (
    "backward() in run.each_once(), which gives the ranks unequal parts, cannot average gradients; put it under `with "
    "run.accumulating():`, and they stay each rank's own."
)
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


@dataclass
class Program(resumable.Trained):
    """A user's objects, and the values on which the order of the samples depends."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: torch.amp.GradScaler
    seed: int
    state: Mapping[str, Any] = field(default_factory=dict)
    """What else the program keeps, by name."""
    is_alone: bool = True
    """Whether one rank trains."""
    data: dict[str, Any] = field(default_factory=dict)
    """The batch size and the contents of the training set, once they are known."""
    began: dict[str, str] = field(default_factory=dict)
    """The settings with which the run began, as `given_settings` returns them; empty in an older run."""
    is_validated: bool = False
    """Whether an epoch has reported the valid_loss by which the best checkpoint is chosen, maybe before this start."""
    beside: dict[str, str] = field(default_factory=dict)
    """See `hvdtrain.torch.user_loop.kept.Looks`; as it was at the run's first start."""

    @functools.cached_property
    def looks(self) -> Looks:
        others = [*self.all_optimizers, *self.schedulers, self.scaler, *self.state.values()]
        return Looks(self.model, others)

    @property
    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        """Also those inside of others."""
        return [*self.optimizers, *resumable.inner(self.optimizers)]

    def check_program(self, device: torch.device) -> None:
        """Raises LoopError where the ranks would not train as one, or the program could not be resumed."""
        if not isinstance(self.model, nn.Module):
            raise LoopError(f"the model must be a torch.nn.Module, got a {type(self.model).__name__}.")
        for kind in type(self.model).__mro__:
            if kind.__name__ in WRAPPERS:
                raise LoopError(f"the model is wrapped in {kind.__name__}: give the model itself, hvdtrain averages.")
        if not any(each.requires_grad for each in self.model.parameters()):
            raise LoopError(f"model {_kind(self.model)} has no parameter that learns; give one that has.")
        self._check_optimizers()
        self.model = resumable.Whole(self.model, beside(self.model, self.optimizers))
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if tensor.device != device:
                raise LoopError(
                    f"{name} of the model is on {tensor.device}, this rank computes on {device}; call "
                    "model.to(world.device) before the optimizer is made."
                )
        resumable.check_owners(self.model, self.optimizers)
        self.check_all_schedulers_given()
        for each in self.schedulers:
            if getattr(each, "optimizer", self.optimizers[0]) not in self.all_optimizers:
                raise LoopError("the scheduler is of another optimizer; make it of the one that is given.")
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise LoopError(
                    f"the scheduler ({type(each).__name__}) has no state_dict and load_state_dict, so the run could "
                    "not be resumed; give it both."
                )
        check_state(self.state)
        self.metadata()

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers or (None,):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise LoopError(f"the optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
        if name := next((name for name in map(_kind, self.all_optimizers) if "LBFGS" in name), None):
            raise LoopError(f"{name} keeps lists of steps, which no checkpoint holds; take another optimizer.")
        if not resumable.parameters(self.optimizers) & set(self.model.parameters()):
            resumable.check_owners(self.model, self.optimizers)

    def check_all_schedulers_given(self) -> None:
        """Raises LoopError where an optimizer has a scheduler that was not given; it may be made after some steps."""
        for optimizer in self.optimizers:
            is_given = any(getattr(each, "optimizer", optimizer) is optimizer for each in self.schedulers)
            if not is_given and hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # by which PyTorch marks it
                raise LoopError(
                    "the optimizer has a scheduler that no checkpoint would hold; make it before world.run, and give "
                    "it as world.run(..., scheduler=scheduler)."
                )

    def check_other(self, optimizer: torch.optim.Optimizer, in_batch: bool) -> None:
        """Raises LoopError where an optimizer that was not given has updated the model; `in_batch`: or, on several
        ranks, a module beside it. One that a step makes, as for an inner loop, is each rank's own."""
        others = resumable.parameters([optimizer]) - resumable.parameters(self.optimizers)
        are_weights = any(isinstance(each, nn.Parameter) for each in others - set(self.model.parameters()))
        if in_batch and are_weights and not self.is_alone and optimizer in self.looks.optimizers:
            raise LoopError(
                f"{_kind(optimizer)} updates parameters beside the model, which no rank averages and no checkpoint "
                "holds; give world.run both optimizers, as (first, second), or make it in each step that needs it."
            )
        updated = resumable.parameters([optimizer]) if in_batch else others
        if name := next((name for name, each in self.model.named_parameters() if each in updated), None):
            raise LoopError(
                f"{type(optimizer).__name__} updates {name} of the model, and no checkpoint would hold its state; give "
                "world.run all optimizers, as (first, second)."
            )

    def curve_line(self, size: int) -> str:
        return curve_line(self.model, size, "world.sync_batch_norm before the optimizer is made")

    def metadata(self) -> dict[str, Any]:
        groups, schedulers = resumable.settings(resumable.groups(self.all_optimizers)), self.schedulers
        return {
            "groups": resumable.packed(groups, f"optimizer {resumable.named(self.optimizers)}"),
            "schedulers": [
                resumable.packed(of_scheduler(each), f"scheduler {type(each).__name__}") for each in schedulers
            ],
            "data": self.data,
            "seed": self.seed,
            "began": self.began,
            "is_validated": self.is_validated,
            "beside": self.beside,
        }

    def restore(self, meta: Mapping[str, Any], progress: Progress) -> str:
        step = progress.step
        resumable.set_settings(self.all_optimizers, resumable.unpacked(meta["groups"]), step)
        if len(self.schedulers) != len(meta["schedulers"]):
            raise LoopError(
                f"the checkpoint of step {step} has {len(meta['schedulers'])} schedulers, this program has "
                f"{len(self.schedulers)}; make them alike, or give another folder."
            )
        for scheduler, state in zip(self.schedulers, meta["schedulers"], strict=True):
            load_scheduler(scheduler, resumable.unpacked(state))
        if meta["seed"] != self.seed:
            raise LoopError(f"the run began with seed={meta['seed']}, got {self.seed}; give that, or another folder.")
        self.data = dict(meta["data"])
        self.is_validated = bool(meta.get("is_validated"))
        self.beside = found if isinstance(found := meta.get("beside"), dict) else {}
        given, self.began = self.began, dict(meta.get("began", {}))
        return changed_settings(given, self.began)


class Order:
    """Follows the program through its loop. Each method raises LoopError where it is called out of order."""

    def __init__(self, program: Program) -> None:
        self._program, self._is_updated, self._lr = program, False, program.lr
        self._optimizers = program.all_optimizers
        self._groups = len(resumable.groups(self._optimizers))
        self._hook = register_optimizer_step_post_hook(self._updated)
        self.in_epoch = False
        self.reported: dict[str, float] = {}
        """The numbers that the program has reported in this epoch, by name."""
        self.why: str | None = None
        """Why this rank has stopped the run; None where it has not."""
        self.has_batch = self._has_stepped = False
        self._sets, self.is_reading = 0, False
        """How many sets the program has begun to read in this epoch, and whether it still reads the first."""
        self.is_short = False
        """Whether a set beside the first has come to its end."""

    def begin_epoch(self) -> None:
        self.in_epoch, self._sets, self.is_short, self.reported = True, 0, False, {}

    def read(self) -> int:
        """How many sets this one is read beside."""
        if not self.in_epoch or (self._sets and not self.is_reading):
            when = "twice in one epoch" if self.in_epoch else "outside of run.epochs()"
            raise LoopError(
                f"run.batches() was called {when}; take run.each_once() to validate, and to train on two sets one "
                "ConcatDataset, two epochs, or zip."
            )
        self.beside(True)
        self._sets, self.is_reading = self._sets + 1, True
        return self._sets - 1

    def beside(self, is_in_step: bool) -> None:
        """Refuses a set beside the first whose batches are not those of the updates: no resumed run could have them."""
        if self.is_short or not is_in_step:
            raise LoopError(
                "a run.batches() beside another gives one batch for each update, and the epoch ends with it; for more "
                "make its batch_size larger and chunk the batch, or its set, as ConcatDataset([data] * 4)."
            )

    def step(self) -> None:
        self.beside(True)
        if not self.has_batch:
            raise LoopError(
                "run.step() comes once after each batch of run.batches(), not without one; in place of a DataLoader of "
                "your own give run.batches() its data set."
            )
        # A scaler leaves an update out at times. To find others than the program's own takes a tenth of a second.
        if not (self._is_updated or self._program.scaler.is_enabled() or _has_scaler()):
            raise LoopError(
                "run.step() came before optimizer.step(), which its checkpoint would not hold; call it after; leave an "
                f"update out by run.skip(), on all ranks, or by a GradScaler, as world.run(..., scaler=); {PARTS}."
            )
        self._program.check_all_schedulers_given()
        if (groups := len(resumable.groups(self._optimizers))) != self._groups:
            self._groups = groups
            resumable.check_owners(self._program.model, self._program.optimizers)
        self.has_batch = self._is_updated = False
        self._lr, self._has_stepped = self._program.lr, True

    def skip(self) -> None:
        if not self.has_batch or self._is_updated:
            raise LoopError("run.skip() comes in place of optimizer.step() and run.step(), within run.batches().")
        self.beside(True)
        self.has_batch = False

    def end_batch(self, is_last: bool) -> None:
        """`is_last`: after the epoch's last batch the LR may change, as the checkpoint is written later."""
        if self.has_batch and self._is_updated:
            raise LoopError("run.step() was not called after a batch; call it after each optimizer.step().")
        if self.has_batch and not self._has_stepped and all(p.grad is None for p in self._program.model.parameters()):
            raise LoopError(
                "a batch was read before run.step() of the one before, as a prefetcher does: give run.batches() "
                "workers=1 in its place; leave out a batch by run.skip(), on all ranks."
            )
        if self.has_batch:
            raise LoopError(f"a batch got no update; leave it out by run.skip(), on all ranks; {PARTS}.")
        if self._program.lr != self._lr and not is_last:
            raise LoopError(
                "the learning rate changed after run.step(), whose checkpoint does not hold that; call "
                "scheduler.step() before it."
            )

    def close(self) -> None:
        self._hook.remove()

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._optimizers:
            self._is_updated = True
        elif self.in_epoch:
            self._program.check_other(optimizer, self.has_batch)

    def stop(self, why: str) -> None:
        if not self.in_epoch:
            raise LoopError(f"run.stop({why!r}) was called outside of run.epochs(); call it in the run's last epoch.")
        self.why = printable(str(why), LONGEST_REASON)

    def report(self, metrics: dict[str, Any]) -> None:
        if not self.in_epoch:
            raise LoopError("run.report() was called outside of run.epochs(); call it at the end of an epoch.")
        for name, value in metrics.items():
            if name in RESERVED:
                raise LoopError(
                    f"a reported number must not be called {name}, which each record has; take another name."
                )
            self.reported[name] = float(number(value))


def _has_scaler() -> bool:
    return any(each.is_enabled() for each in alive(lambda kind: issubclass(kind, torch.amp.GradScaler)))


def _kind(each: Any) -> str:
    return type(each).__name__


class Batches(Iterator[Any]):
    """The batches of `Run.batches`; `len` is how many are left of the epoch."""

    def __init__(self, batches: Iterator[Any], left: Callable[[], int]) -> None:
        self._batches, self._left = batches, left

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return self._left()


def check_source(dataset: Any, others: Mapping[str, Any]) -> None:
    """Raises LoopError for a sampler, a DataLoader, or a keyword of one."""
    if others or isinstance(dataset, DataLoader | Sampler):
        raise LoopError(
            f"run.batches() and run.each_once() take no {[*others, type(dataset).__name__][0]}: give them the data set "
            "itself, batch_size=, collate= and workers=; in place of a sampler give Subset(data, indices), the same on "
            "every rank, as of a generator that is seeded by the epoch."
        )


def score(values: dict[str, float], best: Best, is_validated: bool = False) -> float | None:
    """The score by which the best checkpoint is chosen, the highest; None where it was not reported."""
    highest, lowest = best
    name = highest or lowest or ("valid_loss" if is_validated or "valid_loss" in values else "train_loss")
    return None if name not in values else values[name] if highest else -values[name]


def number(value: Any) -> Any:
    """The value as a number without gradient; a tensor of one element becomes a scalar. Raises LoopError."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise LoopError(f"a loss or metric must be one number, got shape {list(value.shape)}; take its mean().")
        return value.detach().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise LoopError(f"a loss or metric must be a number, got a {type(value).__name__}.") from None


MOST_SETTINGS = 4
"""Settings that a message names at most."""
DERIVED = {"base_lrs", "last_epoch"}
"""Keys of a scheduler's state that follow from the optimizer or from the number of steps."""
CHAINED = "_schedulers"
"""The key under which a scheduler that combines others keeps them."""


def given_settings(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]) -> dict[str, str]:
    """The settings with which optimizers and schedulers were made, as JSON texts. Raises LoopError where no checkpoint
    could hold them."""
    made = [_as_made(group) for group in resumable.settings(resumable.groups(optimizers))]
    found = {"optimizer": resumable.packed(made, f"optimizer {resumable.named(optimizers)}")}
    if schedulers:
        found["scheduler"] = resumable.packed([of_scheduler(each) for each in schedulers], "a scheduler")
    return found


def changed_settings(now: Mapping[str, str], began: Mapping[str, str]) -> str:
    """A line that names the settings which the program gives now and did not give when its run began; empty where
    there are none."""
    unlike = [(kind, *values) for kind in now if kind in began for values in _unlike(now[kind], began[kind])]
    if not unlike:
        return ""
    kinds = " and ".join(dict.fromkeys(kind for kind, *_ in unlike))
    more = f" and {len(unlike) - MOST_SETTINGS} more" if len(unlike) > MOST_SETTINGS else ""
    gives = ", ".join(f"{name}={quoted(new)}" for _, name, new, _ in unlike[:MOST_SETTINGS])
    keeps = ", ".join(f"{name}={quoted(old)}" for _, name, _, old in unlike[:MOST_SETTINGS])
    return (
        f"{kinds}: the program gives {gives}{more}, this run began with {keeps}{more} and keeps its own; for another "
        "value give another folder"
    )


def _unlike(now: str, began: str) -> list[tuple[str, Any, Any]]:
    """The settings that differ: name, new and old value."""
    old = dict(_leaves(resumable.unpacked(began)))
    # A setting that only one version of PyTorch has says nothing about the program.
    both = [(name, new, old[name]) for name, new in _leaves(resumable.unpacked(now)) if name in old]
    return [(name, new, value) for name, new, value in both if new != value]


def _as_made(group: dict[str, Any]) -> dict[str, Any]:
    """The group's settings before its schedulers, when they were made, changed the learning rate."""
    made = {name: value for name, value in group.items() if name != "initial_lr"}
    return made | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _leaves(state: Any, prefix: str = "", part: str = "group") -> Iterator[tuple[str, Any]]:
    """The settings by name: of the groups of an optimizer, or of a scheduler and its parts."""
    if isinstance(state, list | tuple):
        for number, one in enumerate(state):
            yield from _leaves(one, f"{prefix}{part} {number} " if len(state) > 1 else prefix)
        return
    for name, value in state.items() if isinstance(state, dict) else ():
        if name == CHAINED:
            yield from _leaves(value, prefix, "part")
        elif isinstance(name, str) and not name.startswith("_") and name not in DERIVED:
            yield f"{prefix}{name}", value
