"""The recipes' networks as Keras models with torchvision's architecture, and BatchNorm over the global batch."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.layers import BatchNormalization

from hvdtrain.core import sharing
from hvdtrain.core.own_code import MODELS
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import RecipeError
from hvdtrain.tensorflow import hidden, networks
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.moments import global_moments
from hvdtrain.tensorflow.networks import POLICIES
from hvdtrain.tensorflow.variables import subtract

Keep = Callable[[Callable[[list[tf.Tensor]], None], list[tf.Tensor]], None]
Copies = Callable[[tf.Variable], Sequence[tf.Variable]]

# torchvision's, in TensorFlow's convention: PyTorch's momentum of .1 weighs the new statistics.
BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5
STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
STAGES_OF_101 = ((3, 64, 1), (4, 128, 2), (23, 256, 2), (3, 512, 2))
EXPANSION = 4


def keep_own(change: Callable[[list[tf.Tensor]], None], tensors: list[tf.Tensor]) -> None:
    """Applies the change: what one replica alone does."""
    change(tensors)


def build(recipe: Recipe, dataset: Dataset, engine: Engine, keep: Keep = keep_own) -> keras.Model:
    """The recipe's network, its weights drawn from the recipe's seed alone; `keep` is a `Replication`'s.

    linear: [n, 1] -> [n, 1], starting at 0. resnet50, resnet101: images [n, height, width, 3] -> logits [n, classes].
    Layers are named as torchvision names its modules. Any other: see `hvdtrain.tensorflow.networks`. Raises
    RecipeError.
    """
    if recipe.model not in MODELS:
        model = networks.build(recipe, dataset)
        networks.replace_batch_norms(model, recipe, engine.sum_tensor)
        return model
    networks.set_precision("float32")  # these layers are given theirs
    policy = POLICIES[recipe.precision]
    if recipe.model == "linear":
        x = keras.Input((1,), dtype=_real(policy))
        y = layers.Dense(1, kernel_initializer="zeros", dtype=policy, name="linear")(x)
        return keras.Model(x, y)
    if dataset.classes is None:
        raise RecipeError(f"model {recipe.model} needs a data set that has classes; take one of your own.")
    rest = recipe.seed, policy, _norm(recipe, engine, keep)
    if recipe.model == "resnet101":
        return _ResNet(dataset.classes, "imagenet", *rest).model(STAGES_OF_101)
    return resnet50(dataset.classes, recipe.stem, *rest)


def _real(policy: str) -> str:
    """The type of what a model is given; Keras casts it to this."""
    return "float64" if policy == "float64" else "float32"


def _norm(recipe: Recipe, engine: Engine, keep: Keep = keep_own) -> Callable[..., "BatchNorm"]:
    own = recipe.batch_norm == "sync" or recipe.precision == "float64"  # the fused kernel knows neither
    sum_over_ranks = engine.sum_tensor if recipe.batch_norm == "sync" else tf.identity

    def norm(name: str, gamma: str) -> BatchNorm:
        return BatchNorm(
            name,
            gamma,
            frozen=recipe.batch_norm == "frozen",
            sum_over_ranks=sum_over_ranks if own else None,
            keep=keep,
            dtype=POLICIES[recipe.precision],
        )

    return norm


def resnet50(
    classes: int, stem: str, seed: int = 0, policy: str = "float32", norm: Callable[..., "BatchNorm"] | None = None
) -> keras.Model:
    """torchvision's ResNet50 v1.5 (stride in the 3x3 convolution, no convolution bias), residual branches starting
    at 0 as in `hvdtrain.torch`. The CIFAR stem has stride 1 and no max-pool."""
    return _ResNet(classes, stem, seed, policy, norm or BatchNorm).model(STAGES)


class _ResNet:
    """He et al. 2016, arXiv:1512.03385, with the initialisers that torchvision gives it."""

    def __init__(self, classes: int, stem: str, seed: int, policy: str, norm: Callable[..., "BatchNorm"]) -> None:
        self.classes, self.stem, self.policy, self.norm = classes, stem, policy, norm
        self._seeds = _seeds(seed)

    def model(self, stages: Sequence[tuple[int, int, int]]) -> keras.Model:
        images = keras.Input((None, None, 3), dtype=_real(self.policy))
        x = self._conv(images, 64, 7, 1 if self.stem == "cifar" else 2, "conv1")
        x = self._relu(self.norm("bn1", "ones")(x))
        if self.stem == "imagenet":
            x = layers.ZeroPadding2D(1, dtype=self.policy)(x)  # nothing after a ReLU is less than the 0 it pads with
            x = layers.MaxPooling2D(3, 2, dtype=self.policy)(x)
        for stage, (blocks, width, stride) in enumerate(stages, start=1):
            for block in range(blocks):
                x = self._bottleneck(x, width, stride if block == 0 else 1, f"layer{stage}.{block}", block == 0)
        x = layers.GlobalAveragePooling2D(dtype=self.policy)(x)
        return keras.Model(images, self._linear(x, "fc"))

    def _bottleneck(self, x: Any, width: int, stride: int, name: str, downsample: bool) -> Any:
        y = self._relu(self.norm(f"{name}.bn1", "ones")(self._conv(x, width, 1, 1, f"{name}.conv1")))
        y = self._relu(self.norm(f"{name}.bn2", "ones")(self._conv(y, width, 3, stride, f"{name}.conv2")))
        # Goyal et al. 2017, arXiv:1706.02677, section 5.1: the branch starts at 0.
        y = self.norm(f"{name}.bn3", "zeros")(self._conv(y, width * EXPANSION, 1, 1, f"{name}.conv3"))
        if downsample:
            x = self._conv(x, width * EXPANSION, 1, stride, f"{name}.downsample.0")
            x = self.norm(f"{name}.downsample.1", "ones")(x)
        return self._relu(layers.Add(dtype=self.policy)([x, y]))

    def _conv(self, x: Any, filters: int, side: int, stride: int, name: str) -> Any:
        if stride > 1 and side > 1:  # "same" would pad an even image on one side only
            x = layers.ZeroPadding2D(side // 2, dtype=self.policy)(x)
        return layers.Conv2D(
            filters,
            side,
            stride,
            padding="valid" if stride > 1 else "same",
            use_bias=False,
            kernel_initializer=keras.initializers.VarianceScaling(
                2.0, "fan_out", "untruncated_normal", seed=next(self._seeds)
            ),
            dtype=self.policy,
            name=name,
        )(x)

    def _linear(self, x: Any, name: str) -> Any:
        """PyTorch's Linear: weights and bias uniform within 1 / sqrt(inputs)."""
        most = 1 / math.sqrt(x.shape[-1])
        kernel, bias = (keras.initializers.RandomUniform(-most, most, seed=next(self._seeds)) for _ in range(2))
        dense = layers.Dense(
            self.classes, kernel_initializer=kernel, bias_initializer=bias, dtype=self.policy, name=name
        )
        return dense(x)

    def _relu(self, x: Any) -> Any:
        return layers.ReLU(dtype=self.policy)(x)


