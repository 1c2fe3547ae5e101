"""One update of the weights, plain, compiled or as one CUDA graph. Needs PyTorch and NumPy, and no more."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.torch import optimizers
from hvdtrain.torch.averaging import Counts
from hvdtrain.torch.ema import Ema
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.objective import Objective, Seen
from hvdtrain.torch.resnet import ResNet
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
WARM_STEPS = 3
"""Updates before the capture: cuDNN and Triton time their kernels in these, which a capture forbids."""

Tensors = tuple[torch.Tensor, ...]
Work = Callable[[], list[Any]]
Recorder = Callable[[Work], tuple[Callable[[], object], list[Any]]]


def unwatched(name: str) -> AbstractContextManager[None]:
    """A phase of a step that is not measured."""
    return NOTHING


def autocast(recipe: "Recipe", device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision where the recipe says so."""
    mixed = recipe.precision in {"bfloat16", "float16"}
    return torch.autocast(device.type, DTYPES[recipe.precision]) if mixed else NOTHING


def norm_of(parameters: Iterable[torch.Tensor]) -> float | None:
    """The common norm of the parameters' gradients; None where there is none, as after zero_grad()."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    return float(nn.utils.get_total_norm(gradients)) if gradients else None


def check_compiler(device: torch.device) -> None:
    """Raises EngineUnavailable where what torch.compile needs for the device is missing."""
    on_gpu = device.type == "cuda"
    if on_gpu and not importlib.util.find_spec("triton"):
        raise EngineUnavailable("compile needs Triton for a GPU; pip install triton, or drop compile.")
    name, usual = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    wanted = [os.environ[name]] if name in os.environ else usual
    if not any(map(shutil.which, wanted)):
        raise EngineUnavailable(
            f"compile needs a compiler, and {wanted[0]} is not in PATH; apt-get install g++, or set {name}, or drop "
            "compile."
        )


def compile_training(model: nn.Module, in_blocks: bool) -> None:
    """Compiles the model's forward and backward in training mode; evaluation stays as it is.

    A compiled backward hands over all its gradients at its end. `in_blocks`, for an engine that sends gradients while
    backward runs, compiles a ResNet's blocks one by one where most of the parameters are.
    """
    for module in _blocks(model) if in_blocks else [model]:
        module.forward = _in_training(module)


def _blocks(model: Any) -> Iterable[nn.Module]:
    if not isinstance(model, ResNet):
        return [model]
    return [model.layer1, model.layer2, *model.layer3, *model.layer4]


def _in_training(module: nn.Module) -> Callable[..., Any]:
    plain = module.forward
    compiled = torch.compile(plain, dynamic=False)

    def forward(*x: Any, **named: Any) -> Any:
        return (compiled if module.training else plain)(*x, **named)

    return forward


def record_cuda_graph(work: Work) -> tuple[Callable[[], object], list[Any]]:
    """The work's kernels as a CUDA graph to replay, and the tensors that a replay leaves its results in."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph.replay, results


class Captured:
    """An update of static shapes whose kernels are recorded once and then started together.

    `update` maps micro-batches [(x, y), …] to their results. The first WARM_STEPS updates are ordinary ones. A call
    overwrites what the one before returned.
    """

    def __init__(
        self,
        update: Callable[[list[Any]], list[Any]],
        device: torch.device,
        record: Recorder = record_cuda_graph,
    ) -> None:
        self._update, self._record, self._warm = update, record, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The same tensors from the first step on: a capture must run nothing that would be compiled anew.
        self._inputs: list[Tensors] = []
        self._results: list[Any] = []
        self._replay: Callable[[], object] | None = None

    def __call__(self, micro_batches: list[Any]) -> list[Any]:
        self._inputs = self._inputs or [tuple(tensor.clone() for tensor in each) for each in micro_batches]
        for own, given in zip(self._inputs, micro_batches, strict=True):
            for kept, new in zip(own, given, strict=True):
                kept.copy_(new)
        if self._warm < WARM_STEPS:
            self._warm += 1
            return self._beside()
        if not self._replay:
            self._replay, self._results = self._record(lambda: self._update(self._inputs))
        self._replay()
        return self._results

    def _beside(self) -> list[Any]:
        # Off the default stream: autograd comes back to the stream that it first ran on, and no capture may wait for
        # the default one (PyTorch's CUDA semantics, whole-network capture).
        if not self._stream:
            return self._update(self._inputs)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = self._update(self._inputs)
        current.wait_stream(self._stream)
        return results


class Step:
    """One rank's updates: its network, optimizer and loss scale, and the way from micro-batches to new weights."""

    def __init__(
        self,
        recipe: "Recipe",
        engine: Engine,
        model: nn.Module,
        lr: float,
        weight: Callable[[int], float] = lambda examples: 1.0,
        phase: Phase = unwatched,
        in_one: bool = False,
        record: Recorder | None = None,
    ) -> None:
        """`weight` of a micro-batch of so many examples in the mean over all ranks. `phase` goes around each phase of
        a step. `in_one`: one process with one device, which may compile the network as one. `record` makes a graph of
        the whole update, of micro-batches whose shapes never change; a graph has no phases, and no float16.

        Raises EngineUnavailable where the recipe's `compile` finds no compiler.
        """
        self.recipe, self.engine, self.model, self._weight, self._phase = recipe, engine, model, weight, phase
        if recipe.compile:
            check_compiler(engine.device)
            compile_training(model, in_blocks=not in_one)
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
            self.update = Captured(self._update, engine.device, record)
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
