"""Inception-v3 with its auxiliary classifier, which keras.applications leaves out."""

from typing import Any, NamedTuple

import keras
from keras import layers

AUXILIARY_AT = "mixed7"
"""Keras's name for the last layer of 17 x 17, which torchvision calls Mixed_6e."""


class InceptionOutputs(NamedTuple):
    """What the network gives in training, named as torchvision names it."""

    logits: Any
    aux_logits: Any


class InceptionV3(keras.Model):
    """A functional model of both classifiers, of which only training asks for the auxiliary one."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        out = super().call(inputs, training=training, mask=mask)
        return out if training else out.logits


def inception_v3(classes: int = 1000, aux_logits: bool = True) -> keras.Model:
    """Szegedy et al. 2015, arXiv:1512.00567, as keras.applications has it, which draws its weights: images [n, height,
    width, 3], of at least 299 pixels each way, -> logits [n, classes]; in training InceptionOutputs.

    The auxiliary classifier is torchvision's: of 17 x 17 x 768 a mean, a convolution 1 x 1 to 128, one 5 x 5 to 768,
    each with BatchNorm and ReLU, and a linear layer.
    """
    body = keras.applications.InceptionV3(include_top=False, weights=None, input_shape=(None, None, 3))
    x = layers.GlobalAveragePooling2D(name="avg_pool")(body.output)
    logits = layers.Dense(classes, name="predictions")(x)
    if not aux_logits:
        return keras.Model(body.input, logits, name="inception_v3")
    x = layers.AveragePooling2D(5, 3, name="aux_pool")(body.get_layer(AUXILIARY_AT).output)
    for number, (filters, side) in enumerate(((128, 1), (768, 5))):
        x = layers.Conv2D(filters, side, use_bias=False, name=f"aux_conv{number}")(x)
        x = layers.BatchNormalization(scale=False, name=f"aux_bn{number}")(x)
        x = layers.ReLU(name=f"aux_relu{number}")(x)
    x = layers.GlobalAveragePooling2D(name="aux_avg_pool")(x)
    auxiliary = layers.Dense(classes, name="aux_predictions")(x)
    return InceptionV3(body.input, InceptionOutputs(logits, auxiliary), name="inception_v3")
