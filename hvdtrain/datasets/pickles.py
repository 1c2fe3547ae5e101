"""Reads the published CIFAR pickles without running anything that a pickle may ask for."""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError


def read_batch(path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary in that file: lists, numbers, text and uint8 arrays. Its keys are str.

    Files pickled by Python 2 and 3 are read alike. Raises DataError, ending in the remedy, for all else.
    """
    with told(path, remedy), path.open("rb") as file:
        batch = _BatchUnpickler(file, encoding="bytes").load()
        return {_text(key): _plain(value) for key, value in batch.items()}


@contextlib.contextmanager
def told(path: Path, remedy: str) -> Iterator[None]:
    """Around the reading of a pickle: whatever goes wrong is a DataError that names the file and the remedy."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    except MemoryError:
        raise DataError(f"{path} does not fit into memory, or is damaged: {remedy}") from None
    except Exception as error:  # a damaged pickle raises nearly any exception there is
        raise DataError(f"{path} is damaged ({type(error).__name__}: {_line(error)}): {remedy}") from None


class _PickledType:
    """Stands for numpy.dtype, and can only mean bytes.

    NumPy's own would take its flags from the file, which lets a forged file pass off bytes as pointers.
    """

    def __init__(self, code: str | bytes, *_: object) -> None:
        if _text(code) not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"an array of {_text(code)!r}, where uint8 is expected")

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """Stands for numpy.ndarray: keeps the state in the file until all of it was read."""

    state: tuple[int, tuple[int, ...], _PickledType, bool, bytes]

    def __setstate__(self, state: tuple[int, tuple[int, ...], _PickledType, bool, bytes]) -> None:
        self.state = state

    def array(self) -> NDArray[np.uint8]:
        _, shape, _, is_fortran, content = self.state
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


def _reconstruct(*_: object) -> _PickledArray:
    return _PickledArray()


def encode(text: str, encoding: str) -> bytes:
    """Stands for _codecs.encode, which makes bytes in protocol 2; other codecs could unpack bombs."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the codec {encoding!r}")
    return text.encode("latin1")


_STANDINS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): encode,
}


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STANDINS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return _STANDINS[module, name]


def _plain(value: Any) -> Any:
    return value.array() if isinstance(value, _PickledArray) else value


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
