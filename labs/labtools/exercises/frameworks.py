"""The checks of lab 7: the same model and the same numbers in PyTorch and Keras.

PyTorch's numbers are computed by its formulas: its optimizers and TensorFlow abort in one process.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import LabError
from labtools.exercises import Exercise, listed, print_right
from labtools.exercises import frameworks_ranks as on_rank
from labtools.ranks import Ranks

LOADED = ("hvdtrain.keras", "keras")
"""What the ranks of these checks load once, in place of PyTorch."""
_SECONDS = 60.0
_CLOSE = 1e-4
_CHANNELS = 4

Array = NDArray[Any]


class Check(Exercise):
    """The five gaps of lab 7, of which the last needs two ranks."""

    lab = 7
    hints: ClassVar = {
        "batch_norm": (
            "help(keras.layers.BatchNormalization) and help(torch.nn.BatchNorm2d): compare the defaults.",
            "two of them differ: the small number below the root, and how fast the running statistics move.",
            "PyTorch's momentum 0.1 is the weight of the new batch; Keras's momentum is the weight of the old value.",
        ),
        "convolution": (
            "PyTorch's weight is [out, in, height, width], Keras's kernel [height, width, in, out].",
            "np.transpose(weight, axes): axes lists, for each new axis, which old one it is.",
        ),
        "dense": (
            "first undo PyTorch's flattening: the weight is [out, channels, height, width] once it is reshaped.",
            "then transpose to [height, width, channels, out], as Keras flattens, and reshape to two axes.",
        ),
        "settings": (
            "keras.optimizers.SGD and keras.losses.SparseCategoricalCrossentropy; the labels are numbers, not one-hot.",
            "the network gives logits, to which no softmax was applied: the loss must know it.",
            "from_logits=True for the loss; the LR and the momentum as the arguments say.",
        ),
        "distribute": (
            "as in PyTorch: the optimizer is wrapped, and all ranks begin with rank 0's weights.",
            "hvd.DistributedOptimizer, and a list of callbacks: hvd.BroadcastCallback(), and one for the metrics.",
            "hvd.MetricAverageCallback makes the accuracy in the log that of all ranks.",
        ),
    }

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def batch_norm(self, batch_norm: Callable[[], Any]) -> None:
        """Gap 1: `batch_norm()` is a layer of Keras's that does as torch.nn.BatchNorm2d."""
        import keras

        layer = self._call("batch_norm", batch_norm)
        if layer is None:
            self._judge("batch_norm", "is still empty: it gives back no layer.")
        if not isinstance(layer, keras.layers.BatchNormalization):
            what = "the class, which is not called" if isinstance(layer, type) else f"a {type(layer).__name__}"
            self._judge("batch_norm", f"gives back {what}, and not a layer of keras.layers.BatchNormalization.")
        self._judge("batch_norm", _of_batch_norm(layer))
        print_right("outputs and running statistics are PyTorch's.")

    def convolution(self, convolution: Callable[[Array], Any]) -> None:
        """Gap 2: `convolution(weight)` is Keras's kernel, from PyTorch's weight [out, in, height, width]."""
        for shape in ((_CHANNELS, 2, 3, 3), (5, 3, 1, 2)):
            weight = _numbers(*shape)
            self._judge("convolution", _of_convolution(self._call("convolution", convolution, weight.copy()), weight))
        print_right("both frameworks compute the same outputs with it.")

    def dense(self, dense: Callable[[Array, tuple[int, int, int]], Any]) -> None:
        """Gap 3: `dense(weight, shape)` is Keras's kernel for the flattened outputs, in PyTorch of this shape."""
        for shape in ((_CHANNELS, 3, 3), (2, 3, 5)):
            weight = _numbers(10, int(np.prod(shape)))
            self._judge("dense", _of_dense(self._call("dense", dense, weight.copy(), shape), weight, shape))
        print_right("each weight meets the output that it met in PyTorch.")

    def settings(self, settings: Callable[[float, float], Any]) -> None:
        """Gap 4: `settings(lr, momentum)` is the optimizer and the loss for `model.compile`."""
        for lr, momentum in ((0.05, 0.9), (0.2, 0.5)):
            given = self._call("settings", settings, lr, momentum)
            if not isinstance(given, tuple | list) or len(given) != 2:
                self._judge("settings", "is still empty: it gives back no optimizer and loss (two, behind `return`).")
            mistake = self._call("settings", _of_loss, given[1]) or self._call(
                "settings", _of_sgd, given[0], lr, momentum
            )
            self._judge("settings", mistake)
        print_right("the loss of a batch and the path of three steps are PyTorch's.")

    def distribute(self, distribute: Callable[[Any], Any]) -> None:
        """Gap 5: `distribute(optimizer)` is the optimizer and the callbacks with which `fit` trains on all ranks."""
        try:
            found = self._ranks.run(on_rank.fitted, distribute, ranks=2, seconds=_SECONDS)
        except LabError as error:
            raise self._wrong("distribute", f"stopped:\n{error}") from None
        self._judge("distribute", _of_fitted(found, self._ranks.run(on_rank.alone, ranks=1, seconds=_SECONDS)[0]))
        print_right(f"2 ranks get the weights of one process, and log its accuracy, {found[0].accuracy:.4f}.")


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def _of_batch_norm(layer: Any) -> str | None:
    x = _numbers(8, 3, 3, _CHANNELS) * np.array([0.01, 1, 1, 1], "float32") + 1  # one channel varies little
    expected = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)
    given = np.asarray(layer(x, training=True))
    if len(layer.get_weights()) != 4 or layer.get_weights()[0].shape != (_CHANNELS,):
        return "has not the four weights of each channel that PyTorch's layer has: leave axis, center and scale alone."
    if np.abs(given - expected).max() > 1e-2:
        return (
            f"normalises otherwise: a channel of variance 0.0001 becomes {given[..., 0].std():.2f} wide, in PyTorch "
            f"{expected[..., 0].std():.2f}. The number that is added to the variance is epsilon, 1e-5 in PyTorch."
        )
    moved = float(layer.get_weights()[2][0] / x[..., 0].mean())
    if abs(moved - 0.1) > 1e-3:
        copied = " That is PyTorch's number, which means the opposite." if abs(moved - 0.9) < 1e-3 else ""
        return (
            f"moves its running mean by {moved:.2f} of the way to each batch's, and PyTorch by 0.10.{copied} "
            "Keras's momentum is the weight of the old value."
        )
    return None


