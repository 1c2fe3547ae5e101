"""What a recipe's network costs: FLOPs, counted by TensorFlow's profiler, and bytes that forward keeps for backward."""

import math
from collections.abc import Callable
from typing import Any

from hvdtrain.core import user_code
from hvdtrain.core.network import EXAMPLES, counted_examples
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import HvdtrainError, PlanError
from hvdtrain.tensorflow import without_banner

with without_banner():  # it may be the first of TensorFlow
    import tensorflow as tf

    from hvdtrain.tensorflow import models
    from hvdtrain.tensorflow.data import Loader
    from hvdtrain.tensorflow.engines import Engine
    from hvdtrain.tensorflow.objective import Objective

CPU = "/CPU:0"


def count(recipe: Recipe, dataset: Dataset) -> int:
    """The FLOPs of one example in the forward pass of training, with its loss; a multiply-add is 2 FLOPs. They include
    additions and means of single numbers, which PyTorch's counter leaves out.

    They are counted in a graph for two training examples, which is not run. Raises HvdtrainError.
    """
    return _measured(recipe, dataset, lambda loss, _, batch: of_graph(loss, batch) // EXAMPLES)


def kept_by_layer(recipe: Recipe, dataset: Dataset, *, examples: int) -> list[tuple[str, int]]:
    """How many bytes of so many examples forward keeps for backward, in training: all, whose name is "", and those of
    layers, the largest first.

    They are counted in a graph, which is not run: what its backward reads of forward. Raises HvdtrainError, also where
    forward has a loop, of which no graph tells how often it is run.
    """

    def counted(loss: Callable[[Any], Any], model: Any, batch: Any) -> list[tuple[str, int]]:
        def whole(tensor: tf.Tensor) -> tf.TensorSpec:
            rows = [examples] if tensor.shape[:1] == [EXAMPLES] else tensor.shape[:1]
            return tf.TensorSpec([*rows, *tensor.shape[1:]], tensor.dtype)

        return _kept(
            examples, loss, model, tf.nest.map_structure(lambda each: whole(tf.convert_to_tensor(each)), batch)
        )

    found: list[tuple[str, int]] = _measured(recipe, dataset, counted)
    return found


def _measured(recipe: Recipe, dataset: Dataset, measure: Callable[[Callable[[Any], Any], Any, Any], Any]) -> Any:
    """What `measure` finds for the function that gives a batch's loss, the model, and a batch of EXAMPLES."""
    request = counted_examples(dataset)
    batch = next(iter(Loader(recipe, CPU).batches(dataset.train, [request])))
    engine = Engine(CPU)
    model, objective = models.build(recipe, dataset, engine), Objective(recipe, dataset, engine)
    try:
        return measure(lambda inputs: objective.measure(model, inputs, training=True)[0], model, batch)
    except HvdtrainError:
        raise
    except Exception as error:
        raise PlanError(f"{recipe.step or recipe.model}: {user_code.reason(error)}") from error


SAME_MEMORY = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
OF_SHAPE = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Operations that read a tensor's shape alone."""
NOT_KEPT = {"ReadVariableOp", "Const"}


def _kept(examples: int, loss_of: Callable[[Any], Any], model: Any, batch: Any) -> list[tuple[str, int]]:
    ends = []

    def both(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(inputs)
        ends.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return [each for each in tape.gradient(loss, model.trainable_weights) if each is not None]

    operations = tf.function(both, autograph=False).get_concrete_function(batch).graph.get_operations()
    forward, backward = set(operations[: ends[-1]]), operations[ends[-1] :]
    if loops := [each.name for each in forward if "While" in each.type]:
        raise PlanError(f"{loops[0]} is a loop, whose activations no graph counts.")
    kept = {}
    for tensor in (_whole(one) for each in backward if each.type not in OF_SHAPE for one in each.inputs):
        if tensor.op in forward and tensor.op.type not in NOT_KEPT and tensor.dtype != tf.resource:
            kept[tensor.ref()] = (tensor.op.name.rpartition("/")[0] or tensor.op.name, tensor)
    by = dict[str, int]()
    for layer, tensor in kept.values():
        first, *sides = tensor.shape if tensor.shape.rank else [1]
        if None in sides:
            raise PlanError(f"{tensor.op.name} has a shape that no graph tells: {tensor.shape}.")
        by[layer] = by.get(layer, 0) + math.prod([first or examples, *sides]) * tensor.dtype.size
    return [("", sum(by.values())), *sorted(by.items(), key=lambda row: -row[1])]


def _whole(tensor: Any) -> Any:
    """The tensor whose memory this one has."""
    return _whole(tensor.op.inputs[0]) if tensor.op.type in SAME_MEMORY else tensor


def of_graph(function: Callable[[Any], Any], batch: Any) -> int:
    """The FLOPs of the function's graph for a batch of this shape."""
    graph = tf.function(function, autograph=False).get_concrete_function(batch).graph
    profiler = tf.compat.v1.profiler
    options = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation()).with_empty_output().build()
    log = tf.get_logger()
    level = log.level
    log.setLevel("ERROR")  # the profiler warns of TensorFlow's own deprecations
    try:
        return int(profiler.profile(graph, options=options).total_float_ops)
    finally:
        log.setLevel(level)
