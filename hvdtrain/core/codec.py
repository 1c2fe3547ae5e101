"""Python values of any nesting as bytes that name no code, and back, into the objects that a program holds.

The format is the standard library's pickle, whose reader here knows the containers of `PLAIN` alone. Arrays are kept
beside it. An object of a program's own class is not made: the place where it was met at the start stands for it.
"""

import collections
import datetime
import enum
import functools
import inspect
import io
import math
import pathlib
import pickle
import types
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import xxhash

PLAIN: tuple[type, ...] = (bool, int, float, complex, list, tuple, dict, set, frozenset)
PLAIN += (collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque)
PLAIN += (pathlib.PosixPath, pathlib.PurePosixPath)
PLAIN += (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
"""The classes that the reader makes; none of them makes more than it is given."""
CODE = types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, np.ufunc
FUNCTIONS = {f"numpy.{name}": getattr(np, name) for name in ("less", "greater", "less_equal", "greater_equal")}
FUNCTIONS |= {"min": min, "max": max, "numpy.minimum": np.minimum, "numpy.maximum": np.maximum}
DTYPES = "biufcSUmM"
"""The kinds of dtypes that their letters describe."""
Key = tuple[str, int]
"""The place where an object was first met, and a number."""


class Refused(Exception):
    """A value that no checkpoint holds; the text is its class."""


class Held:
    """In the place of an object of the program's own, which stays: its key, its class's name, and its state."""

    def __init__(self, key: Key, kind: str) -> None:
        self.key, self.kind, self.state = key, kind, None

    def __setstate__(self, state: list[Any]) -> None:
        (self.state,) = state

    def __call__(self) -> None:
        """As a defaultdict asks of what makes its values."""


class Kinds:
    """What a framework's values are to the codec."""

    functions: Mapping[str, Any] = FUNCTIONS
    """Functions, and other constants, that are kept by name."""
    classes: tuple[type, ...] = ()
    """Further classes that the reader makes."""

    def __init__(self) -> None:
        self.clocks: set[tuple[str, str]] = set()
        """The attributes that are times of this process, which no checkpoint holds, by class and name."""

    def is_clock(self, name: str, value: Any) -> bool:
        """Whether an attribute is a time of this process, which means nothing in the next."""
        return isinstance(value, datetime.datetime)

    def is_users(self, kind: Any) -> bool:
        """Whether a class or function is a program's own, so that what its objects hold is state."""
        return False

    def is_opaque(self, each: Any) -> bool:
        """Whether the object has no state of its own here, as a model, which a checkpoint holds in another way."""
        return isinstance(each, (io.IOBase, np.memmap, enum.Enum, *CODE))

    def array_of(self, each: Any) -> tuple[str, np.ndarray] | None:
        """What a tensor is made of: a word for `of_array`, and its numbers."""

    def of_array(self, word: str, array: np.ndarray) -> Any:
        """The tensor. Raises ValueError for a word that is none."""
        raise ValueError(f"{word} is no tensor")

    def assign(self, now: Any, saved: Any) -> bool:
        """Writes a saved tensor into one that the program holds, where it can."""
        return False

    def state_of(self, each: Any) -> Any:
        """The state of an object that is filled where it is; None where it has none that is known."""
        if isinstance(each, types.FunctionType) and self.is_users(each):
            return self.outside_of(each) or None
        is_other = isinstance(each, (str, bytes, np.ndarray, *PLAIN)) or self.is_opaque(each)
        if is_other or not self.is_users(type(each)):
            return None
        held = self.attributes_of(each)
        found = {name for name, value in held.items() if self.is_clock(name, value)}
        self.clocks |= {(type(each).__name__, name) for name in found}
        return {name: value for name, value in held.items() if name not in found}

    def attributes_of(self, each: Any) -> dict[str, Any]:
        """What the object holds, also in slots."""
        kinds = [kind for kind in type(each).__mro__ if self.is_users(kind)]
        slots = [name for kind in kinds for name, slot in vars(kind).items() if inspect.ismemberdescriptor(slot)]
        return {name: getattr(each, name) for name in slots if hasattr(each, name)} | getattr(each, "__dict__", {})

    def outside_of(self, function: types.FunctionType) -> dict[str, Any]:
        """The lists, dictionaries and sets outside of a function that it uses."""
        try:
            nonlocals, outer, *_ = inspect.getclosurevars(function)
        except ValueError:  # a variable that has no value yet
            return {}
        kinds = list, dict, set, collections.deque
        return {name: each for name, each in {**outer, **nonlocals}.items() if isinstance(each, kinds)}

    def set_state(self, each: Any, state: Any, fill: Callable[[Any, Any], Any]) -> None:
        """Gives such an object its state."""
        if isinstance(each, types.FunctionType):
            for name, now in self.outside_of(each).items():
                fill(now, state.get(name, now))
        else:
            held = self.attributes_of(each)
            for name, value in state.items():
                put(each, name, fill(held.get(name), value))


def put(each: Any, name: str, value: Any) -> None:
    """Gives an object an attribute, in its slot or past what its class does then."""
    if inspect.ismemberdescriptor(getattr(type(each), name, None)):
        setattr(each, name, value)
    else:
        vars(each)[name] = value


class Codec:
    """Encodes and fills values of one program, whose own objects have a key: where they were met at the start."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.known: dict[Key, Any] = {}
        """The objects of the start."""
        self.keys: dict[int, Key] = {}
        """Their keys, by identity."""
        self.roots: set[int] = set()
        """The identities of objects whose state is looked at by itself."""
        self._met = collections.Counter[str]()

    def know(self, each: Any, place: str) -> None:
        """Gives an object a key, if it has none; a member of an enumeration brings the others."""
        for one in type(each) if isinstance(each, enum.Enum) else [each]:
            if id(one) not in self.keys:
                self.keys[id(one)] = key = place, self._met[place]
                self._met[place] += 1
                self.known[key] = one

    def state_of(self, each: Any) -> Any:
        return None if id(each) in self.roots else self.kinds.state_of(each)

    def is_opaque(self, each: Any) -> bool:
        return id(each) in self.roots or self.kinds.is_opaque(each)

    def look(self, value: Any, first: str = "") -> tuple[str, type | None]:
        """A digest of the value, and the class of what no checkpoint holds in it, if there is any. The objects that a
        look at the place `first` meets are those of the start."""
        writer = _Look(self, first)
        try:
            writer.dump(value)
        except Exception as error:  # of any class's own code, or where a thread changes the value
            return "", type(error)
        return writer.digest.hexdigest(), writer.refused

    def encode(self, value: Any) -> np.ndarray:
        """The value as bytes [n]. Raises Refused."""
        writer = _Writer(self)
        try:
            writer.dump(value)
        except Exception as error:
            raise Refused(str(error) if isinstance(error, Refused) else type(error).__name__) from None
        text = writer.text.getvalue()
        return np.concatenate([np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8), *writer.arrays])

    def decode(self, content: np.ndarray) -> Any:
        """The value of which `encode` has made the bytes, where each object of the program's is a Held. Makes only
        the classes of PLAIN. Raises ValueError for other bytes."""
        size = int.from_bytes(content[:8].tobytes(), "little")
        try:
            return _Reader(self.kinds, content[8 : 8 + size].tobytes(), content[8 + size :]).load()
        except Exception as error:  # of any class, as the bytes may be another's
            raise ValueError(f"no values of a program: {' '.join(str(error).split())[:200]}") from None

    def filler(self) -> "_Filler":
        """A function of what there is now and of what was saved, which returns the first with the content of the
        second: lists, dictionaries, sets, arrays and the program's objects stay the same objects where they are of one
        kind and shape, and what was one object is one, over all calls. Raises ValueError."""
        return _Filler(self)


class _Pickler(pickle.Pickler):
    """What looking and writing have in common: arrays stand beside the values, which name no code."""

    def __init__(self, codec: Codec) -> None:
        self.text = io.BytesIO()
        super().__init__(self.text, 5)
        self._codec, self._kinds, self._made = codec, codec.kinds, (*READ, *codec.kinds.classes)
        self._names = {id(each): name for name, each in codec.kinds.functions.items()}
        self._placed: dict[int, tuple[Any, Any]] = {}
        """The arrays that were met, by identity, and what stands for them."""

    def persistent_id(self, each: Any) -> Any:
        kind = type(each)
        if kind in (str, int, float, bool, bytes, list, dict, tuple, set, types.NoneType):
            return None
        if id(each) in self._names:
            return "function", self._names[id(each)]
        if id(each) not in self._placed and (found := self._array(each)) is not None:
            self._placed[id(each)] = each, ("array", len(self._placed), *found)
        return self._placed[id(each)][1] if id(each) in self._placed else None

    def _array(self, each: Any) -> tuple[Any, ...] | None:
        is_numpy = type(each) is np.ndarray or isinstance(each, np.generic)
        word, array = ("", np.asarray(each)) if is_numpy else self._kinds.array_of(each) or ("", None)
        if array is None or (dtype := array.dtype).hasobject or (dtype.kind == "V" and dtype.isbuiltin != 2):
            return None
        name = dtype.str if dtype.kind in DTYPES else dtype.name
        shape = None if isinstance(each, np.generic) else array.shape
        return word, name, shape, self.place(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def place(self, memory: np.ndarray) -> int:
        """Takes an array's bytes; returns where they begin."""
        raise NotImplementedError

    def reducer_override(self, each: Any) -> Any:
        if type(each) in self._made or any(each is one for one in self._made):
            return NotImplemented
        if type(each) is np.ndarray and each.dtype.kind == "O":
            return objects, (each.shape, each.ravel().tolist())
        return self.reduced(each)

    def reduced(self, each: Any) -> Any:
        """What stands for an object of another class."""
        raise NotImplementedError

    def held(self, each: Any, key: Any) -> Any:
        state = self._codec.state_of(each)
        return (Held, (key, type(each).__qualname__)) + (() if state is None else ([state],))

    def content(self, each: Any) -> Any:
        """What the object reduces to; None where it is itself or another one, without content that could be read."""
        if isinstance(each, types.GeneratorType):  # where it has come to
            return list, ([each.gi_frame.f_lasti, dict(each.gi_frame.f_locals)] if each.gi_frame else [],)
        try:
            found = None if self._codec.is_opaque(each) else each.__reduce_ex__(4)
        except Exception:  # of any class's own
            return None
        return found if isinstance(found, tuple) else None


class _Writer(_Pickler):
    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.arrays: list[np.ndarray] = []
        self._size = 0

    def place(self, memory: np.ndarray) -> int:
        begin, self._size = self._size, self._size + memory.nbytes
        self.arrays.append(memory)
        return begin

    def reduced(self, each: Any) -> Any:
        key = self._codec.keys.get(id(each))
        if key is None or (self._codec.state_of(each) is None and self.content(each) is not None):
            raise Refused(type(each).__name__)
        return self.held(each, key)


class _Look(_Pickler):
    """Reads what a program's objects hold."""

    def __init__(self, codec: Codec, first: str) -> None:
        super().__init__(codec)
        self.digest, self.refused, self._first = xxhash.xxh3_128(), cast(type | None, None), first

    def dump(self, value: Any) -> None:
        super().dump(value)
        self.digest.update(self.text.getbuffer())

    def place(self, memory: np.ndarray) -> int:
        self.digest.update(memory.data)
        return 0

    def reduced(self, each: Any) -> Any:
        if self._codec.state_of(each) is None and (content := self.content(each)) is not None:
            self.refused = self.refused or type(each)
            return content
        if self._first:
            self._codec.know(each, self._first)
        elif id(each) not in self._codec.keys:
            self.refused = self.refused or type(each)
        return self.held(each, id(each))


def objects(shape: tuple[int, ...], items: list[Any]) -> np.ndarray:
    """The array of objects, as of texts."""
    found = np.empty(len(items), object)
    found[:] = items
    return found.reshape(shape)


READ: tuple[Any, ...] = (*PLAIN, Held, objects)
"""All that the reader calls, beside the classes of a framework."""
DEFINED = collections.Counter, pathlib.PosixPath, pathlib.PurePosixPath, Held, objects


class _Reader(pickle.Unpickler):
    def __init__(self, kinds: Kinds, text: bytes, memory: np.ndarray) -> None:
        super().__init__(io.BytesIO(text))
        self._kinds, self._memory = kinds, memory
        named = {f"{each.__module__}.{each.__qualname__}": each for each in (*READ, *kinds.classes)}
        # What Python code defines could be given other attributes.
        self._made = {name: functools.partial(each) if each in DEFINED else each for name, each in named.items()}
        self._arrays: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._made.get(f"{module}.{name}")) is None:
            raise ValueError(f"{module}.{name} is none of the classes that a checkpoint holds")
        return found

    def persistent_load(self, found: Any) -> Any:
        if found[0] == "function":
            return self._kinds.functions[found[1]]
        _, number, word, name, shape, begin = found
        if number not in self._arrays:
            dtype = np.dtype(name)
            if dtype.hasobject or begin < 0 or any(size < 0 for size in shape or ()):
                raise ValueError(f"an array of {name}")
            memory = self._memory[begin : begin + math.prod(shape or ()) * dtype.itemsize]
            array = np.frombuffer(memory.tobytes(), dtype).reshape(shape or ()).copy()
            self._arrays[number] = array[()] if shape is None else self._kinds.of_array(word, array) if word else array
        return self._arrays[number]


