"""One update of the weights, plain or compiled."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.core.recipe import Recipe
from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.torch import models, optimizers, resumable
from hvdtrain.torch.averaging import Counts
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.cuda_graph import GraphedUpdate, Recorder
from hvdtrain.torch.gpt import GPT
from hvdtrain.torch.memory import Fitting, Kept
from hvdtrain.torch.objective import Objective, StepOutput
from hvdtrain.torch.resnet import ResNet

NOTHING: AbstractContextManager[None] = nullcontext()


def unwatched(name: str) -> AbstractContextManager[None]:
    """Around a phase of a step that is not measured."""
    return NOTHING


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision within the block, where the recipe asks for it."""
    mixed = recipe.precision in {"bfloat16", "float16"}
    return torch.autocast(device.type, getattr(torch, recipe.precision)) if mixed else NOTHING


def norm_of(parameters: Iterable[torch.Tensor]) -> float | None:
    """The L2 norm of all gradients together; None where there is no gradient, as after zero_grad()."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    return float(nn.utils.get_total_norm(gradients)) if gradients else None


def check_compiler(device: torch.device) -> None:
    """Raises EngineUnavailable where torch.compile lacks Triton or a C or C++ compiler for the device."""
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
    """Compiles the model's forward and backward in training mode; evaluation is not compiled.

    A compiled backward gives all gradients at its end. `in_blocks`, for an engine that communicates gradients while
    backward runs, compiles the blocks of a ResNet's larger layers, or of a GPT, one by one.
    """
    for module in _blocks(model) if in_blocks else [model]:
        module.forward = _in_training(module)


def _blocks(model: Any) -> Iterable[nn.Module]:
    if isinstance(model, ResNet):
        return [model.layer1, model.layer2, *model.layer3, *model.layer4]
    return [*model.h] if isinstance(model, GPT) else [model]


def _in_training(module: nn.Module) -> Callable[..., Any]:
    plain = module.forward
    compiled = torch.compile(plain, dynamic=False)

    def forward(*x: Any, **named: Any) -> Any:
        return (compiled if module.training else plain)(*x, **named)

    return forward


class Step:
    """Makes one rank's updates, by its network, optimizer and loss scale: from micro-batches to new weights."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        model: nn.Module,
        lr: float,
        weight: Callable[[int], float] = lambda examples: 1.0,
        phase: Callable[[str], AbstractContextManager[Any]] = unwatched,
        in_one: bool = False,
        record: Recorder | None = None,
        global_batch: int = 1,
    ) -> None:
        """Prepares the updates. `weight` gives the weight of a micro-batch of so many examples in the mean over all
        ranks; `global_batch` counts those of an update. `phase` makes the context manager around each phase of a step.
        `in_one`: one process with one device, which may compile the network as a whole. `record` makes one graph of the
        whole update, of micro-batches whose shapes never change; a graph has neither phases nor float16. Raises
        EngineUnavailable without a compiler.
        """
        self.recipe, self.engine, self.model, self._weight, self._phase = recipe, engine, model, weight, phase
        if recipe.compile:
            check_compiler(engine.device)
            compile_training(model, in_blocks=not in_one)
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=recipe.precision == "float16")
        fused = recipe.fused_optimizer or bool(record) or (recipe.compile and in_one)
        self.objective = Objective(recipe, engine)
        self.noise = GradientNoise(model, engine.device, global_batch) if recipe.gradient_noise else None
        self.network, self.optimizer = engine.wrap(model, optimizers.make(recipe, model, lr, fused))
        self.lr_ratios = optimizers.lr_ratios(self.optimizer, lr)
        self._parameters = list(model.parameters())
        self._counts = Counts(engine, recipe.fit_memory * recipe.accumulation_steps / weight(1))  # the mean local batch
        self.fitting = Fitting(engine, (model, self.objective.owner), recipe.fit_memory)
        self._norm: torch.Tensor | None = None
        """The norm of the last update's gradients, before they were clipped."""
        self.unmet: list[str] | None = None
        # After `wrap`: the engine may have moved the model to other devices.
        self.ema = models.Ema(model, recipe.ema_decay) if recipe.ema_decay else None
        self.update: Callable[[Sequence[Any]], list[StepOutput]] = self._update
        """Makes an update from this rank's micro-batches. Returns the loss and metrics of each: where the update is a
        graph, the same tensors in every call, with new values."""
        if record:
            self.update = GraphedUpdate(self._update, engine.device, record)
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], device=engine.device)  # a graph would record a number

    def __call__(self, micro_batches: Sequence[Any], lr: float) -> list[StepOutput]:
        """Calls `update` at this LR."""
        self.set_lr(lr)
        return self.update(micro_batches)

    def set_lr(self, lr: float) -> None:
        """Sets the LR of the next updates. A group of parameters that began with another one keeps its ratio to it."""
        for group, ratio in zip(self.optimizer.param_groups, self.lr_ratios, strict=True):
            resumable.update(group, {"lr": lr * ratio})

    def _update(self, micro_batches: Sequence[Any]) -> list[StepOutput]:
        seen = self.fitting.gradients(self._gradients, micro_batches)
        with self._phase("update"):
            if self.recipe.clip_norm or self.noise:
                self.scaler.unscale_(self.optimizer)
            if self.noise:
                self.noise.averaged(self._parameters)
            if self.recipe.clip_norm:
                self._norm = nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.ema:
                self.ema.update()
        return seen

    def _gradients(self, micro_batches: Sequence[Any]) -> list[StepOutput]:
        """Computes the gradients of an update, averaged over the ranks, unless one lacks memory."""
        self.optimizer.zero_grad()
        self._counts.forget()
        seen = self._differentiate(micro_batches)
        with self._phase("allreduce"):
            self.engine.finish()
            if not self.fitting.some_lack():
                self._counts.finish(self._parameters)
        return seen

    def _differentiate(self, micro_batches: Sequence[Any]) -> list[StepOutput]:
        results: list[StepOutput] = []
        with self._phase("forward"), autocast(self.recipe, self.engine.device):
            inputs = [self.objective.inputs(batch) for batch in micro_batches]
            outputs = self.engine.outputs(self.network, inputs, self.objective.forward)
        for batch in micro_batches:
            keeping = Kept(self.model) if self.unmet is None and self.recipe.checkpoint_activations else NOTHING
            mixed = autocast(self.recipe, self.engine.device)
            with self._phase("forward"), mixed, self.objective.explained(), keeping:
                loss, seen = self.objective.measure(next(outputs), batch, training=True)
            if self.unmet is None:
                self.unmet = models.unmet(self.recipe, self.model, loss)
                if isinstance(keeping, Kept):
                    self.unmet.append(f"forward keeps {keeping.bytes / 2**20:,.1f} MiB of a micro-batch for backward")
            with self._phase("backward"):
                scaled = self.scaler.scale(self._weighted(loss, seen))
                if self.noise and not results:
                    self.noise.begin(self._share(seen) * self.scaler.get_scale(), seen.count)
                scaled.backward()
            if self.noise:
                self.noise.end()
            results.append(seen)
        return results

    def _share(self, seen: StepOutput) -> Any:
        """By what a micro-batch's mean gradient is multiplied in the sum that is averaged over the ranks."""
        if "loss" in seen.metrics:
            return self._counts.share(seen.metrics["loss"][1])
        return self._weight(seen.count) / self.recipe.accumulation_steps

    def _weighted(self, loss: torch.Tensor, seen: StepOutput) -> torch.Tensor:
        """A micro-batch's part of the mean over the global batch."""
        micro_batches = self.recipe.accumulation_steps  # or more where some of them did not fit
        if "loss" in seen.metrics:
            if self.recipe.reduction == "adasum":
                name = self.recipe.loss or self.recipe.step
                raise RecipeError(f"{name} gives (sum, count), which reduction adasum cannot divide; drop adasum.")
            return self._counts.divided(loss, seen.metrics["loss"][1])
        weight = self._weight(seen.count)
        return loss if weight == micro_batches == 1 else loss * weight / micro_batches  # no operations for nothing

    def gradient_norm(self) -> float | None:
        """The norm of the last update's averaged gradients, before they were clipped; None before the first update."""
        return norm_of(self._parameters) if self._norm is None else float(self._norm)

    def evaluate(self, batch: Any) -> StepOutput:
        """The loss and metrics of a validation batch."""
        inputs = self.objective.inputs(batch)
        with self.objective.explained():
            return self.objective.measure(self.objective.forward(self.network, inputs), batch)[1]


