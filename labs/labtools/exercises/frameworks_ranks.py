"""What the check of lab 7's last gap runs on each rank: it calls the learner's function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labtools.worker import tell

EXAMPLES, BATCH, LR = 96, 24, 0.1

Array = NDArray[Any]


class Fitted(NamedTuple):
    """A rank's weights [n] after an epoch: where all began with the same, and where each had its own; and its accuracy
    in the log."""

    returned: bool
    alike: Array
    own: Array
    accuracy: float


def fitted(distribute: Callable[[Any], Any]) -> Fitted:
    """Two models fitted on this rank's examples."""
    import hvdtrain.keras as hvd

    hvd.init()
    alike, own = (_fit(distribute, seed, hvd.rank(), hvd.size()) for seed in (0, hvd.rank()))
    tell(None)
    nothing = np.zeros(0)
    if alike is None or own is None:
        return Fitted(False, nothing, nothing, 0.0)
    return Fitted(True, alike[0], own[0], own[1])


def alone() -> Fitted:
    """What one process gets on the global batches."""
    found = _fit(lambda optimizer: (optimizer, []), 0, 0, 1)
    assert found
    return Fitted(True, found[0], found[0], found[1])


def _fit(distribute: Callable[[Any], Any], seed: int, rank: int, size: int) -> tuple[Array, float] | None:
    import keras

    draw = np.random.default_rng(0)
    x = draw.normal(size=(EXAMPLES, 6)).astype("float32")
    y = (x.sum(1) > 0).astype("int32")
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)])
    given = distribute(keras.optimizers.SGD(LR))
    if not isinstance(given, tuple | list) or len(given) != 2:
        return None
    optimizer, callbacks = given
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    mine = slice(rank, None, size)
    history = model.fit(
        x[mine], y[mine], batch_size=BATCH // size, shuffle=False, verbose=0, callbacks=list(callbacks or [])
    )
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return weights, float(history.history["accuracy"][-1])
