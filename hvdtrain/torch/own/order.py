"""The order in which a loop calls its run, and what an epoch reports."""

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdtrain.core.progress import OwnSampling
from hvdtrain.errors import LoopError
from hvdtrain.ranks import agreement
from hvdtrain.ranks.agreement import named
from hvdtrain.record.reporter import OwnReporter
from hvdtrain.run.loop import Hooks
from hvdtrain.run.session import RESERVED
from hvdtrain.torch.objective import Seen

if TYPE_CHECKING:
    from hvdtrain.torch.own.program import Program

Best = tuple[str | None, str | None]
"""Which reported number is highest, or which is lowest, in the best checkpoint."""


class Order:
    """Where in its loop a program is. Each method raises LoopError where it is called out of order."""

    def __init__(self, program: "Program") -> None:
        self._program, self._is_updated, self._lr = program, False, program.lr
        self._hooks = [each.register_step_post_hook(self._updated) for each in program.optimizers]
        self._hooks.append(register_optimizer_step_pre_hook(self._updates))
        self.in_epoch = False
        self.reported: dict[str, float] = {}
        """In this epoch."""
        self._is_read = self._has_batch = False

    def begin_epoch(self) -> None:
        self.in_epoch, self._is_read, self.reported = True, False, {}

    def end_epoch(self) -> None:
        self.in_epoch = self._has_batch = False

    def read(self) -> None:
        """The epoch's batches."""
        if not self.in_epoch or self._is_read:
            when = "twice in one epoch" if self.in_epoch else "outside of run.epochs()"
            raise LoopError(f"run.batches() was called {when}; take run.each_once() to validate.")
        self._is_read = True

    def begin_batch(self) -> None:
        self._has_batch = True

    def step(self) -> None:
        if not self._has_batch:
            raise LoopError("run.step() comes once after each batch of run.batches(), not without one.")
        if not self._is_updated and not self._program.scaler.is_enabled():  # which leaves an update out at times
            raise LoopError(
                "run.step() came before optimizer.step(), which its checkpoint would not hold; call it after."
            )
        self._program.check_late_schedulers()
        self._has_batch = self._is_updated = False
        self._lr = self._program.lr

    def end_batch(self, is_last: bool) -> None:
        """`is_last`: of the epoch, at whose end a checkpoint is written later."""
        if self._has_batch:
            raise LoopError("run.step() was not called after a batch; call it after each optimizer.step().")
        if self._program.lr != self._lr and not is_last:
            raise LoopError(
                "the learning rate changed after run.step(), whose checkpoint does not hold that; call "
                "scheduler.step() before it."
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _updates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.in_epoch and optimizer not in self._program.optimizers:
            self._program.check_other(optimizer)

    def _updated(self, *_: Any) -> None:
        self._is_updated = True

    def report(self, metrics: dict[str, Any]) -> None:
        if not self.in_epoch:
            raise LoopError("run.report() was called outside of run.epochs(); call it at the end of an epoch.")
        for name, value in metrics.items():
            if name in RESERVED:
                text = f"a reported number must not be called {name}, which each record has; take another name."
                raise LoopError(text)
            self.reported[name] = float(number(value))


def report_epoch(hooks: Hooks[Any], extent: OwnSampling, reported: dict[str, float]) -> dict[str, float]:
    """Reports the means over the epoch's steps, and what the program has reported; all of these numbers by name. Every
    rank calls it. Raises LoopError where there was no step, or the ranks differ."""
    progress, engine = hooks.progress, hooks.engine
    if not progress.train.count:
        raise LoopError(f"epoch {progress.epoch} ended without a step; train on run.batches() and call run.step().")
    values = {name: value + 0.0 for name, value in reported.items()}  # without the sign of a zero
    of_epoch = named("report", {f"steps of epoch {progress.epoch}": progress.updates(extent), **values})
    agreement.check(of_epoch, (engine.rank, engine.size), hooks.run.topology.host, engine.sum)
    train = {"loss": progress.train.mean_loss, **progress.train.means}
    values = {f"train_{name}": mean for name, mean in train.items()} | reported
    if isinstance(hooks.reporter, OwnReporter):
        hooks.reporter.values(progress.step, progress.epoch + 1, values)
    return values


def score(values: dict[str, float], best: Best) -> float:
    """What the best checkpoint has most of; Raises LoopError where it was not reported."""
    highest, lowest = best
    name = highest or lowest or ("valid_loss" if "valid_loss" in values else "train_loss")
    if name not in values:
        raise LoopError(f"{name} decides on the best checkpoint, but run.report() got {', '.join(values)}; report it.")
    return values[name] if highest else -values[name]


def seen(loss: Any, metrics: dict[str, Any], count: int) -> Seen:
    """A batch of so many examples: its mean loss, and metrics that are such means too or pairs (sum, count)."""
    pairs = {name: of if isinstance(of, tuple) else (number(of) * count, count) for name, of in metrics.items()}
    return Seen(number(loss), count, {name: (number(total), number(many)) for name, (total, many) in pairs.items()})


def number(value: Any) -> Any:
    """Without gradient; a tensor of one element as a scalar. Raises LoopError."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise LoopError(f"a loss or metric must be one number, got shape {list(value.shape)}; take its mean().")
        return value.detach().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise LoopError(f"a loss or metric must be a number, got a {type(value).__name__}.") from None
