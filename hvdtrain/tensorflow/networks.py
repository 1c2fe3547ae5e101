"""Networks that a recipe names by an import path, keras.applications' or the user's, and Inception-v3."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.core import network, user_code
from hvdtrain.core.network import Network
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import RecipeError
from hvdtrain.tensorflow import without_banner

with without_banner():  # it may be the first of TensorFlow
    import keras
    import tensorflow as tf

    from hvdtrain.tensorflow import private
    from hvdtrain.tensorflow.data import Examples
    from hvdtrain.tensorflow.moments import SumOverRanks, masked_moments

POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "float64": "float64",
}
NAMED = {"inception_v3": f"{__name__}:inception_v3", "vgg16": "keras.applications:VGG16"}
"""The import paths of `user_code.NAMED`."""
SEED = "seed_generator_state"
"""Keras's name of the variable in which a layer counts its random numbers."""
PRODUCTS = re.compile("MatMul|Conv|Einsum|RNN")
HINT = " A recipe takes no optimizer from a model: leave compile() out, or load_model(..., compile=False)."
AUXILIARY_AT = "mixed7"
"""Keras's name for the last layer with maps of 17 x 17 in Inception-v3; torchvision's is Mixed_6e."""


def build(recipe: Recipe, dataset: Dataset) -> keras.Model:
    """The network that the recipe names, in its precision; its weights depend only on the recipe's seed.

    A model that makes its weights in its first call is called with the shapes of a sample. After `count`, layers
    without a name of the user's get the same names each time. Raises RecipeError, in one line.
    """
    path = NAMED.get(recipe.model, recipe.model)
    make = user_code.load(path, "model")
    arguments = {**_of_library(recipe, path, dataset), **user_code.expanded(recipe.model_args, "model_args")}
    user_code.check_arguments(make, path, "model", **arguments)
    set_precision(recipe.precision)
    keras.utils.set_random_seed(recipe.seed % 2**32)
    try:
        model = make(**arguments)
    except Exception as error:
        reason = user_code.reason(error, make) + HINT * ("stateless scope" in str(error))
        raise RecipeError(f"model {path}: {reason}") from error
    if not isinstance(model, keras.Model):
        raise RecipeError(f"model {path} must return a keras.Model, got a {type(model).__name__}.")
    for name in ("train_step", "compute_loss") if not recipe.step else ():
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise RecipeError(
                f"model {path} has a {name} of its own, which a recipe does not call; give a step, or train it with "
                "fit and hvdtrain.keras."
            )
    if not model.built:
        _build_by_sample(model, recipe, dataset)
    paths = [weight.path for weight in model.weights]
    if twice := next((one for one in paths if paths.count(one) > 1), None):
        raise RecipeError(f"model {path} has two weights named {twice}; give its layers different names.")
    return model


def count(recipe: Recipe, dataset: Dataset, *, keeps: bool = False) -> Network:
    """The number of parameters, and whether there is BatchNorm and dropout; makes no weights, and so `keeps` nothing.
    Raises RecipeError."""
    keras.utils.clear_session(free_memory=False)
    with keras.StatelessScope(initialize_variables=False):  # TensorFlow must compute nothing before it has its devices
        model = build(recipe, dataset)
    keras.utils.clear_session(free_memory=False)  # else Keras would make the weights later, and number names further
    sizes = {short(model, weight.path): int(np.prod(weight.shape)) for weight in model.trainable_weights}
    dropout, norms, layers = has_dropout(model), norm_weights(model), batch_norm_layers(model)
    return Network(sum(sizes.values()), any(True for _ in batch_norms(model)), None, dropout, sizes, norms, [*layers])


def norm_weights(model: keras.Model) -> set[str]:
    """The names of the weights that layers have whose class is called a norm."""
    norms = [layer for layer in private.layers(model) if "norm" in type(layer).__name__.lower() and layer.weights]
    trained = {weight.path for weight in model.trainable_weights}
    return {short(model, each.path) for layer in norms for each in layer.weights if each.path in trained}


def short(model: keras.Model, path: str) -> str:
    """A weight's name, as patterns have it, by its path, in which Keras may put the model's own name first."""
    return path.removeprefix(f"{model.name}/").replace("/", ".")


def batch_norm_layers(model: keras.Model) -> dict[str, keras.Layer]:
    """The BatchNorm layers of the model, Keras's and ours, by the name that their weights begin with."""
    norms = [layer for layer in private.layers(model) if type(layer).__name__.startswith("BatchNorm")]
    norms += [layer for layer in batch_norms(model) if layer not in norms]
    return {short(model, layer.weights[0].path.rpartition("/")[0]): layer for layer in norms if layer.weights}


def has_dropout(model: keras.Model) -> bool:
    """Whether a layer of the model draws random numbers."""
    return any(variable.name == SEED for variable in model.variables)


def set_precision(precision: str) -> None:
    """Sets the type that Keras's layers and losses have by default."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(POLICIES[precision])


def batch_norms(model: keras.Model) -> Iterator[keras.layers.BatchNormalization]:
    """Keras's BatchNormalization layers in the model, nested ones too."""
    return (layer for layer in private.layers(model) if isinstance(layer, keras.layers.BatchNormalization))


def unmet(recipe: Recipe) -> list[str]:
    """A line of the log where the recipe's precision does not hold in the graph that is being traced."""
    whole = tf.compat.v1.get_default_graph().as_graph_def()
    nodes = [*whole.node, *(node for function in whole.library.function for node in function.node_def)]
    types = [tf.as_dtype(node.attr["T"].type) for node in nodes if PRODUCTS.search(node.op) and "T" in node.attr]
    remedy = "where it is made, set layer.dtype_policy = keras.config.dtype_policy() of its layers"
    return network.other_types(recipe.precision, [each.name for each in types if each.is_floating], remedy)


