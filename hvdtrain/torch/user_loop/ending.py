"""How a program ends its run: after its epochs or before, and with which weights."""

import math

from hvdtrain.core.recipe.stopping import Metric, Rule, parsed
from hvdtrain.errors import LoopError, RecipeError
from hvdtrain.record import checkpoint
from hvdtrain.run.loop import restored
from hvdtrain.run.session import Best
from hvdtrain.torch.user_loop.hooks import LoopHooks
from hvdtrain.torch.user_loop.program import Order


class Ending:
    """How a run ends, early or not."""

    _hooks: LoopHooks
    _order: Order
    _begun = is_left = False
    """Whether `epochs` was called, and whether the program has left it by `break`."""

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left, or the run was stopped."""
        return self._hooks.is_over

    def finish(self) -> None:
        """Ends the run, and the epoch in which the program has left its loop."""
        if self._order.in_epoch:
            self._hooks.end_user_epoch(self._order, leaves=True)
        if self._begun:
            self._begun = False
            self._hooks.finish()

    def stop(self, why: str) -> None:
        """Ends the run after this epoch, on all ranks, if any rank calls it: for early stopping. The run is finished
        then, and a later start trains no further. Raises LoopError outside of an epoch."""
        self._order.stop(why)

    def best(self) -> int:
        """Gives the model, the optimizers and what the program has given as `state` what the best checkpoint holds, on
        all ranks, as for a last test. Every rank calls it, after the loop over `epochs`. It writes no checkpoint: a
        later start continues from the newest one. Returns after how many updates the best one was written. Raises
        LoopError and CheckpointError."""
        if not self.is_left and (self._order.in_epoch or not self.is_over):
            raise LoopError("run.best() was called before the run's end; call it after the loop over run.epochs().")
        self.finish()
        folder = self._hooks.run.folder
        found = checkpoint.chosen(folder.path, best=True)[0] if folder else None
        step = int(restored(self._hooks.trainer, found)["step"])
        self._hooks.note(f"the weights are those of the best checkpoint, of step {step}, from now on")
        return step

    def stop_when(
        self, *, patience: int, metric: str | None = None, min_delta: float = 0.0, after_epoch: int = 0
    ) -> None:
        """Ends the run, on all ranks, after `patience` epochs in which a reported number was not better by more than
        `min_delta` than before. Every rank calls it before `epochs`. The count is kept in each checkpoint.

        `metric` is its name, as "valid_f1", or "lowest cells" where the name does not show which is better; left out,
        what `world.run` chooses the best checkpoint by. The first `after_epoch` epochs do not count, nor does one that
        does not report it. Raises LoopError.
        """
        if self._order.in_epoch:
            raise LoopError("run.stop_when() was called inside of an epoch; call it before run.epochs().")
        self._hooks.rule = _rule(patience, metric, min_delta, after_epoch, self._hooks.best)
        self._hooks.progress.judge_again(self._hooks.rule)


def _rule(patience: int, metric: str | None, min_delta: float, after_epoch: int, best: Best) -> Rule:
    for name, value, least in (("patience", patience, 1), ("after_epoch", after_epoch, 0)):
        if not isinstance(value, int) or value < least:
            raise LoopError(f"{name} of run.stop_when() must be a whole number of at least {least}, got {value!r}.")
    if not 0 <= min_delta < math.inf:
        raise LoopError(f"min_delta of run.stop_when() must be at least 0, got {min_delta!r}.")
    highest, lowest = best
    chosen = Metric(highest or lowest or "valid_loss", highest is not None)
    try:
        chosen = parsed("metric of run.stop_when()", metric) if metric else chosen
    except RecipeError as error:
        raise LoopError(str(error)) from None
    return Rule(patience, chosen, min_delta, after_epoch)
