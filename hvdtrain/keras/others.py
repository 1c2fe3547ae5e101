"""What stands beside a callback of ours in `fit`: Keras's call, the other callbacks, and what those count.

A module of its own, as `callbacks` and `program` both need it.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
from keras.callbacks import CSVLogger, ProgbarLogger, SwapEMAWeights, TensorBoard

PREFIX, WEIGHTS = "callbacks.", "best_weights"
"""Of arrays in a checkpoint; the one attribute that is kept as arrays."""
NOT_KEPT = {"params", "_params", "min_delta", "_model", WEIGHTS}
"""Attributes that are Keras's to set; it turns the sign of min_delta once in each process."""
LONGEST = 1 << 16
"""Characters of an attribute."""


def call_of(model: keras.Model, name: str) -> Mapping[str, Any]:
    """The variables of the model's method of that name, which is under way; none where it is not."""
    return next((each.f_locals for each in _frames() if each.f_code.co_name == name and _self(each) is model), {})


def list_of(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList:
    """The list with this callback, which calls it; one of its own where that is not Keras's."""
    lists = (each for each in map(_self, _frames()) if isinstance(each, keras.callbacks.CallbackList))
    return next((each for each in lists if callback in each.callbacks), keras.callbacks.CallbackList([callback]))


class Others:
    """The callbacks of a `fit` that are not ours, by class and number, as "EarlyStopping 0". Of each is kept what JSON
    can say and has changed since its training began, and EarlyStopping's best weights."""

    def __init__(self, callbacks: list[keras.callbacks.Callback]) -> None:
        seen: Counter[str] = Counter()
        self.by_name: dict[str, keras.callbacks.Callback] = {}
        for each in callbacks:
            kind = type(each).__name__
            if not isinstance(each, ProgbarLogger | SwapEMAWeights | TensorBoard):  # whose state is a process's
                self.by_name[f"{kind} {seen[kind]}"] = each
            seen[kind] += 1
        self._first: dict[str, dict[str, str]] = {}

    def begin(self, texts: Mapping[str, Mapping[str, str]], arrays: Mapping[str, np.ndarray]) -> None:
        """All have begun to train: they take what a checkpoint has of them."""
        self._first = {name: _texts(each) for name, each in self.by_name.items()}
        for name in self.by_name.keys() & texts.keys():
            own, each = self._first[name], self.by_name[name]
            for attribute in (key for key in texts[name] if key in own or not hasattr(each, key)):
                setattr(each, attribute, json.loads(texts[name][attribute]))
            if paths := sorted(path for path in arrays if path.startswith(f"{PREFIX}{name}.")):
                setattr(each, WEIGHTS, [arrays[path] for path in paths])

    def texts(self) -> dict[str, dict[str, str]]:
        """As JSON what has changed, by callback and attribute."""
        return {
            name: {key: text for key, text in _texts(each).items() if self._first.get(name, {}).get(key) != text}
            for name, each in self.by_name.items()
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The best weights, by name in a checkpoint."""
        found = {name: getattr(each, WEIGHTS, None) or [] for name, each in self.by_name.items()}
        return {f"{PREFIX}{name}.{i:06}": np.array(each) for name, of in found.items() for i, each in enumerate(of)}

    def stopped_by(self) -> str:
        """What has ended the training early."""
        found = (name.partition(" ")[0] for name, each in self.by_name.items() if getattr(each, "stopped_epoch", 0))
        return ", ".join(found) or "model.stop_training was set"

    def unkept(self) -> list[str]:
        """What no checkpoint holds, a line each."""
        lines = []
        for name, each in self.by_name.items():
            own = {} if type(each).__module__.startswith("keras.") else vars(each)
            known = {*_texts(each), *NOT_KEPT}
            if more := [k for k, value in own.items() if not (k in known or callable(value) or _is_path(value))]:
                lines.append(f"no checkpoint holds {', '.join(more)} of {name.partition(' ')[0]}: it begins anew")
            if isinstance(each, CSVLogger) and not each.append:
                lines.append("CSVLogger begins its file anew after a resume; CSVLogger(..., append=True) continues it")
        return lines


def _texts(callback: keras.callbacks.Callback) -> dict[str, str]:
    """As JSON the attributes that it can say, but for paths."""
    found = {}
    for name, value in vars(callback).items():
        try:
            text = "" if name in NOT_KEPT or _is_path(value) else json.dumps(value, default=_number)
        except (TypeError, ValueError):
            continue
        if 0 < len(text) < LONGEST:
            found[name] = text
    return found


def _number(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def _frames() -> list[FrameType]:
    found, frame = [], sys._getframe(2)
    while frame:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _self(frame: FrameType) -> Any:
    return frame.f_locals.get("self")
