"""Gradients averaged over the ranks while backward runs, in messages whose content never changes.

Horovod itself copies the gradients that are ready at one moment into a buffer, and back: it copies much, and the order
of a sum depends on the moment. Here a large gradient is communicated from its own memory, and small ones in a bucket
that they stay in. PyTorch's DistributedDataParallel copies more, too: its buckets (Li et al. 2020, arXiv:2006.15704,
section 3.2) hold the large gradients as well.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hvdtrain.core.recipe import Recipe
from hvdtrain.errors import HvdtrainError, LoopError, RecipeError
from hvdtrain.ranks.stacks import AVERAGING, mark_module
from hvdtrain.torch.engines import Engine, Forward
from hvdtrain.torch.engines.buckets import DTYPES, Messages
from hvdtrain.torch.engines.evidence import Evidence
from hvdtrain.torch.objective import call

mark_module(AVERAGING, __name__)


SPARSE = "the gradient of {} is sparse, ranks average dense ones; drop sparse."
OF_A_GRAPH = (
    "backward(create_graph=True) makes gradients of each rank's own graph, which no average is a part of; take "
    "torch.autograd.grad(..., create_graph=True) for a penalty, and backward() of the whole loss."
)


class HookedParameters:
    """A model's parameters, also those that it is given later: each has a hook, which is called with it once backward
    has computed its gradient. And which of them learn."""

    def __init__(self, model: nn.Module, computed: Callable[[nn.Parameter], None]) -> None:
        self._model, self._computed, self._is_followed = model, computed, False
        self.hooks: dict[nn.Parameter, RemovableHandle] = {}
        self.learning: tuple[bool, ...] = ()
        """Which of the model's parameters learned in the last backward."""
        watch = nn.modules.module
        self._watches = [
            watch.register_module_parameter_registration_hook(self._registered),
            watch.register_module_module_registration_hook(self._registered),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in (*self.hooks.values(), *self._watches):
            hook.remove()

    def have_changed(self) -> bool:
        """Reads anew which parameters learn; returns whether these are others than before."""
        before = self.learning if self._is_followed else None
        if not self._is_followed:
            self._modules, self.named = set(self._model.modules()), dict(self._model.named_parameters())
            self._is_followed = True
            for parameter in self.named.values():
                self._watch(parameter)
        self.learning = tuple([each.requires_grad for each in self.named.values()])
        return self.learning != before

    def name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, each in self.named.items() if each is parameter), "a parameter")

    def _watch(self, parameter: nn.Parameter) -> None:
        if parameter in self.hooks or not (parameter.is_floating_point() or parameter.is_complex()):
            return
        learns = parameter.requires_grad
        parameter.requires_grad_(True)  # PyTorch refuses a hook on a frozen one, but the hook stays when it is frozen
        self.hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._computed)
        parameter.requires_grad_(learns)

    def _registered(self, module: nn.Module, name: str, new: Any) -> None:
        """Called for each module or parameter that any module is given: of the model's it may be the next to learn."""
        if module in self._modules and new is not None:
            self._is_followed = False
            self._modules.update(new.modules() if isinstance(new, nn.Module) else ())
            for parameter in new.parameters() if isinstance(new, nn.Module) else [new]:
                self._watch(parameter)


class Codes:
    """Compares which backward of which update each rank is in, by a number of each rank among what they average.

    A code has 7 bits, which also the mean of bfloat16 numbers keeps: one rank's code divided by the number of ranks.
    The highest bit is set where the rank has no backward.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None
        """The ranks' codes, on their way from a GPU."""

    def write(self, codes: torch.Tensor, update: int, backward: int, is_absent: bool) -> None:
        """Writes this rank's code into those of all ranks [size], to be averaged."""
        codes.zero_()[self._engine.rank] = is_absent << 6 | update % 8 << 3 | backward % 8

    def compare(self, codes: torch.Tensor) -> None:
        """Compares averaged codes: on a GPU, for which the host does not wait, those of the call before. Raises
        LoopError where they differ."""
        if codes.is_cuda:
            kept = torch.empty_like(codes, device="cpu", pin_memory=True).copy_(codes, non_blocking=True)
            arrived, self._arriving = self._arriving, (kept, torch.cuda.Event())
            self._arriving[1].record()
            if not arrived:
                return
            arrived[1].synchronize()
            codes = arrived[0]
        marks = (codes.double() * self._engine.size).round().long().tolist()
        if unlike := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:
            absent = [rank for rank, mark in enumerate(marks) if mark >> 6]
            rank = (absent or unlike)[0]
            other = next(each for each, mark in enumerate(marks) if mark != marks[rank])
            calls = [f"backward {mark % 8 + 1} of update {mark // 8 % 8}" for mark in marks]
            does = "has no backward" if absent else f"is in {calls[rank]} (modulo 8)"
            raise LoopError(
                f"rank {rank} {does} where rank {other} is in {calls[other]}: gradients of different updates would be "
                "averaged; every rank calls backward equally often, and one that has nothing to learn from calls "
                "(loss * 0).backward()."
            )