def _seeds(seed: int) -> Iterator[int]:
    draw = np.random.default_rng(seed)
    while True:
        yield int(draw.integers(2**31))


class BatchNorm(layers.Layer):
    """PyTorch's BatchNorm2d: x [n, height, width, channels] normalised by the batch's mean and biased variance, the
    running variance taken unbiased.

    `sum_over_ranks` None takes the fused kernel over this replica's own batch. `gamma` names its initialiser; `keep`
    is a `Replication`'s.
    """

    def __init__(
        self,
        name: str,
        gamma: str = "ones",
        *,
        frozen: bool = False,
        sum_over_ranks: Callable[[tf.Tensor], tf.Tensor] | None = None,
        keep: Keep = keep_own,
        dtype: str = "float32",
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self._initial_gamma, self._frozen, self._sum_over_ranks, self._keep = gamma, frozen, sum_over_ranks, keep

    def build(self, shape: tuple[int | None, ...]) -> None:
        def weight(name: str, initializer: str, trainable: bool) -> Any:
            return self.add_weight(
                shape=(shape[-1],), initializer=initializer, trainable=trainable, name=name, autocast=False
            )

        self.gamma, self.beta = weight("gamma", self._initial_gamma, True), weight("beta", "zeros", True)
        self.moving_mean = weight("moving_mean", "zeros", False)
        self.moving_variance = weight("moving_variance", "ones", False)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or self._frozen:
            return self._normalised(x, self.moving_mean.value, self.moving_variance.value)
        if self._sum_over_ranks:
            wide = tf.cast(x, self.variable_dtype)
            mean, variance, count = global_moments(wide, [0, 1, 2], self._sum_over_ranks)
            out = self._normalised(x, mean, variance)
            variance = variance * count / (count - 1)
        else:
            out, mean, variance = self._fused(x, [], [], True)  # this kernel's variance is the unbiased one
        self._keep(self._follow, [mean, variance])
        return out

    def _normalised(self, x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
        if not self._sum_over_ranks:
            return self._fused(x, mean, variance, False)[0]
        scale = self.gamma.value * tf.math.rsqrt(variance + BATCH_NORM_EPSILON)
        wide = (tf.cast(x, self.variable_dtype) - mean) * scale + self.beta.value
        return tf.cast(wide, self.compute_dtype)

    def _fused(self, x: tf.Tensor, mean: Any, variance: Any, training: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        out = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=self.gamma.value,
            offset=self.beta.value,
            mean=tf.convert_to_tensor(mean, tf.float32),
            variance=tf.convert_to_tensor(variance, tf.float32),
            epsilon=BATCH_NORM_EPSILON,
            is_training=training,
        )
        return out.y, out.batch_mean, out.batch_variance

    def _follow(self, statistics: list[tf.Tensor]) -> None:
        for weight, new in zip((self.moving_mean, self.moving_variance), statistics, strict=True):
            subtract(weight.value, (weight.value - tf.stop_gradient(new)) * (1 - BATCH_NORM_MOMENTUM))


def average_statistics(model: keras.Model, engine: Engine, copies_of: Copies = lambda variable: (variable,)) -> None:
    """Sets BatchNorm's running statistics to the mean over the replicas, and other weights that are not trained to rank
    0's, so that all of them hold one model; `copies_of` is a `Replication`'s."""
    share_weights(model, engine, "rank_0")
    _set_means(_statistics(model), engine, copies_of)


def own_weights(model: keras.Model) -> dict[str, tf.Variable]:
    """What no gradient trains and is no BatchNorm's statistics, by path: weights, and tf.Variables of layers."""
    ours = set(map(id, _statistics(model)))
    rest = {weight.path: weight.value for weight in model.non_trainable_weights if id(weight.value) not in ours}
    return rest | hidden.variables(model)


def share_weights(model: keras.Model, engine: Engine, how: Literal["average", "rank_0"]) -> None:
    """Gives all ranks one value of `own_weights`: their mean over the ranks, where they are fractions, or rank 0's."""
    others = own_weights(model)
    means = {path: each for path, each in others.items() if how == "average" and each.dtype.is_floating}
    rest = {path: each for path, each in others.items() if path not in means}
    if rest and engine.size > 1:
        engine.broadcast(rest, None)
    _set_means(list(means.values()), engine)


def unlike_weights(others: dict[str, tf.Variable], ranks: tuple[int, int], sum_over_ranks: sharing.Sum) -> list[str]:
    """The paths of those that differ between ranks (this one's number, how many there are). Every rank calls it."""
    if ranks[1] == 1 or not others:
        return []
    row = [fingerprint.python_function([each]).numpy() for each in others.values()]  # graphs would take seconds
    rows = sharing.gather(np.array(row, dtype=np.int64), *ranks, sum_over_ranks)
    return [path for path, is_one in zip(others, (rows == rows[0]).all(0), strict=True) if not is_one]


def _statistics(model: keras.Model) -> list[tf.Variable]:
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, BatchNorm | BatchNormalization)]
    return [weight.value for layer in norms for weight in (layer.moving_mean, layer.moving_variance)]


