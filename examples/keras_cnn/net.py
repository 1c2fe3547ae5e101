"""A small convolutional network for scanned digits of 8x8 pixels."""

import keras
from keras import layers


def cnn(width: int = 32) -> keras.Model:
    """Images [n, 8, 8, 1] -> logits [n, 10]."""
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(width, 3, padding="same", activation="relu", name="conv1")(images)
    x = layers.Conv2D(2 * width, 3, strides=2, padding="same", activation="relu", name="conv2")(x)
    x = layers.Flatten(name="flatten")(x)
    return keras.Model(images, layers.Dense(10, name="logits")(x))