class GradientNoise:
    """Adds up what the noise scale follows from: in each update the squared norms of the gradient of this rank's first
    micro-batch, as backward computes it, and of the gradient averaged over all. Sums are float64, on `device`."""

    def __init__(self, model: nn.Module, device: torch.device, global_batch: int) -> None:
        self._whole = 1 / global_batch
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._square = torch.zeros((), dtype=torch.float64, device=device)
        self._is_first = False
        for each in model.parameters():
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(self._computed)

    def begin(self, factor: Any, examples: int) -> None:
        """Begins an update's first backward, of so many examples, whose gradient is `factor` times their mean one."""
        self._square.zero_()
        self._is_first, self._factor, self._part = True, factor, 1 / max(1, examples)

    def end(self) -> None:
        """Ends a backward."""
        self._is_first = False

    def averaged(self, parameters: Iterable[torch.Tensor]) -> None:
        """Ends an update: its gradients are the mean over the batch. One that is not finite is left out."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        whole = nn.utils.get_total_norm(gradients).to(self._sums).square()
        squares = torch.stack([self._square / self._factor**2, whole])
        row = torch.cat([squares, squares.new_tensor([self._part, self._whole, 1.0])])
        self._sums += row.where(squares.isfinite().all(), torch.zeros_like(row))

    def take(self) -> NDArray[np.float64]:
        """The sums [5] since the last call; see `hvdtrain.core.recipe.noise.estimated`."""
        sums = np.array(self._sums.tolist())
        self._sums.zero_()
        return sums

    def _computed(self, parameter: torch.Tensor) -> None:
        if self._is_first and parameter.grad is not None:
            self._square += torch.linalg.vector_norm(parameter.grad).to(self._square).square()
