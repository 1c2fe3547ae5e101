"""The FLOPs of a recipe's network for one example, counted by TensorFlow's profiler."""

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
    request = counted_examples(dataset)
    batch = next(iter(Loader(recipe, CPU).batches(dataset.train, [request])))
    engine = Engine(CPU)
    model, objective = models.build(recipe, dataset, engine), Objective(recipe, dataset, engine)
    try:
        return of_graph(lambda inputs: objective.measure(model, inputs, training=True)[0], batch) // EXAMPLES
    except HvdtrainError:
        raise
    except Exception as error:
        raise PlanError(f"{recipe.step or recipe.model}: {user_code.reason(error)}") from error


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
