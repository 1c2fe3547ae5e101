"""Pickled files that others wrote, read as plain data: no code that a file names is run, only the stand-ins below.

A forged file can still make the interpreter use much memory.
"""

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.datasets.base import SHOWN
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.untrusted import one_line

NUMBERS_AND_TEXT = re.compile(r"\|?([iuf][1248]|b1|[SU][0-9]{1,5})")
"""The types of an array's values that are read: those without pointers."""


@contextlib.contextmanager
def as_data_error(path: Path, remedy: str) -> Iterator[None]:
    """Turns all errors of the block, which reads a file, into DataErrors that name the file and the remedy."""
    try:
        yield
    except HvdtrainError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({one_line(error.strerror or error, SHOWN)}): {remedy}") from None
    except MemoryError:
        raise DataError(f"{path} does not fit into memory, or is damaged: {remedy}") from None
    except Exception as error:  # a damaged file may raise any exception
        raise DataError(f"{path} is damaged ({type(error).__name__}: {one_line(error, SHOWN)}): {remedy}") from None


class StandIn:
    """What is used in place of a class or function that a pickle names."""

    def __setstate__(self, state: Any) -> None:
        """Refuses any state. Without this method a pickle could set attributes, also those of the class."""
        raise pickle.UnpicklingError("it sets the state of an object that has none")


class Encoded(StandIn):
    """Replaces _codecs.encode, with which Python 3 pickles bytes for Python 2. Other codecs would decompress bombs."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"the codec {encoding!r}")
        return text.encode("latin1")


class Kind(StandIn):
    """Replaces numpy.dtype, which would take flags from the file, and because of them bytes for pointers."""

    def __init__(self, code: Any, *_: object) -> None:
        if not NUMBERS_AND_TEXT.fullmatch(plain_text(code)):
            raise pickle.UnpicklingError(f"an array of {plain_text(code)!r}, where numbers or text are expected")
        self.dtype = np.dtype(plain_text(code))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(plain_text(state[1]))  # type: ignore[arg-type]


class Array(StandIn):
    """Replaces numpy.ndarray."""

    values: NDArray[Any]

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        self.values = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if is_fortran else "C")

    def number(self) -> Any:
        """The only number of the array; the array itself where it holds several values or text."""
        is_number = self.values.size == 1 and self.values.dtype.kind in "iufb"
        return self.values.item() if is_number else self.values


class DataUnpickler(pickle.Unpickler):
    """Unpickles numbers, texts, bytes, tuples, lists and dictionaries, and stand-ins for NumPy's arrays."""

    kind = "CIFAR file"

    def find_class(self, module: str, name: str) -> Any:
        match module.partition(".")[0], name:
            case "_codecs", "encode":
                return Encoded
            case "numpy", "_reconstruct" | "ndarray":
                return Array
            case "numpy", "dtype":
                return Kind
        raise pickle.UnpicklingError(f"it requests {module}.{name}, which no {self.kind} needs")


def read_batch(path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary in the file, pickled by Python 2 or 3, with str as keys. Raises DataError, which ends with the
    remedy."""
    with as_data_error(path, remedy), files.opened(path) as file:
        batch = DataUnpickler(file, encoding="bytes").load()
        return {plain_text(key): each.values if isinstance(each, Array) else each for key, each in batch.items()}


def plain_text(value: str | bytes) -> str:
    """The text, also of a byte string of Python 2."""
    return value.decode("latin1") if isinstance(value, bytes) else value
