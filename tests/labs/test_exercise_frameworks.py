"""Lab 7: each gap filled right, and wrong in the usual ways: a message names what is wrong, and why."""

import os
import sys

import numpy as np
import pytest
from fillings import by_gap, check_right, check_wrong
from marks import marked
from ranks import needs_tensorflow

from labtools import Ranks
from labtools.exercises.frameworks import LOADED, Check

cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs"), needs_tensorflow]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="module")
def check():
    ranks = Ranks(2, preload=LOADED)
    yield Check(ranks)
    ranks.close()


def empty(*arguments): ...


def norm(**settings):
    def batch_norm():
        import keras

        return keras.layers.BatchNormalization(**settings)

    return batch_norm


def layer_norm():
    import keras

    return keras.layers.LayerNormalization()


def the_class():
    import keras

    return keras.layers.BatchNormalization


def settings(loss="SparseCategoricalCrossentropy", optimizer="SGD", arguments=None, from_logits=True, **given):
    def filling(lr, momentum):
        import keras

        made = getattr(keras.losses, loss)(from_logits=from_logits, **(arguments or {})) if loss[0] == "S" else loss
        if optimizer == "given":
            return keras.optimizers.SGD(), made
        more = {"momentum": momentum} if optimizer == "SGD" else {}
        return getattr(keras.optimizers, optimizer)(**{"learning_rate": lr, **more, **given}), made

    return filling


def hvd_with(*callbacks, wraps=True, **given):
    def distribute(optimizer):
        import hvdtrain.keras as hvd

        made = [getattr(hvd, name)() for name in callbacks]
        return (hvd.DistributedOptimizer(optimizer, **given) if wraps else optimizer), made

    return distribute


def maps(weight, shape, axes):
    return weight.reshape(-1, *shape).transpose(axes).reshape(-1, len(weight))


WRONG = {
    "batch_norm, empty": (empty, "Gap 1, batch_norm, is still empty"),
    "batch_norm, the class": (the_class, "gives back the class, which is not called"),
    "batch_norm, another": (layer_norm, "gives back a LayerNormalization"),
    "batch_norm, defaults": (norm(), "normalises otherwise: a channel .* becomes 0.29 wide, .* epsilon, 1e-5"),
    "batch_norm, epsilon": (norm(momentum=0.9), "normalises otherwise"),
    "batch_norm, momentum": (norm(epsilon=1e-5), "moves its running mean by 0.01 of the way"),
    "batch_norm, PyTorch's": (norm(epsilon=1e-5, momentum=0.1), "by 0.90 of the way .* PyTorch's number, which means"),
    "batch_norm, axis": (norm(epsilon=1e-5, momentum=0.9, axis=1), "has not the four weights of each channel"),
    "convolution, empty": (empty, "Gap 2, convolution, is still empty"),
    "convolution, as it is": (lambda weight: weight, r"the shape \[4, 2, 3, 3\] .* \[height, width, in, out\]"),
    "convolution, .T": (lambda weight: weight.T, "which hides a mistake: height and width are exchanged"),
    "convolution, reshape": (
        lambda weight: weight.reshape(*weight.shape[2:], weight.shape[1], weight.shape[0]),
        "reshape leaves the numbers in their order",
    ),
    "convolution, in and out": (lambda weight: weight.transpose(2, 3, 0, 1), r"here \[3, 3, 2, 4\]"),
    "convolution, turned": (lambda weight: weight.transpose(2, 3, 1, 0)[::-1, ::-1], "the kernels are turned round"),
    "dense, empty": (empty, "Gap 3, dense, is still empty"),
    "dense, as it is": (lambda weight, shape: weight, r"\[in, out\], here \[36, 10\]"),
    "dense, .T": (lambda weight, shape: weight.T, "transposed alone, .* channel by channel, Keras pixel by pixel"),
    "dense, reshape": (lambda weight, shape: weight.reshape(-1, len(weight)), "reshape alone leaves the numbers"),
    "dense, width first": (lambda w, shape: maps(w, shape, (3, 2, 1, 0)), "height and width are exchanged"),
    "dense, 4, 3, 3": (lambda w, shape: maps(w, (4, 3, 3), (2, 3, 1, 0)), "stopped.*reshape|other weights"),
    "settings, empty": (empty, "Gap 4, settings, is still empty"),
    "settings, probabilities": (settings(from_logits=False), "takes the network's logits for probabilities: .*"),
    "settings, by name": (settings("sparse_categorical_crossentropy"), "takes the network's logits for probabilities"),
    "settings, summed": (settings(arguments={"reduction": "sum"}), "the sum over the batch for a loss, 8 times"),
    "settings, one-hot": (settings("categorical_crossentropy"), "Gap 4, settings, (stopped|has a loss)"),
    "settings, default LR": (settings(optimizer="given"), "makes a first step of 0.010, PyTorch of 0.050: an LR"),
    "settings, no momentum": (settings(momentum=0.0), "makes the right first step, .* momentum is 0.9 there"),
    "settings, nesterov": (settings(nesterov=True), "a first step of .*nesterov, which the script has not"),
    "settings, Adam": (settings(optimizer="Adam"), "has the optimizer Adam, where PyTorch's script has SGD"),
    "distribute, empty": (empty, "Gap 5, distribute, is still empty"),
    "distribute, nothing": (lambda optimizer: (optimizer, []), "does not average the gradients"),
    "distribute, not wrapped": (hvd_with("BroadcastCallback", wraps=False), "stopped:.*(wrap|DistributedOptimizer)"),
    "distribute, own weights": (hvd_with("MetricAverageCallback"), "(leaves each rank weights of its own|stopped)"),
    "distribute, own metrics": (hvd_with("BroadcastCallback"), "logs another accuracy on each rank"),
    "distribute, no callback": (hvd_with(), "leaves each rank weights of its own"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "filling", "message"), by_gap(WRONG))
def test_mistakes_of_lab_7(check, gap, filling, message):
    check_wrong(check, message, gap, filling)


RIGHT = {
    "batch_norm": [norm(epsilon=1e-5, momentum=0.9)],
    "convolution": [lambda w: w.transpose(2, 3, 1, 0), lambda w: np.moveaxis(w, [0, 1], [3, 2])],
    "dense": [lambda w, shape: maps(w, shape, (2, 3, 1, 0))],
    "settings": [settings()],
    "distribute": [hvd_with("BroadcastCallback", "MetricAverageCallback")],
}


@pytest.mark.parametrize("gap", marked(RIGHT, slow={"distribute"}, only_ci=RIGHT))  # as in lab 6, with PyTorch
def test_right_fillings(check, capsys, gap):
    for filling in RIGHT[gap]:
        check_right(check, capsys, gap, filling)
