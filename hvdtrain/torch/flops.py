"""For a plan: a network's FLOPs, as PyTorch counts them, and an optimizer's groups with other LRs than the run's."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.core import user_code
from hvdtrain.core.network import EXAMPLES, counted_examples
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import PlanError
from hvdtrain.torch import models, networks, optimizers
from hvdtrain.torch.data import Loader
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.objective import Objective
from hvdtrain.torch.user_loop.gather import JOINED


def count(recipe: Recipe, dataset: Dataset) -> int:
    """FLOPs of the forward pass of one example, in training: convolutions, matrix products and attention; a
    multiply-add is 2. For a recipe with a step, those of the step.

    Counts two examples of the training set on the device "meta", which computes nothing, or on the CPU where the code
    needs numbers. Raises HvdtrainError where it fails there too.
    """
    cpu = torch.device("cpu")
    objective = Objective(recipe, LocalEngine(cpu))
    JOINED[:] = [LocalEngine(cpu)]
    objective.classes = dataset.classes
    batch = next(Loader(recipe, dataset, cpu).batches(dataset.train, [counted_examples(dataset)]))
    data = objective.inputs(batch)
    try:
        model = networks.without_memory(recipe, dataset.classes)
        on_meta = tree_map_only(torch.Tensor, lambda one: one.to("meta"), data)
        flops, out = _counted(recipe, objective, model, on_meta)
    except Exception:  # of the user's code, or of an operation that the device does not have
        try:
            flops, out = _counted(recipe, objective, networks.build(recipe, dataset.classes), data)
        except Exception as error:
            raise PlanError(f"{recipe.step or recipe.model}: {user_code.reason(error)}") from error
    if not dataset.text:  # whose classes are the last axis, which is looked at as the loss is taken
        objective.check_outputs(out)
    return flops


def lr_groups(recipe: Recipe, dataset: Dataset, lr: float) -> str:
    """A plan's text on groups of parameters with other LRs than the run's. Raises RecipeError."""
    optimizer = optimizers.make(recipe, networks.without_memory(recipe, dataset.classes), lr, fused=False)
    return optimizers.lr_groups(optimizer, optimizers.lr_ratios(optimizer, lr))


def _counted(recipe: Recipe, objective: Objective, model: nn.Module, data: Any) -> tuple[int, Any]:
    if recipe.precision == "float64":
        model = model.double()
    models.training_mode(model, recipe)
    with FlopCounterMode(display=False) as counter:
        out = objective.forward(model, data)
    return int(counter.get_total_flops()) // EXAMPLES, out
