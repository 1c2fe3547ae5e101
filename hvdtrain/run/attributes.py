"""What a program's objects keep in attributes, as callbacks do: in checkpoints, or named."""

import collections
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.core.codec import Codec, Kinds, Refused, put
from hvdtrain.errors import CheckpointError
from hvdtrain.ranks.stacks import is_users


class ProgramKinds(Kinds):
    """Knows the classes that are a program's own by the file that they are in."""

    def is_users(self, kind: Any) -> bool:
        module = sys.modules.get(kind.__module__)
        return is_users(getattr(module, "__file__", None) or "<" * (kind.__module__ != "__main__"))

    def is_opaque(self, each: Any) -> bool:
        return type(each).__module__.startswith("hvdtrain.") or super().is_opaque(each)


NUMBERS = bool, int, float, complex, str, bytes, tuple, type(None)
SHARED = list, dict, set, collections.deque, np.ndarray


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
            each, own = self._objects[name], self._codec.kinds.attributes_of(self._objects[name])
            kinds = {kind.__qualname__: kind for kind in self._classes(each)}
            for key, value in saved[name].items():
                kind, _, of_class = key.rpartition(".")
                try:
                    now = getattr(each, of_class, None)
                    if (found := fill(now, value)) is not now and kind in kinds:
                        setattr(kinds[kind], of_class, found)
                    elif found is not now or key in own:
                        put(each, key, found)
                except ValueError as error:
                    self._name(name, key, str(error))

    def encode(self, more: Mapping[str, Any]) -> np.ndarray:
        """Bytes [n] of the attributes that have changed, and of further values, for `decode`. Names, in `lines`, the
        attributes that no checkpoint holds."""
        found: dict[str, dict[str, Any]] = {name: {} for name in self._first}
        for name, before in self._first.items():
            for key, value in self._held(self._objects[name]).items():
                digest, refused = self._codec.look(value)
                if digest == before.get(key):
                    continue
                if self._codec.kinds.is_clock(key, value):
                    self._name(name, key, "it is a time of this process")
                elif refused:
                    if not issubclass(refused, io.IOBase):
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
            raise CheckpointError(f"the checkpoint holds {error}; give another folder.") from None
        return found, more

    def lines(self) -> list[str]:
        """A line for each attribute that was found, since the call before, to begin anew after a resume."""
        self._lines, found = [], self._lines
        return found

    def _held(self, each: Any) -> dict[str, Any]:
        """The attributes; also the lists and the like that the program's own classes of the object hold, and as
        "Class.name" their numbers and texts."""
        shared = self._of_classes(each).items()
        found: dict[str, Any] = {name: value for name, value in shared if isinstance(value, SHARED)}
        found |= self._codec.kinds.attributes_of(each)
        for kind in self._classes(each):
            named = {f"{kind.__qualname__}.{name}": value for name, value in vars(kind).items() if name[:2] != "__"}
            found |= {name: value for name, value in named.items() if isinstance(value, NUMBERS)}
        return {name: value for name, value in found.items() if not self._is_left_out(each, name)}

    def _of_classes(self, each: Any) -> dict[str, Any]:
        """What the program's own classes of the object hold."""
        found = [vars(kind).items() for kind in self._classes(each)[::-1]]
        return {name: value for items in found for name, value in items if name[:2] != "__"}

    def _classes(self, each: Any) -> list[type]:
        return [kind for kind in type(each).__mro__ if self._codec.kinds.is_users(kind)]

    def _name(self, name: str, key: str, reason: str) -> None:
        if (name, key) not in self._named:
            self._named.add((name, key))
            self._lines.append(f"no checkpoint holds {key} of {name.partition(' ')[0]}, {reason}: it begins anew")
