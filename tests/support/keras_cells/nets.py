"""Networks for 12 points of 6 channels, with 3 outputs."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def norms(width=8):
    """A functional model with BatchNormalization, whose layers have no names."""
    x = inputs = keras.Input((12, 6))
    for _ in range(2):
        x = layers.Conv1D(width, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("tanh")(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class Late(keras.Model):
    """Makes its weights when it is called; x is a dict."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(rate)
        self.hidden, self.top = layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dense(3)

    def call(self, x, training=None):
        wide = keras.ops.concatenate([keras.ops.mean(x["points"], 1), x["scale"]], axis=-1)
        return self.top(self.drop(self.hidden(self.norm(wide, training=training)), training=training))


def embedded():
    """Has an integer input, weights that the loss does not use, and one that is not trained."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4)(tokens))
    frozen = layers.Dense(4, trainable=False)
    return keras.Model(tokens, {"logits": layers.Dense(3)(frozen(x)), "unused": layers.Dense(2)(x)})


def stopped():
    """A model whose first layer gets no gradient."""
    x = inputs = keras.Input((12, 6))
    x = keras.ops.stop_gradient(layers.Dense(8, "tanh", name="fixed")(x))
    return keras.Model(inputs, layers.Dense(3, name="top")(layers.GlobalAveragePooling1D()(x)))


def images(classes):
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(classes)])


def no_model():
    return 3


def no_weights():
    x = keras.Input((12, 6))
    return keras.Model(x, layers.GlobalAveragePooling1D()(x))


def broken(width):
    return layers.Dense(0 * width - 1)


class Special(layers.BatchNormalization):
    pass


def special():
    return keras.Sequential([keras.Input((12, 6)), Special(), layers.GlobalAveragePooling1D(), layers.Dense(3)])


def typed(policy="float32"):
    """`norms` of a configuration in which each layer has its types, as a saved file's layers have."""
    of_run = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    config = norms().get_config()
    keras.config.set_dtype_policy(of_run)
    return keras.Model.from_config(config)


def retyped():
    """`typed`, whose layers take the run's types."""
    model = typed()
    for layer in model.layers:
        layer.dtype_policy = keras.config.dtype_policy()
    return model


def headed():
    """`typed` below a layer that has the run's types."""
    return keras.Sequential([typed(), layers.Dense(3)])


def compiled():
    model = norms()
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def eager():
    tf.config.run_functions_eagerly(True)
    return norms()


def likely():
    """`norms` with probabilities instead of logits."""
    model = norms()
    return keras.Model(model.input, layers.Softmax()(model.output))


def masked(**batch_norm):
    """A model that gives a class for each token and masks token 0."""
    tokens = keras.Input((7,), dtype="int32")
    x = layers.Embedding(12, 4, mask_zero=True)(tokens)
    x = layers.BatchNormalization(**batch_norm)(x) if batch_norm else x
    return keras.Model(tokens, layers.Dense(3)(x))


def constrained():
    """A model with weights of two types, all of them constrained."""
    tokens = keras.Input((7,), dtype="int32")
    limit = keras.constraints.MaxNorm(0.3, axis=0)
    x = layers.Embedding(12, 4, embeddings_constraint=limit)(tokens)
    x = layers.Dense(8, "tanh", kernel_constraint=limit, dtype="float64")(x)
    return keras.Model(tokens, layers.Dense(3, kernel_constraint=keras.constraints.NonNeg())(x))


def adapted(how):
    """A model with a Normalization of this rank's data, or with another layer that holds a constant made of them."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    points = np.random.default_rng(rank).normal(rank, 2, (16, 12, 6)).astype("float32")
    if how == "norm":
        first = layers.Normalization()
        first.adapt(points)
    elif how == "bins":
        first = layers.Discretization(num_bins=4)
        first.adapt(points)
    else:
        first = {"variable": Shifted, "number": lambda by: layers.Lambda(lambda x: x - by)}[how](float(points.mean()))
    x = inputs = keras.Input((12, 6))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(first(x))))


class Shifted(layers.Layer):
    """Subtracts a variable that Keras does not count as a weight, and which training moves."""

    def __init__(self, by):
        super().__init__()
        self.by = tf.Variable(by)

    def call(self, x, training=None):
        if training:
            tf.raw_ops.AssignAddVariableOp(resource=self.by.handle, value=tf.constant(0.1))
        return x - self.by


def of_8_bits():
    model = norms()
    model.layers[-1].quantize("float8")
    return model