def _of_convolution(given: Any, weight: Array) -> str | None:
    if given is None:
        return "is still empty: it gives back no kernel."
    kernel, right = np.asarray(given), weight.transpose(2, 3, 1, 0)
    if kernel.shape != right.shape:
        return (
            f"gives back the shape {list(kernel.shape)} from {list(weight.shape)}: Keras's kernel is "
            f"[height, width, in, out], here {list(right.shape)}."
        )
    mistaken = [
        (weight.reshape(right.shape), "reshape leaves the numbers in their order: it moves no axis. Use np.transpose.")
    ]
    if kernel.shape[0] == kernel.shape[1]:
        mirrored = weight.transpose(3, 2, 1, 0)
        mistaken.append((mirrored, "height and width are exchanged, and each kernel is mirrored at its diagonal."))
    turned = "the kernels are turned round. Neither framework does that, though mathematicians call it a convolution."
    return _recognised(kernel, right, [*mistaken, (right[::-1, ::-1], turned)])


def _of_dense(given: Any, weight: Array, shape: tuple[int, int, int]) -> str | None:
    if given is None:
        return "is still empty: it gives back no kernel."
    kernel, maps = np.asarray(given), weight.reshape(-1, *shape)
    right = maps.transpose(2, 3, 1, 0).reshape(-1, len(weight))
    if kernel.shape != right.shape:
        return f"gives back the shape {list(kernel.shape)}: Keras's kernel is [in, out], here {list(right.shape)}."
    transposed = (
        "it is transposed alone, which is right behind another dense layer. Here the inputs are flattened images: "
        "PyTorch counts them channel by channel, Keras pixel by pixel."
    )
    order = "reshape alone leaves the numbers in their order: the axes must change places."
    width = "height and width are exchanged: Keras flattens [height, width, channels]."
    mistaken = [(weight.T, transposed), (weight.reshape(right.shape), order)]
    mistaken.append((maps.transpose(3, 2, 1, 0).reshape(right.shape), width))
    return _recognised(kernel, right, mistaken)


