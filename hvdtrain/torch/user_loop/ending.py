"""How a program ends its run before the last of its epochs."""

import math

from hvdtrain.core.recipe.stopping import Metric, Rule, parsed
from hvdtrain.errors import LoopError, RecipeError
from hvdtrain.run.session import Best
from hvdtrain.torch.user_loop.hooks import LoopHooks
from hvdtrain.torch.user_loop.program import Order


class Ending:
    """What of a run ends it early."""

    _hooks: LoopHooks
    _order: Order

    def stop(self, why: str) -> None:
        """Ends the run after this epoch, on all ranks, if any rank calls it: for early stopping. The run is finished
        then, and a later start trains no further. Raises LoopError outside of an epoch."""
        self._order.stop(why)

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
