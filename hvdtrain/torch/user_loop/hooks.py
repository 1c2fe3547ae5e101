"""What is due after each step and epoch of a program's loop."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.core.recipe.stopping import Rule
from hvdtrain.core.sharing import gather, of_all
from hvdtrain.core.wording import counted
from hvdtrain.errors import AgreementError, LoopError
from hvdtrain.ranks import agreement
from hvdtrain.run.examples import DRAWS
from hvdtrain.run.session import Best, UserHooks, UserRun
from hvdtrain.torch.averaging import divisor, mean_count
from hvdtrain.torch.engines import EVERY_RANK, Engine, seed
from hvdtrain.torch.objective import StepOutput
from hvdtrain.torch.objective.means import before_backward, no_means
from hvdtrain.torch.trainer import Replica
from hvdtrain.torch.user_loop.averager import LEAVE, LOSS, SKIP, STEP, LoopAverager
from hvdtrain.torch.user_loop.program import ENDS, Order, Program, number, score

REMEDY = "call run.loss(total, count)"


class LoopHooks(UserHooks[Replica]):
    """What is due after each step and epoch of a program's loop."""

    length: UserSampling
    rule: Rule | None = None
    """When the run ends early; see `Run.stop_when`."""

    def __init__(self, run: UserRun, replica: Replica, program: Program, best: Best, compression: str) -> None:
        engine, model = replica.engine, replica.model
        super().__init__(run, replica, UserSampling(0, 0, engine.size, program.seed, draws=DRAWS), best)
        self.program = program
        self.averager: LoopAverager | None = None
        if engine.size > 1:
            self.averager = LoopAverager(model, engine, compression, program.optimizers, run.topology.host)
        replica.averager = self.averager
        self.losses = Losses(program, engine, self.averager, self._look)
        self.seeds = Seeds(program.seed, engine.device)
        self._lines: list[str] = []
        """Lines of the log on the losses of the first step."""
        self._is_left_early = False
        """Whether the program has left the batches of any epoch before their end."""
        self._is_scored = bool(self.resumed_from)
        """Whether an epoch, maybe before this start, has reported what decides on the best checkpoint."""
        self._resumed = replica.fingerprints() if self.resumed_from else []

    def set_end(self, epochs: int, max_steps: int | None) -> None:
        """Sets after how many epochs and steps the run ends. Raises LoopError."""
        if epochs < 1 or (max_steps is not None and max_steps < 1):
            raise LoopError(f"epochs and max_steps must be at least 1, got {epochs} and {max_steps}.")
        self.length = replace(self.length, epochs=epochs, max_steps=max_steps)
        if self._resumed and not self.is_over and self.trainer.fingerprints() != self._resumed:
            raise LoopError(
                "the program has changed the weights since world.run took them from the checkpoint, as by others that "
                "it loads; change them before world.run, or only where run.global_step is 0."
            )
        self._resumed = []
        progress = self.progress
        progress.judge_again(self.rule)
        if self.resumed_from and self.is_over:
            self.refuse_others()
            more = "; a larger patience trains on" * progress.patience.is_over
            why = f"was stopped ({progress.ended}{more})" if progress.ended else "has no epoch left"
            self.note(
                f"this folder's run {why}: it is finished at epoch {progress.epoch}, step {progress.step}, and nothing "
                "is trained; another training, as of the next fold, needs a folder of its own"
            )

    def _look(self, loss: Any) -> None:
        """Called before each backward of this start's first step, on several ranks; and of parts."""
        self.losses.begins(loss)
        whole = self.length.global_batch if self.averager and not self._made_steps else 0
        if whole and self.losses.count is None:
            self._lines += no_means(loss, whole // self.length.size, "the loss", REMEDY, whole)

    def user_step(self, loss: Any, metrics: dict[str, Any]) -> None:
        """Counts an update with this loss and these metrics, and does what is due after it. A loss of None is that of
        a batch that was left out."""
        if self.averager:
            if loss is None:
                self.averager.take_part(SKIP)
            self.averager.updated()
        if not self._made_steps:
            self.losses.made_step()
            self.check_step()
            for line in dict.fromkeys(itertools.chain(*of_all(self._lines, self.engine))):
                self.note(line)
        self.trainer.share_buffers()
        if loss is not None:
            self.trainer.meter.add(self.losses.seen(loss, metrics, self.length.global_batch // self.length.size))
        if self.averager and self.averager.unreached and not self._made_steps:
            never = ", ".join(self.averager.unreached)
            self.note(f"the first backward reached none of {never}: its update leaves them as they are")
        self.step(self.program.lr)
        self.after_step()

    def check_step(self) -> bool:
        if self.averager:
            self.averager.take_part(STEP)
        return True

    def settle(self, *, is_within: bool = False) -> None:
        """Does what is due after an epoch's last step, where the program has left the epoch's batches early;
        `is_within`: where it validates and may read on."""
        if not self.is_settled and self.averager:
            self.averager.take_part(LEAVE)
        self.end_steps(self.program.lr)
        progress, length = self.progress, self.length
        is_whole = not progress.sample or progress.is_done(length) or progress.is_epoch_done(length)
        if length.global_batch and not (is_within or is_whole or self._is_left_early):
            self._is_left_early = True
            steps = f"{progress.updates(length)} of {counted(length.train_examples // length.global_batch, 'step')}"
            self.note(
                f"epoch {progress.epoch} was left after {steps}; a run that resumes inside such an epoch continues "
                "with the next batch, and cannot know where you would leave: decide by run.global_step, or give "
                "run.epochs(..., max_steps=)"
            )

    def end_user_epoch(self, order: Order, *, leaves: bool) -> None:
        """Ends an epoch; `leaves`: by a break. Where any rank has stopped the run, the epoch is the last one on all
        ranks. Every rank calls it. Raises AgreementError where the ranks differ, LoopError where the epoch had
        no step, or none has reported what the best checkpoint needs."""
        order.in_epoch, order.has_batch, reported = False, False, order.reported
        self.settle()
        progress, among = self.progress, self.comparison.among
        compared: dict[str, Any] = {f"what follows epoch {progress.epoch}": ENDS[leaves]}
        stops = gather(np.array([int(order.why is not None)]), *among[0], self.engine.sum)
        if (stops & ~1).any():  # no flag: another rank begins the epoch's batches, and compares what it reads
            raise AgreementError(agreement.differences(agreement.named("report", compared), *among))
        if stops.any():
            progress.ended = order.why or "another rank called run.stop()"
        if not progress.sample:
            raise LoopError(f"epoch {progress.epoch} ended without a step; train on run.batches() and call run.step().")
        if progress.is_done(self.length):
            compared.clear()
        compared[f"steps of epoch {progress.epoch}"] = progress.updates(self.length)
        compared |= {"rule of run.stop_when": str(self.rule)} if self.rule else {}
        compared |= {name: value + 0.0 for name, value in reported.items()}  # without the sign of a zero
        agreement.check_values(agreement.named("report", compared), *among)
        loss = {"loss": progress.train.mean_loss} if progress.train.count else {}  # else each batch was left out
        if not loss and self.losses.are_left_out:
            self.run.check_finite(Totals(math.nan, 0), progress.step)
        values = {f"train_{name}": mean for name, mean in (loss | progress.train.means).items()} | reported
        self.report(values)
        self.program.is_validated |= "valid_loss" in reported and not any(self.best)
        best = score(values, self.best, self.program.is_validated)
        self.end_epoch(_after(self, values), best)
        self._is_scored = self._is_scored or best is not None or not any(self.best)
        if not self._is_scored and (reported or self.is_over):
            decides = f"{self.best[0] or self.best[1]} decides on the best checkpoint"
            self.note(text := f"{decides}, but run.report() got {', '.join(values)}; report it.")
            if self.is_over:
                raise LoopError(text)

    def write_checkpoint(self, valid_score: float | None) -> None:
        super().write_checkpoint(valid_score)
        self.look()

    def look(self) -> None:
        """Names what the program changes and no checkpoint holds, and what differs between the ranks or from the run's
        first start. Every rank calls it before the first step and at each checkpoint."""
        for line in _changes(self.program, self.engine):
            self.note(line)

    def close(self, error: type[BaseException] | None) -> None:
        self.losses.unwatch()
        if self.averager:
            self.averager.close()
        super().close(error)


def _after(hooks: LoopHooks, values: dict[str, float]) -> Progress:
    """Where the run continues after an epoch with these metrics."""
    after, rule = hooks.progress.after_steps(hooks.length), hooks.rule
    if rule and rule.metric and after.epoch > hooks.progress.epoch and not after.ended:
        if rule.metric.name in values:
            after.observe(rule, values)
        else:
            hooks.note(f"run.stop_when: epoch {after.epoch} does not count, as it has no {rule.metric.name}")
    return after


def _changes(program: Program, engine: Any) -> Iterator[str]:
    looks = program.looks
    yield from looks.look()
    if looks.made == 1:
        program.beside = program.beside or looks.beside
        yield from looks.unlike(program.beside, of_all(looks.beside, engine))


class Losses:
    """The losses and metrics of a program's updates: means over examples, or over what the program counts."""

    def __init__(
        self, program: Program, engine: Engine, averager: LoopAverager | None, look: Callable[[Any], None]
    ) -> None:
        """`look`: what is called before each backward of this start's first step, on several ranks; and of parts."""
        self._program, self._engine, self._averager, self._look = program, engine, averager, look
        self.unwatch = before_backward(look) if averager else lambda: None
        self._adds_up = False
        """Whether the program has added up gradients of parts of an update."""
        self.count: torch.Tensor | None = None
        """The mean count by which the program has divided its loss in this update; None where it has not."""
        self.are_left_out = False
        """Whether a scaler has left out an update, as its loss was not finite."""
        self.begin_batch()

    def begin_batch(self) -> None:
        """Called before each batch."""
        self.are_parts, self._made = False, 0
        """Whether the program adds up gradients of parts, and how many backwards have begun since the batch."""
        self._sum = self._last = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        """The sum of the losses at which they have begun, and that of the last one."""

    def add_up(self, enabled: bool) -> None:
        """Called where the program may add up gradients of parts, and where it does. PyTorch's compiler traces what
        looks at a backward, so nothing does in a program without parts."""
        if not self._adds_up:
            self._adds_up = True
            self.unwatch()
            self.unwatch = before_backward(self._look)
        self.are_parts |= enabled

    def made_step(self) -> None:
        """Called after the first step: what has no parts is looked at no more."""
        if not self._adds_up:
            self.unwatch()

    def begins(self, loss: torch.Tensor) -> None:
        """Takes the loss at which a backward begins."""
        last = loss.detach().double().reshape(())
        if (scaler := self._program.scaler).is_enabled():
            last = last / scaler.scale(torch.ones_like(last))
        self._sum, self._last, self._made = self._sum + last, last, self._made + 1

    def of_update(self, given: Any) -> Any:
        """The loss of an update for which a program has given this one: the sum of those at which its backwards have
        begun, where it has given None, or that of the last of several parts or its mean. Raises LoopError."""
        if given is None:
            if not self._made:
                raise LoopError("run.step() needs a loss where no backward() under run.accumulating() began at one.")
            return self._sum
        given = number(given)
        if not self.are_parts or self._made < 2:
            return given
        own = torch.as_tensor(given, dtype=torch.float64, device=self._last.device)
        is_part = torch.isclose(own, self._last) | torch.isclose(own, self._last * self._made)
        return torch.where(is_part, self._sum, own)

    def mean(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """See `Run.loss`."""
        if self._averager:
            self._averager.take_part(LOSS)
        self.count = mean_count(number(count), self._engine)
        return (total / divisor(self.count)).to(total.dtype)

    def seen(self, loss: Any, metrics: dict[str, Any], count: int) -> StepOutput:
        """An update's loss, a number, and metrics of `count` examples, given as means or, of metrics, as pairs (sum,
        count)."""
        if self.count is not None:
            metrics["loss"], self.count = (loss * self.count, self.count), None
        given = self._program.scaler, *self._program.state.values()  # one leaves this update out on all ranks
        if any(each.is_enabled() for each in given if hasattr(each, "get_scale")) and not math.isfinite(loss):
            loss, metrics, count, self.are_left_out = 0.0, dict.fromkeys(metrics, (0.0, 0)), 0, True
        pairs = {name: of if isinstance(of, tuple) else (number(of) * count, count) for name, of in metrics.items()}
        return StepOutput(loss, count, {name: (number(total), number(many)) for name, (total, many) in pairs.items()})


class Seeds:
    """What a program draws alike on all ranks, by its seed."""

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._device = number, device
        self._generator, self._step = torch.Generator(device), -1

    def generator(self, step: int) -> torch.Generator:
        """See `Run.generator`."""
        if self._step != step:
            self._step = step
            self._generator.manual_seed(hash((self._number, step)))
        return self._generator

    def outside(self, epoch: int, when: int) -> None:
        """Seeds what the program draws outside of an epoch's batches; `when`: before (-1) or after them (-2), or after
        the run, another number for each run of the program."""
        seed(self._number, when - 2 * epoch, EVERY_RANK, self._device)
