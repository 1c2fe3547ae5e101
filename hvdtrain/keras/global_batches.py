"""Global batches for `fit`, `evaluate` and `predict` that are the same for every number of ranks."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.core.progress import Epoch, Request
from hvdtrain.errors import KerasError
from hvdtrain.keras.ranks import hvd
from hvdtrain.run.examples import DRAWS
from hvdtrain.run.samples import Samples
from hvdtrain.tensorflow import private
from hvdtrain.tensorflow.data import split

MADE: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()
"""The steps of an epoch that a run made before it was resumed, by model: Keras counts the later ones from 0."""


class GlobalBatches(keras.utils.PyDataset):
    """This rank's part of each global batch: a step of `fit` reads the same examples on any number of ranks.

    `data`: arrays (x, y), whose values may be dicts and tuples; a keras.utils.PyDataset, whose items are permuted and
    whose rows are the examples; or a source with `__len__` and `__getitem__`, whose items are examples (x, y). In
    `__getitem__`, draw random numbers from `random` or `numpy.random`, which are seeded by seed, epoch and index.

    `fit` reads a stream of steps, each row once in an epoch of the data and one epoch after the other. Its epoch number
    e begins at step e * `steps_per_epoch`. A later fit reads on; with FaultTolerance each begins with epoch 0 of the
    data. `evaluate` and `validation_data` read each row once over the ranks, in order; `predict` all rows on each.

    Examples:
        >>> import numpy as np
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> data = hvd.GlobalBatches((np.ones((64, 4)), np.ones(64)), batch_size=16)
        >>> len(data), data[0][0].shape  # with one process
        (4, (16, 4))
    """

    def __init__(
        self, data: Any, batch_size: int, seed: int = 0, *, shuffle: bool = True, sample_check: str = "on"
    ) -> None:
        """`batch_size` is the number of examples in one step on all ranks together. Where the last batch would not be
        full, each epoch of `fit` leaves out other examples; the last ones without `shuffle`. `sample_check` off
        compares no examples over the ranks. Raises DataError, and KerasError for a batch that the ranks cannot
        divide."""
        super().__init__()
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.examples = split(data, "the training set")
        if batch_size < 1 or batch_size % hvd.size() or batch_size > len(self.examples):
            raise KerasError(
                f"batch_size counts the examples of all ranks: it must be a multiple of {hvd.size()} and at most the "
                f"{len(self.examples)} examples, got {batch_size}."
            )
        self.samples = Samples(sample_check)
        self.done = 0  # the step of the stream at which the next fit begins
        self._order: tuple[int, Any] = -1, None

    def __len__(self) -> int:
        """The number of steps in a whole epoch."""
        return len(self.examples) // self.batch_size

    def __getitem__(self, index: int) -> Any:
        """This rank's part of the stream's step `index`; steps from `len` on are those of later epochs."""
        return self.read(*self.request(index))

    def request(self, step: int) -> Request:
        """What this rank reads in that step of the stream."""
        (epoch, index), kept = divmod(step, len(self)), self._order
        if epoch != kept[0]:
            rows, items = len(self.examples), getattr(self.examples, "items", ())
            drawing = self.seed, epoch, DRAWS
            drawn = Epoch.by_item(items, *drawing) if items else Epoch.shuffled(rows, *drawing)
            kept = self._order = epoch, drawn if self.shuffle else Epoch(np.arange(rows), drawn.draws)
        indices = kept[1].local_batch(index * self.batch_size, self.batch_size, hvd.rank(), hvd.size())
        return indices, kept[1].draws[indices]

    def read(self, indices: np.ndarray, draws: np.ndarray | None = None) -> Any:
        """The batch of these rows, with texts as tensors. Raises DataError."""
        batch = self.examples.read(indices, draws)
        return keras.tree.map_structure(lambda each: tf.constant(each) if each.dtype.kind in "OUS" else each, batch)


class _Steps(keras.utils.PyDataset):
    """What `fit` reads: the steps of its epochs."""

    def __init__(self, data: GlobalBatches, given: dict[str, Any]) -> None:
        super().__init__()
        self.data, self._model, self._initial = data, given["self"], given.get("initial_epoch", 0)
        self._steps = given.pop("steps_per_epoch", None) or len(data)  # else Keras reads ahead over an epoch's end
        self._now, self._next = range(self._steps), -1

    def __len__(self) -> int:
        return len(self._now)

    def __getitem__(self, index: int) -> Any:
        if self._next >= 0:  # else Keras looks at the shapes
            self.data.examples.enter(self._now[index] // len(self.data))
        return self.data[self._now[index]]

    def on_epoch_begin(self) -> None:
        data = self.data
        if self._next < 0:
            resumed = (private.initial_epoch(self._model) or self._initial) - self._initial
            self._next = max(data.done, self._initial * self._steps) + resumed * self._steps
        self._now = range(self._next + MADE.get(self._model, 0), self._next + self._steps)
        self._next = data.done = self._now.stop
        data.examples.enter(self._now[0] // len(data))
        data.samples.look(data.examples, data.seed, [data.request(self._now[0])])

    def on_epoch_end(self) -> None:
        if self._next > 0 and self._next % len(self.data) == 0:
            self.data.examples.enter(self._next // len(self.data) - 1, ended=True)


class _Rows(keras.utils.PyDataset):
    """What `evaluate` and `predict` read: of each of the first global batches, in order, one of `parts` parts. None is
    empty, which not every layer takes: a batch with fewer rows than parts joins the one before."""

    def __init__(self, data: GlobalBatches, steps: int | None, part: int, parts: int) -> None:
        super().__init__()
        rows = min(len(data.examples), (steps or len(data.examples)) * data.batch_size)
        batch = data.batch_size // hvd.size() * parts
        batches = np.split(np.arange(rows), range(batch, rows - parts + 1, batch))
        self._read, self._batches = data.read, [np.array_split(each, parts)[part] for each in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._read(self._batches[index])


def _in_role(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's method, which reads of a GlobalBatches what it is for. An exit within it ends a FaultTolerance's run."""
    signature, name = inspect.signature(method), method.__name__

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given, ranks = bound.arguments, (hvd.rank(), hvd.size())
        x, (valid, *_) = given.get("x"), keras.utils.unpack_x_y_sample_weight(given.get("validation_data"))
        if isinstance(x, GlobalBatches) and name == "fit":
            if (shuffle := given.get("shuffle", x.shuffle)) != x.shuffle and hvd.rank() == 0:
                print(f"fit's shuffle={shuffle} has no effect; give it to GlobalBatches", flush=True)
            given["x"], given["shuffle"] = _Steps(x, given), False
        elif isinstance(x, GlobalBatches):
            given["x"] = _Rows(x, given.pop("steps", None), *((0, 1) if name == "predict" else ranks))
        if isinstance(valid, GlobalBatches):
            given["validation_data"] = _Rows(valid, given.pop("validation_steps", None), *ranks)
        try:
            return method(*bound.args, **bound.kwargs)
        except SystemExit as error:  # for which Python calls no hook
            for run in getattr(given.get("callbacks"), "callbacks", given.get("callbacks")) or ():
                if (session := getattr(run, "_session", None)) and session.is_joined:
                    session.failed(error)
            raise

    return call


for _method in (keras.Model.fit, keras.Model.evaluate, keras.Model.predict):
    setattr(keras.Model, _method.__name__, _in_role(_method))
