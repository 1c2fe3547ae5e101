"""ResNet50 and ResNet101 for Keras, with torchvision's names, shapes and distributions of the first weights."""

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvdtrain.core.network import RESNETS
from hvdtrain.core.recipe import Recipe
from hvdtrain.tensorflow.engines import Engine, subtract
from hvdtrain.tensorflow.moments import global_moments
from hvdtrain.tensorflow.networks import POLICIES

# torchvision's momentum, in TensorFlow's convention: PyTorch's 0.1 is the weight of the new statistics.
BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5
BLOCKS = RESNETS["resnet50"]
EXPANSION = 4


class ResNet:
    """He et al. 2016, arXiv:1512.03385, in version 1.5 (the stride in the 3x3 convolution), with torchvision's
    initialisers: images [n, height, width, 3] -> logits [n, classes]. The CIFAR stem has stride 1 and no max-pool."""

    def __init__(self, classes: int, recipe: Recipe, engine: Engine | None) -> None:
        self.classes, self.recipe, self.engine = classes, recipe, engine
        self.policy = POLICIES[recipe.precision]
        self._seeds = _seeds(recipe.seed)

    def model(self) -> keras.Model:
        """The network of the recipe, with new weights."""
        is_50 = self.recipe.model == "resnet50"
        is_small = is_50 and self.recipe.stem == "cifar"
        images = keras.Input((None, None, 3), dtype=real_type(self.policy))
        x = self._conv(images, 64, 7, 1 if is_small else 2, "conv1")
        x = self._relu(self._norm(x, "bn1"))
        if not is_small:
            x = layers.ZeroPadding2D(1, dtype=self.policy)(x)  # zeros change no maximum, as ReLU gives no less than 0
            x = layers.MaxPooling2D(3, 2, dtype=self.policy)(x)
        for stage, blocks in enumerate(BLOCKS if is_50 else RESNETS["resnet101"]):
            for block in range(blocks):
                x = self._bottleneck(x, 64 << stage, 2 if stage and not block else 1, f"layer{stage + 1}.{block}")
        x = layers.GlobalAveragePooling2D(dtype=self.policy)(x)
        most = 1 / math.sqrt(x.shape[-1])  # PyTorch's Linear: weights and bias are uniform within 1 / sqrt(inputs)
        kernel, bias = (keras.initializers.RandomUniform(-most, most, seed=next(self._seeds)) for _ in range(2))
        logits = layers.Dense(
            self.classes, kernel_initializer=kernel, bias_initializer=bias, dtype=self.policy, name="fc"
        )
        return keras.Model(images, logits(x))

    def _bottleneck(self, x: Any, width: int, stride: int, name: str) -> Any:
        y = self._relu(self._norm(self._conv(x, width, 1, 1, f"{name}.conv1"), f"{name}.bn1"))
        y = self._relu(self._norm(self._conv(y, width, 3, stride, f"{name}.conv2"), f"{name}.bn2"))
        # Goyal et al. 2017, arXiv:1706.02677, section 5.1: the branch starts at 0.
        y = self._norm(self._conv(y, width * EXPANSION, 1, 1, f"{name}.conv3"), f"{name}.bn3", "zeros")
        if name.endswith(".0"):
            x = self._conv(x, width * EXPANSION, 1, stride, f"{name}.downsample.0")
            x = self._norm(x, f"{name}.downsample.1")
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

    def _norm(self, x: Any, name: str, gamma: str = "ones") -> Any:
        if self.engine is None:  # Keras's own layer computes the same, outside of training
            return layers.BatchNormalization(
                momentum=BATCH_NORM_MOMENTUM, epsilon=BATCH_NORM_EPSILON, name=name, dtype=self.policy
            )(x)
        return BatchNorm(name, self.recipe, self.engine, gamma)(x)

    def _relu(self, x: Any) -> Any:
        return layers.ReLU(dtype=self.policy)(x)


def real_type(policy: str) -> str:
    """The type to which Keras casts a model's inputs."""
    return "float64" if policy == "float64" else "float32"


def _seeds(seed: int) -> Iterator[int]:
    draw = np.random.default_rng(seed)
    while True:
        yield int(draw.integers(2**31))


class BatchNorm(layers.Layer):
    """PyTorch's BatchNorm2d: x [n, height, width, channels] normalised by the batch's mean and biased variance, the
    running variance taken unbiased.

    Of a recipe with batch_norm sync the batch is that of all ranks, else this replica's, for which there is a fused
    kernel. `gamma` names its initialiser.
    """

    def __init__(self, name: str, recipe: Recipe, engine: Engine, gamma: str = "ones") -> None:
        super().__init__(name=name, dtype=POLICIES[recipe.precision])
        self._initial_gamma, self._frozen, self._keep = gamma, recipe.batch_norm == "frozen", engine.keep
        is_fused = recipe.batch_norm != "sync" and recipe.precision != "float64"  # the kernel can do neither
        over_batch = engine.sum_tensor if recipe.batch_norm == "sync" else tf.identity
        self._sum_over_ranks = None if is_fused else over_batch

    def build(self, shape: tuple[int | None, ...]) -> None:
        def weight(name: str, initializer: str, trainable: bool) -> Any:
            return self.add_weight(
                shape=(shape[-1],), initializer=initializer, trainable=trainable, name=name, autocast=False
            )

        self.gamma, self.beta = weight("gamma", self._initial_gamma, True), weight("beta", "zeros", True)
        self.moving_mean = weight("moving_mean", "zeros", False)
        self.moving_variance = weight("moving_variance", "ones", False)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or self._frozen or not self.trainable:
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
