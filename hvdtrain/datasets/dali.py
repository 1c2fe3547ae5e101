"""Training images decoded by NVIDIA DALI, on the processor: only the rows of the box, with vector instructions.

Boxes and flips are ours, drawn as for Pillow, so that pixels differ by rounding alone: by 0.16 of 255 in the mean.
"""

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.datasets.imagenet import Encoded, opened, random_part
from hvdtrain.errors import EngineUnavailable

MODES = ("RGB", "L")
FED = ("encoded", "corner", "size", "is_flipped")
"""The JPEG's bytes, its box's left upper corner and size as (x, y), and if it is flipped."""


class _Pipeline:
    """DALI's pipeline, built when first used and anew for a larger batch; a pickled copy builds its own."""

    def __init__(self) -> None:
        self._lock, self._largest = threading.Lock(), 0
        self._built: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pipeline, ()

    def run(self, inputs: list[tuple[np.ndarray, ...]], crop: int) -> NDArray[np.uint8]:
        """[n, crop, crop, 3]. Raises RuntimeError where DALI cannot decode one of them."""
        with self._lock:
            if self._built is None or len(inputs) > self._largest:
                self._built, self._largest = _build(len(inputs), crop), len(inputs)
            try:
                (images,) = self._built.run(**dict(zip(FED, map(list, zip(*inputs, strict=True)), strict=True)))
                return np.array(images.as_array())
            except RuntimeError:
                self._built = None  # after an error it stays as it is
                raise


@dataclass(frozen=True, eq=False)
class Dali:
    """A split that is read by DALI where it is augmented, and else, or where an image is no usual JPEG, by Pillow."""

    split: Encoded
    _pipeline: _Pipeline = field(default_factory=_Pipeline)

    def __len__(self) -> int:
        return len(self.split)

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if draws is None:
            return self.split.read(indices, None)
        inputs = [self._inputs(int(index), numbers) for index, numbers in zip(indices, draws, strict=True)]
        usual = np.array([one is not None for one in inputs])
        x = np.empty((len(indices), self.split.crop, self.split.crop, 3), np.uint8)
        if usual.any():
            try:
                x[usual] = self._pipeline.run([one for one in inputs if one], self.split.crop)
            except RuntimeError:  # Pillow reads more, or names the damaged image
                usual[:] = False
        if not usual.all():
            x[~usual] = self.split.read(indices[~usual], draws[~usual])[0]
        return x, self.split.labels[indices]

    def _inputs(self, index: int, draws: NDArray[np.float32]) -> tuple[np.ndarray, ...] | None:
        """The values of FED for the pipeline; None for an image that Pillow decodes."""
        with self.split.as_data_error(index):
            encoded = self.split.encoded(index)
            with opened(encoded) as image:
                if image.format != "JPEG" or image.mode not in MODES:
                    return None
                (left, upper, right, lower), is_flipped = random_part(draws, *image.size)
        corner, size = np.array([left, upper], np.int32), np.array([right - left, lower - upper], np.int32)
        return np.frombuffer(encoded, np.uint8), corner, size, np.array(is_flipped, np.int32)


def _build(batch: int, crop: int) -> Any:
    fn, types, pipeline_def = _dali()

    @pipeline_def(batch_size=batch, num_threads=len(os.sched_getaffinity(0)), device_id=None, prefetch_queue_depth=1)
    def pipeline() -> Any:
        encoded, corner, size, is_flipped = (fn.external_source(name=name) for name in FED)
        cropped = fn.decoders.image_slice(encoded, start=corner, shape=size, axis_names="WH", output_type=types.RGB)
        resized = fn.resize(cropped, size=[crop, crop], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(resized, horizontal=is_flipped)

    built = pipeline()
    built.build()
    return built


def _dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise EngineUnavailable(
            f"decoder dali needs NVIDIA DALI ({error}); install it: pip install nvidia-dali-cuda120"
        ) from None
    return fn, types, pipeline_def


def check() -> None:
    """Raises EngineUnavailable where DALI is not installed."""
    _dali()


def is_installed() -> bool:
    """Whether `check` finds DALI."""
    try:
        check()
    except EngineUnavailable:
        return False
    return True