def _recognised(kernel: Array, right: Array, mistaken: list[tuple[Array, str]]) -> str | None:
    """What is wrong with a kernel of the right shape; `mistaken` are those that usual slips make, and what each is."""
    if np.allclose(kernel, right):
        return None
    found = next((what for wrong, what in mistaken if np.allclose(kernel, wrong)), "other weights meet the inputs.")
    return f"has the right shape, which hides a mistake: {found}"


def _of_loss(given: Any) -> str | None:
    import keras

    loss = keras.losses.get(given)
    logits, labels = 3 * _numbers(8, 5), np.arange(8) % 5
    expected = float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(8), labels]))
    values = np.asarray(loss(labels, logits))
    value = float(values.mean())
    if abs(value - expected) < _CLOSE and values.ndim == 0:
        return None
    if isinstance(given, str) or not getattr(loss, "_fn_kwargs", {}).get("from_logits", True):
        return (
            f"has a loss that takes the network's logits for probabilities: {value:.2f} for a batch of which PyTorch's "
            f"is {expected:.2f}. Nothing fails: it merely learns worse. from_logits=True."
        )
    if abs(value - expected * len(labels)) < _CLOSE * len(labels):
        return f"has the sum over the batch for a loss, {len(labels)} times PyTorch's mean: leave reduction alone."
    return f"has a loss of {value:.4f} for a batch of which PyTorch's cross_entropy is {expected:.4f}."


def _of_sgd(given: Any, lr: float, momentum: float) -> str | None:
    """From three steps of gradient 1."""
    import keras

    optimizer, weight = keras.optimizers.get(given), keras.Variable([1.0])
    path, expected, velocity = [], [0.0], 0.0
    for _ in range(3):
        optimizer.apply([keras.ops.ones(1)], [weight])
        path.append(1 - float(np.asarray(weight)[0]))
        velocity = momentum * velocity + 1
        expected.append(expected[-1] + lr * velocity)
    expected = expected[1:]
    if np.allclose(path, expected, atol=1e-5):
        return None
    if not isinstance(optimizer, keras.optimizers.SGD):
        return f"has the optimizer {type(optimizer).__name__}, where PyTorch's script has SGD."
    if not np.isclose(path[0], expected[0], atol=1e-5):
        why = "nesterov, which the script has not" if optimizer.nesterov else f"an LR other than {lr}"
        return f"makes a first step of {path[0]:.3f}, PyTorch of {expected[0]:.3f}: {why}."
    return (
        f"makes the right first step, but then comes to {listed(path[1:])}, PyTorch to {listed(expected[1:])}: "
        f"momentum is {momentum} there, and 0 by itself."
    )


def _of_fitted(found: list[on_rank.Fitted], right: on_rank.Fitted) -> str | None:
    if not all(each.returned for each in found):
        return "is still empty: it gives back no optimizer and list of callbacks (two, behind `return`)."
    if np.abs(found[0].alike - found[1].alike).max() > _CLOSE:
        return "does not average the gradients: from the same weights the ranks part. The optimizer has to be wrapped."
    if np.abs(found[0].own - found[1].own).max() > _CLOSE:
        return "leaves each rank weights of its own: a callback has to give all ranks those of rank 0."
    if np.abs(found[0].own - right.own).max() > _CLOSE:
        return "trains to other weights than one process on the global batch: leave op and the LR alone."
    if found[0].accuracy != found[1].accuracy:
        return (
            f"logs another accuracy on each rank, {found[0].accuracy:.3f} and {found[1].accuracy:.3f}: early stopping "
            "would stop one rank alone. A callback makes it that of all ranks."
        )
    return None