def seed_states(model: keras.Model) -> list[tf.Variable]:
    """The states of the model's random generators, such as Dropout's; each is uint32 [2]."""
    return [variable.value for variable in model.variables if variable.name == SEED]


class BatchNorm(keras.layers.BatchNormalization):
    """Keras's BatchNormalization with the statistics of the batch over all ranks, or with frozen ones."""

    sum_over_ranks: SumOverRanks | None = None
    """Adds over the ranks; None freezes the running statistics, which then normalise."""

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        return super().call(inputs, training=training and self.sum_over_ranks is not None, mask=mask)

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        assert self.sum_over_ranks
        return masked_moments(inputs, private.moment_axes(self), self.sum_over_ranks, mask)


def replace_batch_norms(model: keras.Model, recipe: Recipe, sum_over_ranks: SumOverRanks) -> None:
    """Turns the model's BatchNormalization layers into `BatchNorm`; with batch_norm local only those that are
    `synchronized`. Raises RecipeError for a subclass, which may compute its statistics differently."""
    for layer in batch_norms(model):
        if recipe.batch_norm == "local" and not layer.synchronized:
            continue
        if type(layer) is not keras.layers.BatchNormalization:
            raise RecipeError(
                f"batch_norm sync and frozen know keras.layers.BatchNormalization, layer {layer.name} is a "
                f"{type(layer).__name__}; take batch_norm local, and synchronized=False."
            )
        if recipe.batch_norm == "local" and recipe.xla:
            raise RecipeError(
                f"layer {layer.name} is synchronized=True, which puts a collective into what XLA compiles; drop one."
            )
        private.set_moments_class(layer, BatchNorm)
        layer.sum_over_ranks = None if recipe.batch_norm == "frozen" else sum_over_ranks


def _of_library(recipe: Recipe, path: str, dataset: Dataset) -> dict[str, Any]:
    """The arguments of a network of keras.applications: no stored weights, logits, and the data set's classes and
    shape; of a network of ours: the classes."""
    if not re.match(r"keras\.applications[.:]", path):
        return {"classes": dataset.classes} if recipe.model in NAMED and dataset.classes else {}
    if recipe.dataset == "imagenet" and recipe.train_crop != recipe.valid_crop:
        raise RecipeError(
            f"model {recipe.model} takes images of one size in TensorFlow: train_crop and valid_crop must be equal, "
            f"got {recipe.train_crop} and {recipe.valid_crop}."
        )
    known = {"classes": dataset.classes, "input_shape": dataset.sample_shape}
    return {"weights": None, "classifier_activation": None, **{key: value for key, value in known.items() if value}}


def _build_by_sample(model: keras.Model, recipe: Recipe, dataset: Dataset) -> None:
    batch = dataset.train.read(np.arange(1), None)
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise RecipeError(
            f"model {recipe.model} has no weights before it is called, and a sample of {recipe.dataset} is no pair "
            "(x, y) to call it with; build it in its callable."
        )
    as_is = isinstance(dataset.train, Examples)

    def spec(array: np.ndarray) -> keras.KerasTensor:
        kept = as_is and np.asarray(array).dtype.kind != "f"
        return keras.KerasTensor((None, *np.shape(array)[1:]), array.dtype.name if kept else keras.config.floatx())

    try:
        model(keras.tree.map_structure(spec, batch[0]))
    except Exception as error:
        raise RecipeError(f"model {recipe.model}, called with a sample's x: {user_code.reason(error)}") from error


class InceptionOutputs(NamedTuple):
    """Inception-v3's outputs in training, with torchvision's names."""

    logits: Any
    aux_logits: Any


class InceptionV3(keras.Model):
    """Inception-v3 with its auxiliary classifier, which keras.applications leaves out; only training returns it."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        out = super().call(inputs, training=training, mask=mask)
        return out if training else out.logits


def inception_v3(classes: int = 1000, aux_logits: bool = True) -> keras.Model:
    """Szegedy et al. 2015, arXiv:1512.00567, as in keras.applications: images [n, height, width, 3] of at least 299 x
    299 pixels -> logits [n, classes], in training InceptionOutputs.

    The auxiliary classifier is torchvision's, on maps of 17 x 17 x 768: average pooling, convolutions of 1 x 1 to 128
    and of 5 x 5 to 768 channels, each with BatchNorm and ReLU, and a linear layer.
    """
    body = keras.applications.InceptionV3(include_top=False, weights=None, input_shape=(None, None, 3))
    x = keras.layers.GlobalAveragePooling2D(name="avg_pool")(body.output)
    logits = keras.layers.Dense(classes, name="predictions")(x)
    if not aux_logits:
        return keras.Model(body.input, logits, name="inception_v3")
    x = keras.layers.AveragePooling2D(5, 3, name="aux_pool")(body.get_layer(AUXILIARY_AT).output)
    for number, (filters, side) in enumerate(((128, 1), (768, 5))):
        x = keras.layers.Conv2D(filters, side, use_bias=False, name=f"aux_conv{number}")(x)
        x = keras.layers.BatchNormalization(scale=False, name=f"aux_bn{number}")(x)
        x = keras.layers.ReLU(name=f"aux_relu{number}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="aux_avg_pool")(x)
    auxiliary = keras.layers.Dense(classes, name="aux_predictions")(x)
    return InceptionV3(body.input, InceptionOutputs(logits, auxiliary), name="inception_v3")