class _Filler:
    def __init__(self, codec: Codec) -> None:
        self._codec, self._made, self._used = codec, dict[int, Any](), dict[int, Any]()

    def __call__(self, now: Any, saved: Any) -> Any:
        if id(saved) not in self._made:
            is_free = type(now) is type(saved) and id(now) not in self._used
            self._used[id(now)] = now
            self._made[id(saved)] = self._filled(now if is_free else None, saved), saved  # which keeps its identity
        return self._made[id(saved)][0]

    def _filled(self, now: Any, saved: Any) -> Any:
        found = saved
        if isinstance(saved, Held):
            found = self._held(saved)
        elif isinstance(saved, dict | list | collections.deque | set):
            found = self._container(now, saved)
        elif isinstance(saved, tuple):
            found = tuple(self(*pair) for pair in zip_longest((now or ())[: len(saved)], saved))
        elif isinstance(saved, frozenset):
            found = frozenset(self(None, each) for each in saved)
        elif isinstance(saved, np.ndarray) and now is not None and now.flags.writeable:
            if (now.shape, now.dtype) == (saved.shape, saved.dtype):
                now[...], found = saved, now
        elif now is not None and self._codec.kinds.assign(now, saved):
            found = now
        return found

    def _container(self, now: Any, saved: Any) -> Any:
        if isinstance(saved, collections.defaultdict):
            saved.default_factory = self(None, saved.default_factory)
        found = saved if now is None or _settings(now) != _settings(saved) else now
        self._made[id(saved)] = found, saved  # before what is inside, which may hold it
        if isinstance(saved, dict):
            known, pairs = dict(now or ()), list(saved.items())
            found.clear()
            for key, value in pairs:
                found[self(None, key)] = self(known.get(key), value)
            return found
        values = list(zip_longest(() if isinstance(saved, set) else list(now or ())[: len(saved)], saved))
        found.clear()
        for pair in values:
            (found.add if isinstance(saved, set) else found.append)(self(*pair))
        return found

    def _held(self, saved: Held) -> Any:
        found = self._codec.known.get(saved.key)
        if type(found).__qualname__ != saved.kind:
            raise ValueError(f"there is no {saved.kind} at the start where there was one")
        self._made[id(saved)] = found, saved
        if saved.state is not None:
            self._codec.kinds.set_state(found, saved.state, self)
        return found


def _settings(container: Any) -> tuple[Any, ...]:
    """What a container does beside holding values."""
    return getattr(container, "maxlen", None), getattr(container, "default_factory", None)