class Averager:
    """Averages a model's gradients while backward computes them. Model and optimizer stay as they are.

    Every rank sends the same messages in the same order, whichever parameters its backward reached. A parameter that no
    rank reached keeps the gradient that it had, so that 1 rank and N ranks train alike.

    What learns is read anew at the first gradient of each backward: the program may freeze and thaw parameters, and add
    layers, on all ranks alike. A gradient knows its step: see `Codes`.
    """

    error: type[HvdtrainError] = RecipeError
    in_bucket = True
    """Whether the last message has the ranks' codes, where each backward is a message of its own."""

    def __init__(self, model: nn.Module, engine: Engine, compression: str, *, at_end: bool = True) -> None:
        """`at_end`: the end of each backward calls `finish`; without it, every rank calls it after its backward."""
        self._engine, self._at_end = engine, at_end
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise self.error(SPARSE.format(f"{name}.weight" if name else "weight"))
        slots = engine.size if at_end and self.in_bucket else 0
        given = engine, engine.bucket_bytes(), DTYPES[compression]
        self._messages_of = functools.partial(Messages, *given, keeps=at_end, slots=slots)
        self._accumulating = self._running = False
        self._computed_here: set[nn.Parameter] = set()
        """Parameters whose gradients are not averaged yet."""
        self.refusal = ""
        """Why a backward must not average now; empty where it may."""
        self.unreached: list[str] = []
        """The names of the parameters that no rank has reached in this update's backwards so far."""
        self._update = self.backwards = 0
        """The number of updates, and of this update's backwards; see `Codes`."""
        self._is_absent = False
        self._codes = Codes(engine)
        self.parameters = HookedParameters(model, self._computed)
        self._divide()
        self.evidence = Evidence(self.parameters.named.values())
        self._watches = [
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(lambda *_: self.evidence.stepped(self.parameters.hooks)),
        ]

    def close(self) -> None:
        """Removes the hooks from the model."""
        self.parameters.close()
        for hook in self._watches:
            hook.remove()

    @contextlib.contextmanager
    def pause(self, enabled: bool = True) -> Iterator[None]:
        """Within the block gradients add up on each rank and are not communicated."""
        before, self._accumulating = self._accumulating, self._accumulating or enabled
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self, *, lacks: bool = False) -> None:
        """Waits until every gradient is the mean over the ranks. A rank that `lacks` memory has ended its backward
        early, and sends the rest with a flag."""
        if self._accumulating and not lacks:
            return
        if not self._running:
            self._begin()
        with self._messages.flagged(lacks):
            self._finish()

    def updated(self) -> None:
        """Called after each update, by whoever has each backward averaged as it ends."""
        self._update, self.backwards = self._update + 1, 0

    def absent(self) -> None:
        """Called by a rank that has no backward in an update: takes part in what the others communicate."""
        self._is_absent = True
        self.finish()

    def _divide(self) -> bool:
        """Divides the parameters that learn now into messages; returns whether these are others than before."""
        if not self.parameters.have_changed():
            return False
        self._messages = self._messages_of(self.parameters.named)
        return True

    def _begin(self) -> None:
        """Called at the first gradient of a backward, or at its end where it has computed none."""
        self._running = True
        if self._divide():
            self.evidence.watch(True)
        if self._messages.slots is not None:
            self._codes.write(self._messages.slots, self._update, self.backwards, self._is_absent)

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before each optimizer's step."""
        is_inside = torch._C._current_graph_task_id() >= 0
        if not (is_inside or self.evidence.is_watched):
            return
        followed = self.parameters.hooks
        updated = [each for group in optimizer.param_groups for each in group["params"] if each in followed]
        if is_inside and updated:
            raise self.error(
                f"{type(optimizer).__name__} makes its step inside of backward(), before gradients are averaged over "
                "the ranks; call step() after backward(), or train on one rank."
            )
        self.evidence.steps(optimizer, updated)

    def _computed(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and (gradient.is_sparse or gradient.requires_grad):
            raise self.error(SPARSE.format(self.parameters.name_of(parameter)) if gradient.is_sparse else OF_A_GRAPH)
        self._computed_here.add(parameter)
        if self._accumulating:
            return
        if not self._running:
            if self.refusal:
                raise self.error(self.refusal)
            self._begin()
            if self._at_end:
                queue: Any = torch.autograd.Variable._execution_engine
                queue.queue_callback(self.finish)
        message = self._messages.of.get(parameter)
        if message is None or parameter not in message.missing:
            name = self.parameters.name_of(parameter)
            raise self.error(
                f"backward computed the gradient of {name} twice, so it cannot be averaged while it runs; where it is "
                "checkpointed, take torch.utils.checkpoint with use_reentrant=False."
                if message
                else f"{name} began to learn while backward ran; call requires_grad_() before backward()."
            )
        message.missing.remove(parameter)
        if not message.missing:
            self._messages.send(self._computed_here)

    @torch.no_grad()
    def _finish(self) -> None:
        unreached = self._messages.finish(self._computed_here)
        self._computed_here.clear()
        self.unreached = [each for each in unreached if not self.backwards or each in self.unreached]
        if self._messages.slots is not None:
            self._codes.compare(self._messages.slots)
        self._end()
        self.evidence.averaged(self._messages.names)

    def _end(self) -> None:
        """Makes ready for the next backward."""
        self._running = self._is_absent = False
        self.backwards += 1


class AveragingEngine:
    """The verbs of an engine that averages gradients by an `Averager`, which `hook` makes."""

    size: int
    notes: tuple[str, ...] = ()
    averager: Averager | None = None
    _settings: Recipe

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        if self.size > 1:
            self.hook(model, self._settings.compression)
        return model, optimizer

    def hook(self: Any, model: nn.Module, compression: str) -> None:
        """Averages the model's gradients from now on. `wrap` calls it for several ranks, a test on one GPU for one."""
        self.averager = Averager(model, self, compression, at_end=False)

    def outputs(self, network: Any, inputs: Sequence[Any], forward: Forward = call) -> Iterator[Any]:
        *first, last = inputs
        for each in first:
            with self.averager.pause() if self.averager else contextlib.nullcontext():
                yield forward(network, each)
        yield forward(network, last)

    def finish(self) -> None:
        if self.averager:
            self.averager.finish()


@torch.no_grad()
def mean_count(count: Any, engine: Engine) -> torch.Tensor:
    """The mean of the ranks' counts, a float64 scalar on the engine's device. Every rank calls it."""
    mean = torch.zeros(1, dtype=torch.float64, device=engine.device) + count
    engine.average(mean, "hvdtrain.count")()
    return mean[0]


def divisor(mean: torch.Tensor) -> torch.Tensor:
    """The number by which each rank's sum is divided: the mean of the counts, a scalar, or 1 where all are 0."""
    return mean.where(mean != 0, 1)


class Counts:
    """Divides the losses of an update's micro-batches that are sums by the counts of all ranks.

    `total` is the scalar sum of a micro-batch on this rank, `count` the number of what it adds up, a number or a scalar
    tensor. The losses are scalars of the dtype of `total`.
    """

    def __init__(self, engine: Engine, late: float = 0.0) -> None:
        """`late`: a number by which `divided` divides instead, and communicates nothing; `finish` makes up for it."""
        self._engine, self._late = engine, late
        self._means: list[torch.Tensor] = []

    def mean(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        """The loss of an update's only micro-batch, as a mean over all ranks. Every rank calls it."""
        return (total / divisor(mean_count(count, self._engine))).to(total.dtype)

    def divided(self, total: torch.Tensor, count: Any, times: int = 1) -> torch.Tensor:
        """The loss of one of several micro-batches. Its value is the micro-batch's mean, total / mean(count). Its
        backward computes the gradient of times * total / mean(count of the first micro-batch), as the sum of all counts
        is not known yet: `finish` rescales the gradients. Every rank calls it."""
        if self._late:
            self._means.append(torch.as_tensor(count, dtype=torch.float64, device=self._engine.device))
            return (total / self._late * times).to(total.dtype)
        self._means.append(mean_count(count, self._engine))
        share = total / divisor(self._means[0]) * times
        return (share + (total / divisor(self._means[-1]) - share).detach()).to(total.dtype)

    def share(self, count: Any) -> torch.Tensor:
        """What a mean over `count` is multiplied by in the loss of an update that was divided last."""
        return count / divisor(self._means[0])

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends the update: rescales averaged gradients of several micro-batches from the first one's count to the sum
        of all counts."""
        factor: torch.Tensor | None = None
        if self._late and self._means:
            factor = self._late / divisor(mean_count(sum(self._means), self._engine))
        elif len(self._means) > 1:
            factor = divisor(self._means[0]) / divisor(sum(self._means))  # type: ignore[arg-type]
        if factor is not None:
            for gradient in (each.grad for each in parameters if each.grad is not None):
                gradient.mul_(factor.to(gradient.device))
        self.forget()

    def forget(self) -> None:
        """Begins an update anew."""
        self._means.clear()
