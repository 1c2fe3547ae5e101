"""Training images decoded by NVIDIA DALI on the processor. It decodes only the rows that are needed, and with vector
instructions.

Boxes and flips are drawn as for Pillow, so that pixels differ only by rounding: by 0.16 of 255 in the mean.
"""

import dataclasses
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import processors
from hvdtrain.datasets.base import SHOWN, Dataset
from hvdtrain.datasets.images import BadImage, Encoded, opened, random_part
from hvdtrain.errors import EngineUnavailable
from hvdtrain.untrusted import one_line

FORMATS, MODES = ("JPEG", "MPO"), ("RGB", "L")
FED = ("encoded", "corner", "size", "is_flipped")
"""The bytes of a JPEG, the left upper corner and the size of its box as (x, y), and whether it is flipped."""


class _Pipeline:
    """DALI's pipeline. It is built at its first use and again for a larger batch; a pickled copy builds its own."""

    def __init__(self) -> None:
        self._lock, self._largest = threading.Lock(), 0
        self._built: Any = None
        self._is_reported = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pipeline, ()

    def run(self, inputs: list[tuple[np.ndarray, ...]], crop: int) -> list[NDArray[np.uint8] | None]:
        """The images [crop, crop, 3] for the values of FED; None in place of one that DALI cannot decode."""
        if not inputs:
            return []
        with self._lock:
            if self._built is None or len(inputs) > self._largest:
                self._built, self._largest = _build(len(inputs), crop), len(inputs)
            try:
                (images,) = self._built.run(**dict(zip(FED, map(list, zip(*inputs, strict=True)), strict=True)))
                return list(np.array(images.as_array()))
            except RuntimeError as error:
                self._built = None  # a pipeline cannot be used after an error
                self.report(one_line(error, SHOWN))
        half = len(inputs) // 2
        return [*self.run(inputs[:half], crop), *self.run(inputs[half:], crop)] if half else [None]

    def report(self, reason: str) -> None:
        """Prints the reason why Pillow decodes an image, once in a process."""
        if not self._is_reported:
            print(f"decoder dali leaves images to Pillow, here the first: {reason}", file=sys.stderr, flush=True)
        self._is_reported = True


@dataclass(frozen=True, eq=False)
class Dali:
    """A split whose augmented images DALI decodes. Pillow decodes the others, and images that are not usual JPEGs."""

    split: Encoded
    _pipeline: _Pipeline = field(default_factory=_Pipeline)

    def __len__(self) -> int:
        return len(self.split)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if draws is None:
            return self.split.read(indices, None)
        inputs = [self._inputs(int(index), numbers) for index, numbers in zip(indices, draws, strict=True)]
        images = iter(self._pipeline.run([one for one in inputs if one], self.split.crop))
        x = np.empty((len(indices), self.split.crop, self.split.crop, 3), np.uint8)
        others = []
        for number, one in enumerate(inputs):
            if one and (image := next(images)) is not None:
                x[number] = image
            else:
                others.append(number)
        if others:
            x[others] = self.split.read(indices[others], draws[others])[0]
        return x, self.split.labels[indices]

    def digest(self) -> str:
        return self.split.digest()

    def _inputs(self, index: int, draws: NDArray[np.float32]) -> tuple[np.ndarray, ...] | None:
        """The values of FED for an image; None for one that Pillow decodes."""
        try:
            with self.split.as_data_error(index):
                encoded = self.split.encoded(index)
                with opened(encoded) as image:
                    if image.format not in FORMATS or image.mode not in MODES:
                        self._pipeline.report(f"{image.format} of mode {image.mode}")
                        return None
                    (left, upper, right, lower), is_flipped = random_part(draws, *image.size)
        except BadImage:  # reading by Pillow will name all bad images of the batch
            return None
        corner, size = np.array([left, upper], np.int32), np.array([right - left, lower - upper], np.int32)
        return np.frombuffer(encoded, np.uint8), corner, size, np.array(is_flipped, np.int32)


def _build(batch: int, crop: int) -> Any:
    fn, types, pipeline_def = _dali()

    @pipeline_def(batch_size=batch, num_threads=processors.count(), device_id=None, prefetch_queue_depth=1)
    def pipeline() -> Any:
        encoded, corner, size, is_flipped = (fn.external_source(name=name) for name in FED)
        cropped = fn.decoders.image_slice(
            encoded, start=corner, shape=size, axis_names="WH", output_type=types.RGB, adjust_orientation=False
        )
        resized = fn.resize(cropped, size=[crop, crop], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(resized, horizontal=is_flipped)

    try:
        built = pipeline()
        built.build()
    except RuntimeError as error:
        remedy = "install what it names, or take decoder pillow"
        raise EngineUnavailable(f"decoder dali cannot start ({one_line(error)}); {remedy}.") from None
    return built


def _dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise EngineUnavailable(
            f"decoder dali needs NVIDIA DALI ({error}); install it: pip install nvidia-dali-cuda120"
        ) from None
    return fn, types, pipeline_def


def decoding(dataset: Dataset) -> Dataset:
    """The data set, with DALI for its training images. Raises EngineUnavailable where DALI is not installed."""
    _dali()
    assert isinstance(dataset.train, Encoded)
    return dataclasses.replace(dataset, train=Dali(dataset.train))
