"""Networks for 12 points of 6 channels, with 3 outputs."""

import keras
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
    """Whose first layer no gradient reaches."""
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


def likely():
    """`norms` with probabilities instead of logits."""
    model = norms()
    return keras.Model(model.input, layers.Softmax()(model.output))
