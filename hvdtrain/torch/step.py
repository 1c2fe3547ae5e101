"""One update of the weights, plain, compiled or as one CUDA graph. Needs PyTorch and NumPy, and no more."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvdtrain.errors import RecipeError
from hvdtrain.torch import compiling, optimizers
from hvdtrain.torch.ema import Ema
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.counts import Counts
from hvdtrain.torch.objective import Objective, Seen
from hvdtrain.torch.state import lr_ratios, set_lr

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
NOTHING: AbstractContextManager[None] = nullcontext()

Pair = tuple[torch.Tensor, torch.Tensor]
Phase = Callable[[str], AbstractContextManager[Any]]


def unwatched(name: str) -> AbstractContextManager[None]:
    """A phase of a step that is not measured.

    Examples:
        >>> with unwatched("forward"):
        ...     pass
    """
    return NOTHING


def autocast(recipe: "Recipe", device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision where the recipe says so.

    Examples:
        >>> from hvdtrain.core.recipe import load
        >>> with autocast(load("digits", {"precision": "bfloat16"}), torch.device("cpu")):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.bfloat16
    """
    mixed = recipe.precision in {"bfloat16", "float16"}
    return torch.autocast(device.type, DTYPES[recipe.precision]) if mixed else NOTHING


def norm_of(parameters: Iterable[torch.Tensor]) -> float | None:
    """The common norm of the parameters' gradients; None where there is none, as after zero_grad().

    Examples:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (3 * weight[0] + 4 * weight[1]).backward()
        >>> norm_of([weight])
        5.0
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    return float(nn.utils.get_total_norm(gradients)) if gradients else None


class Step:
    """One rank's updates: its network, optimizer and loss scale, and the way from micro-batches to new weights.

    Examples:
        >>> from hvdtrain.core.recipe import load
        >>> from hvdtrain.torch.engines.local import LocalEngine
        >>> step = Step(load("linear"), LocalEngine(torch.device("cpu")), nn.Linear(1, 1), lr=0.1)
        >>> seen = step([(torch.ones(8, 1), torch.zeros(8, 1))], lr=0.1)  # one micro-batch
        >>> [(each.loss.dim(), each.count) for each in seen]
        [(0, 8)]
    """

    def __init__(
        self,
        recipe: "Recipe",
        engine: Engine,
        model: nn.Module,
        lr: float,
        weight: Callable[[int], float] = lambda examples: 1.0,
        phase: Phase = unwatched,
        in_one: bool = False,
        record: compiling.Recorder | None = None,
    ) -> None:
        """`weight` of a micro-batch of so many examples in the mean over all ranks. `phase` goes around each phase of
        a step. `in_one`: one process with one device, which may compile the network as one. `record` makes a graph of
        the whole update, of micro-batches whose shapes never change; a graph has no phases, and no float16.

        Raises EngineUnavailable where the recipe's `compile` finds no compiler.
        """
        self.recipe, self.engine, self.model, self._weight, self._phase = recipe, engine, model, weight, phase
        if recipe.compile:
            compiling.check_compiler(engine.device)
            compiling.compile_training(model, in_blocks=not in_one)
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=recipe.precision == "float16")
        fused = recipe.fused_optimizer or bool(record) or (recipe.compile and in_one)
        self.objective = Objective(recipe)
        self.network, self.optimizer = engine.wrap(model, optimizers.make(recipe, model, lr, fused))
        self.lr_ratios = lr_ratios(self.optimizer, lr)
        self._parameters, self._counts = list(model.parameters()), Counts(engine)
        self._norm: torch.Tensor | None = None
        """Of the gradients before they were clipped."""
        # Of what lies where the engine has put it.
        self.ema = Ema(model, recipe.ema_decay) if recipe.ema_decay else None
        self.update: Callable[[list[Any]], list[Seen]] = self._update
        """The update of this rank's micro-batches; of each what is to be reported: where the update is a graph, the
        same tensors in every call, with new values."""
        if record:
            self.update = compiling.Captured(self._update, engine.device, record)
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], device=engine.device)  # a number would be recorded as it is

    def __call__(self, micro_batches: list[Any], lr: float) -> list[Seen]:
        """`update` at this LR."""
        self.set_lr(lr)
        return self.update(micro_batches)

    def set_lr(self, lr: float) -> None:
        """Sets the LR of the next updates; a group of parameters that began with another keeps its ratio to it."""
        set_lr(self.optimizer, lr, self.lr_ratios)

    def _update(self, micro_batches: list[Any]) -> list[Seen]:
        self.optimizer.zero_grad()
        seen = self._differentiate(micro_batches)
        with self._phase("allreduce"):
            self.engine.finish()
            self._counts.finish(self._parameters)
        with self._phase("update"):
            if self.recipe.clip_norm:
                self.scaler.unscale_(self.optimizer)
                self._norm = nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.ema:
                self.ema.update()
        return seen

    def _differentiate(self, micro_batches: list[Any]) -> list[Seen]:
        results = []
        with self._phase("forward"):
            inputs = [self.objective.inputs(batch) for batch in micro_batches]
            outputs = self.engine.outputs(self.network, inputs, self.objective.forward)
        for batch in micro_batches:
            with self._phase("forward"), autocast(self.recipe, self.engine.device), self._explained():
                loss, seen = self.objective.measure(next(outputs), batch, training=True)
            with self._phase("backward"):
                self.scaler.scale(self._weighted(loss, seen, len(micro_batches))).backward()
            results.append(seen)
        return results

    def _weighted(self, loss: torch.Tensor, seen: Seen, micro_batches: int) -> torch.Tensor:
        """A micro-batch's part of the mean over the global batch. An operation that changes nothing costs two."""
        if "loss" in seen.metrics:
            if self.recipe.reduction == "adasum":
                name = self.recipe.loss or self.recipe.step
                raise RecipeError(f"{name} gives (sum, count), which reduction adasum cannot divide; drop adasum.")
            return self._counts.divided(loss, seen.metrics["loss"][1])
        weight = self._weight(seen.count)
        return loss if weight == micro_batches == 1 else loss * weight / micro_batches

    def gradient_norm(self) -> float | None:
        """Of the last update's averaged gradients, before they were clipped; None before the first one."""
        return norm_of(self._parameters) if self._norm is None else float(self._norm)

    def evaluate(self, batch: Any) -> Seen:
        """What is to be reported of a validation batch."""
        inputs = self.objective.inputs(batch)
        with self._explained():
            return self.objective.measure(self.objective.forward(self.network, inputs), batch)[1]

    def _explained(self) -> AbstractContextManager[None]:
        return self.objective.explained(self.engine.is_lost)
