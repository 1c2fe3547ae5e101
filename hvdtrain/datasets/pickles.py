"""Reads pickled data, and the published CIFAR files, without running anything else that a pickle may request."""

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain import files
from hvdtrain.datasets.base import SHOWN
from hvdtrain.errors import DataError
from hvdtrain.untrusted import one_line

MOST_BYTES = 1 << 28
"""In one value of a CIFAR file: the published pixels are 153.6 MB, and 230 MB as protocol 2's text."""
MADE = 16
"""Times its own size, the text that a file may have put together from strings that it repeats."""
KEYS = {str, bytes, int}
BYTE_ORDERS = ("<", ">", "|", "=")
LARGEST_KEY = 60  # bits: up to them each number is its own hash
OPCODES = (
    "PROTO FRAME STOP MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWFALSE NEWTRUE INT BININT "
    "BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "LIST APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL REDUCE"
)
"""Of the pickle machine: what data need. Not BUILD, which would write to any object, nor what makes sets, whose members
are hashed."""


def read_batch(path: Path, remedy: str) -> dict[str, Any]:
    """The dictionary in that file: lists, numbers, text and uint8 arrays. Its keys are str.

    Files pickled by Python 2 and 3 are read alike. Raises DataError, ending in the remedy, for all else.
    """
    with as_data_error(path, remedy), files.opened(path) as file:
        batch = _BatchUnpickler(file, MOST_BYTES, encoding="bytes").load()
        return {_text(key): value.array() if isinstance(value, PickledArray) else value for key, value in batch.items()}


@contextlib.contextmanager
def as_data_error(path: Path, remedy: str) -> Iterator[None]:
    """Around the reading of a file: whatever goes wrong is a DataError that names the file and the remedy."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from None
    except MemoryError:
        raise DataError(f"{path} does not fit into memory, or is damaged: {remedy}") from None
    except Exception as error:  # a damaged file raises nearly any exception there is
        raise DataError(f"{path} is damaged ({type(error).__name__}: {one_line(error, SHOWN)}): {remedy}") from None


class _Bounded:
    """A file that is never asked for more than it holds: a length in a forged pickle claims no memory."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self.size = self._left = os.fstat(file.fileno()).st_size
        self._file, self._most = file, most

    def read(self, size: int) -> bytes:
        if size > self._left or size > self._most:
            raise EOFError(f"{size} bytes are announced, {self._left} are left")
        self._left -= size
        return self._file.read(size)

    def readline(self) -> bytes:
        content = self._file.readline(self._most)
        self._left -= len(content)
        if not content.endswith(b"\n"):
            raise EOFError("a line does not end")
        return content


def _with_plain_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    """Tuples that hold one another twice, 60 deep, take for ever to hash, and a million deep overflow C's stack; of
    large numbers any many can have one hash."""

    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[keys]:
            if type(key) not in KEYS or (type(key) is int and key.bit_length() > LARGEST_KEY):
                raise pickle.UnpicklingError("a key that is neither text nor a number of a class")
        load(unpickler)

    return checked


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it holds the opcode {bytes([opcode])!r}, which no data need")


def _standard(name: str) -> tuple[int, Callable[[Any], None]]:
    opcode: int = getattr(pickle, name)[0]
    return opcode, pickle._Unpickler.dispatch[opcode]


class DataUnpickler(pickle._Unpickler):
    """Makes numbers, text, tuples, lists, dictionaries and bytes; subclasses add functions that stand for others.

    Python's own machine rather than C's, whose table of memos grows to whatever number a file names, and whose opcodes
    cannot be chosen.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = _Opcodes(
        [
            *map(_standard, OPCODES.split()),
            *((code, _with_plain_keys(load, slice(0, None, 2))) for code, load in map(_standard, ("DICT", "SETITEMS"))),
            *((code, _with_plain_keys(load, slice(-2, -1))) for code, load in [_standard("SETITEM")]),
        ]
    )
    kind: ClassVar[str]
    """Of file, for a message."""

    def __init__(self, file: IO[bytes], most: int, *, encoding: str, errors: str = "strict") -> None:
        bounded = _Bounded(file, most)
        super().__init__(bounded, encoding=encoding, errors=errors)
        self._may_make = MADE * bounded.size

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how bytes are pickled for Python 2
            return self._encoded
        raise pickle.UnpicklingError(f"it requests {module}.{name}, which no {self.kind} needs")

    def _encoded(self, text: str, encoding: str) -> bytes:
        """Stands for _codecs.encode, whose other codecs could unpack bombs."""
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"the codec {encoding!r}")
        return self.made(text).encode("latin1")

    def made(self, text: str) -> str:
        """The text, counted. Raises pickle.UnpicklingError where that is too much."""
        self._may_make -= len(text)
        if self._may_make < 0:
            raise pickle.UnpicklingError(f"it makes more than {MADE} times the text that it holds")
        return text


class _PickledType:
    """Stands for numpy.dtype, and can only mean numbers and text of a fixed size.

    NumPy's own would take its flags from the file, which lets a forged file pass off bytes as pointers.
    """

    dtype: np.dtype[Any]

    def __init__(self, code: str) -> None:
        self._code = code

    def set_order(self, order: str) -> None:
        if order not in BYTE_ORDERS:
            raise pickle.UnpicklingError("a number of no byte order")
        self.dtype = np.dtype(order + self._code)


class PickledArray:
    """Stands for numpy.ndarray: keeps the state in the file until all of it was read."""

    state: tuple[Any, ...]

    def __init__(self, *state: Any) -> None:
        self.state = state

    def array(self) -> NDArray[Any]:
        _, shape, kind, is_fortran, content = self.state
        return np.frombuffer(content, kind.dtype).reshape(shape, order="F" if is_fortran else "C")

    def number(self) -> Any:
        """Its one number; the array where it holds several, or text."""
        array = self.array()
        return array.item() if array.size == 1 and array.dtype.kind in "iufb" else array


def _build(unpickler: Any) -> None:
    """BUILD, for the two stand-ins alone: Python's own would write to the functions and classes of the table above."""
    state = unpickler.stack.pop()
    match unpickler.stack[-1]:
        case PickledArray() as array:
            array.state = state
        case _PickledType() as kind:
            kind.set_order(_text(state[1]))
        case other:
            raise pickle.UnpicklingError(f"it sets the state of an object of type {type(other).__name__}")


class ArrayUnpickler(DataUnpickler):
    """Makes stand-ins for NumPy's arrays as well."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = _Opcodes(
        {
            **DataUnpickler.dispatch,
            pickle.BUILD[0]: _build,
            # As bytes: Python's own would claim the memory that is announced, whatever follows.
            pickle.BYTEARRAY8[0]: _standard("BINBYTES8")[1],
        }
    )
    codes = r"\|?u1"
    """Of the numbers that an array may be of, as a pattern."""

    def find_class(self, module: str, name: str) -> Any:
        match module.partition(".")[0], name:
            case "numpy", "_reconstruct":
                return lambda *_: PickledArray()
            case "numpy", "ndarray":
                return PickledArray
            case "numpy", "dtype":
                return self._type
        return super().find_class(module, name)

    def _type(self, code: str | bytes, *_: object) -> Any:
        if not re.fullmatch(self.codes, _text(code)):
            raise pickle.UnpicklingError(f"an array of {_text(code)!r}, where uint8 is expected")
        return _PickledType(_text(code).lstrip("|"))


class _BatchUnpickler(ArrayUnpickler):
    kind = "CIFAR file"


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value