def _set_means(weights: list[tf.Variable], engine: Engine, copies_of: Copies = lambda variable: (variable,)) -> None:
    copies = list(zip(*map(copies_of, weights), strict=True))
    if engine.size * len(copies) < 2:
        return
    flat = np.sum([np.concatenate([np.ravel(each.numpy()) for each in copy]) for copy in copies], axis=0)
    mean = engine.sum(flat) / flat.dtype.type(engine.size * len(copies))
    parts = np.split(mean, np.cumsum([math.prod(weight.shape) for weight in weights])[:-1])
    for weight, part in zip(weights, parts, strict=True):
        weight.assign(part.reshape(weight.shape))


@functools.partial(tf.function, autograph=False)
def fingerprint(variables: list[tf.Variable]) -> tf.Tensor:
    """64 bits that change when any bit of the variables does."""
    total = tf.zeros((), tf.int64)
    for variable in variables:
        words = _words(variable)
        # Odd, different factors: a swap of two values shows, and so does every single changed bit.
        factors = tf.range(1, 2 * tf.size(words, tf.int64), 2)
        total = total * 1_000_003 + tf.reduce_sum(tf.cast(words, tf.int64) * factors)
    return total


def _words(variable: tf.Variable) -> tf.Tensor:
    """The variable's bits as integers of 32 bits at most, which times an even difference of factors keep their sign."""
    if variable.dtype.size >= 4:
        return tf.reshape(tf.bitcast(variable, tf.int32), [-1])
    word = tf.cast(variable, tf.uint8) if variable.dtype.size == 1 else tf.bitcast(variable, tf.int16)
    return tf.cast(tf.reshape(word, [-1]), tf.int32)
