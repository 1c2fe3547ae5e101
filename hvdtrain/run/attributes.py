"""What a program's objects keep in attributes, as callbacks do: in checkpoints, or named."""

import collections
import io
import random
import re
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.codec import Codec, Kinds, Refused, put
from hvdtrain.errors import OTHER_FOLDER, CheckpointError
from hvdtrain.ranks.stacks import is_users

STARTED = time.perf_counter()
LONGEST_JOB = 30 * 24 * 3600
"""Seconds; a number that is this close to now is a time."""
CLOCK = re.compile("time|start|began|begin|clock|since|(^|_)t(ic|0)$", re.IGNORECASE)
IN_MEMORY: tuple[Any, ...] = io.StringIO, io.BytesIO
STATES: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    np.random.Generator: (
        lambda each: each.bit_generator.state,
        lambda each, of: setattr(each.bit_generator, "state", of),
    ),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    **{kind: (kind.__getstate__, kind.__setstate__) for kind in IN_MEMORY},
}
"""How the state of objects of these classes is read, and set."""


class ProgramKinds(Kinds):
    """Knows the classes that are a program's own by the file that they are in, and those of STATES."""

    def is_clock(self, name: str, value: Any) -> bool:
        if type(value) is not float:
            return super().is_clock(name, value)
        is_counter = CLOCK.search(name) is not None and STARTED < value <= time.perf_counter()
        return is_counter or 0 <= time.time() - value < LONGEST_JOB

    def state_of(self, each: Any) -> Any:
        found = next((read for kind, (read, _) in STATES.items() if isinstance(each, kind)), super().state_of)
        return found(each)

    def set_state(self, each: Any, state: Any, fill: Callable[[Any, Any], Any]) -> None:
        for assign in (assign for kind, (_, assign) in STATES.items() if isinstance(each, kind)):
            assign(each, state)
            return
        super().set_state(each, state, fill)

    def is_users(self, kind: Any) -> bool:
        module = sys.modules.get(kind.__module__)
        return is_users(getattr(module, "__file__", None) or "<" * (kind.__module__ != "__main__"))

    def is_opaque(self, each: Any) -> bool:
        return type(each).__module__.startswith("hvdtrain.") or super().is_opaque(each)


SHARED = list, dict, set, collections.deque, np.ndarray, int, float, str, tuple, types.NoneType
"""What is state where a class holds it."""
GONE = ""
"""In the place of a name: those of the attributes that were there when training began."""


class Attributes:
    """The attributes of objects, by the objects' names, that have changed since training began."""

    def __init__(self, objects: Mapping[str, Any], kinds: Kinds, is_left_out: Callable[[Any, str], bool]) -> None:
        """`is_left_out`: of an object and an attribute that is no state, or belongs to a process."""
        self._objects, self._codec, self._is_left_out = objects, Codec(kinds), is_left_out
        self._first: dict[str, dict[str, str]] = {}
        """Digests of all attributes when training began."""
        self._named = set[tuple[str, str]]()
        self._lines: list[str] = []

    def begin(self) -> None:
        """Notes what the objects hold now, as training begins."""
        for name, each in self._objects.items():
            self._codec.know(each, name)
            self._codec.roots.add(id(each))
        for name, each in self._objects.items():  # what a class holds may become an attribute
            self._codec.look(self._of_classes(each), f"{name}.")
        self._first = {
            name: {key: self._codec.look(value, f"{name}.{key}")[0] for key, value in self._held(each).items()}
            for name, each in self._objects.items()
        }

    def give_back(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Gives the objects the attributes of a checkpoint, in place where that is possible."""
        fill = self._codec.filler()
        for name in [each for each in self._objects if each in saved]:
            each = self._objects[name]
            kinds, held = {_path(kind): kind for kind in self._kinds(each)}, self._held(each)
            for key in set(saved[name].get(GONE, ())) & vars(each).keys():
                delattr(each, key)
            for key, value in ((key, value) for key, value in saved[name].items() if key != GONE):
                kind, _, attribute = key.rpartition(".")
                owner, now = kinds.get(kind, each), held.get(key)
                try:
                    found = fill(now, value)
                    if owner is not each:
                        setattr(owner, attribute, found)
                    elif found is not now or key in vars(each):
                        put(each, key, found)
                except ValueError as error:
                    self._name(name, key, str(error))

    def encode(self, more: Mapping[str, Any]) -> np.ndarray:
        """Bytes [n] of the attributes that have changed, and of further values, for `decode`. Names, in `lines`, the
        attributes that no checkpoint holds."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self._first}
        for name, before in self._first.items():
            held = self._held(self._objects[name])
            if gone := sorted(key for key in before.keys() - held.keys() if "." not in key and key[0] != "_"):
                found[name][GONE] = gone
            for key, value in held.items():
                digest, refused = self._codec.look(value)
                if digest == before.get(key):
                    continue
                if self._codec.kinds.is_clock(key, value):
                    self._name(name, key, "it is a time of this process")
                elif refused:
                    if not issubclass(refused, io.IOBase) or issubclass(refused, IN_MEMORY):
                        self._name(name, key, f"it holds a {refused.__name__}")
                else:
                    found[name][key] = value
        for name, key in self._codec.kinds.clocks:
            self._name(name, key, "it is a time of this process")
        try:
            return self._codec.encode((found, dict(more)))
        except Refused as error:  # a thread has changed them meanwhile
            self._lines.append(f"this checkpoint holds no attributes of callbacks, as they changed meanwhile: {error}")
            return self._codec.encode(({}, dict(more)))

    def decode(self, content: np.ndarray) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """The attributes, for `give_back`, and the further values. Raises CheckpointError."""
        try:
            found, more = self._codec.decode(content)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint holds {error}", remedy=OTHER_FOLDER) from None
        return found, more

    def lines(self) -> list[str]:
        """A line for each attribute that was found, since the call before, to begin anew after a resume."""
        self._lines, found = [], self._lines
        return found

    def _held(self, each: Any) -> dict[str, Any]:
        """The attributes, also those in slots; by the class's name and theirs, those that a class holds."""
        held = {
            f"{_path(kind)}.{name}": value
            for kind in self._kinds(each)
            for name, value in vars(kind).items()
            if isinstance(value, SHARED) and name[:2] != "__"
        }
        held |= self._codec.kinds.attributes_of(each)
        return {name: value for name, value in held.items() if not self._is_left_out(each, name)}

    def _kinds(self, each: Any) -> list[Any]:
        """The program's own classes of the object, the base first."""
        return [kind for kind in type(each).__mro__[::-1] if self._codec.kinds.is_users(kind)]

    def _of_classes(self, each: Any) -> dict[str, Any]:
        """What the program's own classes of the object hold."""
        kinds = self._kinds(each)
        return {name: value for kind in kinds for name, value in vars(kind).items() if name[:2] != "__"}

    def _name(self, name: str, key: str, reason: str) -> None:
        if (name, key) not in self._named:
            self._named.add((name, key))
            self._lines.append(
                f"no checkpoint holds {key.rpartition('.')[2]} of {name.partition(' ')[0]}, {reason}: it begins anew"
            )


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
