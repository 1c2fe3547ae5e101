"""Global batches for `fit` that are the same for every number of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdtrain.core.examples import DRAWS
from hvdtrain.core.progress import Progress, Request, UserSampling, train_requests
from hvdtrain.core.samples import Samples
from hvdtrain.errors import KerasError
from hvdtrain.keras.ranks import hvd
from hvdtrain.ranks.stacks import READERS, mark_module
from hvdtrain.tensorflow import examples

mark_module(READERS, __name__)


class GlobalBatches(keras.utils.PyDataset):
    """This rank's part of each global batch, for `model.fit`: a step reads the same examples on any number of ranks.

    `data`: arrays (x, y), whose values may be dicts and tuples; a keras.utils.PyDataset, whose items are permuted and
    whose rows are the examples; or a source with `__len__` and `__getitem__`, whose items are examples (x, y). In
    `__getitem__`, draw random numbers from `random` or `numpy.random`, which are seeded by seed, epoch and index. With
    FaultTolerance an interrupted epoch continues where it was.

    Examples:
        >>> import numpy as np
        >>> import hvdtrain.keras as hvd
        >>> hvd.init()
        >>> data = hvd.GlobalBatches((np.ones((64, 4)), np.ones(64)), batch_size=16)
        >>> len(data), data[0][0].shape  # with one process
        (4, (16, 4))
    """

    def __init__(self, data: Any, batch_size: int, seed: int = 0, *, sample_check: str = "on") -> None:
        """`batch_size` is the number of examples in one step on all ranks together. Where the last batch would not be
        full, each epoch leaves out other examples. Raises DataError, and KerasError for a batch that the ranks cannot
        divide. `sample_check` off compares no examples over the ranks."""
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.examples = examples.split(data, "the training set")
        if batch_size < 1 or batch_size % hvd.size() or batch_size > len(self.examples):
            raise KerasError(
                f"batch_size counts the examples of all ranks: it must be a multiple of {hvd.size()} and at most the "
                f"{len(self.examples)} training examples, got {batch_size}."
            )
        self.samples = Samples(sample_check)
        self._left: Iterator[Request] = iter(())
        self.follow()

    def follow(self, position: Callable[[], Progress] | None = None) -> None:
        """Reads each epoch from that position on, from now on; without one, whole epochs, beginning with the first."""
        self._epoch, self._reading = -1, False
        self._position = position or (lambda: Progress(epoch=self._epoch))

    def __len__(self) -> int:
        """The number of steps in a whole epoch."""
        return len(self.examples) // self.batch_size

    @property
    def num_batches(self) -> int:
        """The number of steps that are left of the epoch."""
        return len(self) - self._position().sample // self.batch_size if self._reading else len(self)

    def __getitem__(self, index: int) -> Any:
        """The next batch of the epoch, for any index, since Keras shuffles indices; outside an epoch, the batch at
        `index` of the first epoch."""
        return self.examples.read(*(next(self._left) if self._reading else self._requests(Progress())[index]))

    def on_epoch_begin(self) -> None:
        self._epoch += 1
        requests = self._requests(self._position())
        self.samples.look(self.examples, self.seed, requests)
        self._reading, self._left = True, iter(requests)

    def on_epoch_end(self) -> None:
        self._reading = False

    def _requests(self, progress: Progress) -> list[Request]:
        items = getattr(self.examples, "items", ())
        sampling = UserSampling(self.batch_size, len(self.examples), hvd.size(), self.seed, draws=DRAWS, items=items)
        return train_requests(sampling, progress, hvd.rank())[1]
