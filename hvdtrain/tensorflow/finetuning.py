"""Fine-tuning in TensorFlow: a model begins with given weights, and parts of it learn apart."""

import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from hvdtrain import files
from hvdtrain.core import network
from hvdtrain.core.recipe import Recipe, finetuning
from hvdtrain.ranks.stacks import takes_long
from hvdtrain.run import weights
from hvdtrain.tensorflow import models, networks, private, state
from hvdtrain.untrusted import printable

OF_KERAS = "model.weights.h5"
"""The file of weights in an archive of Keras's."""


@takes_long
def start(recipe: Recipe, model: keras.Model) -> str:
    """Gives the model the weights that `init_from` names. Returns a line for the log. Rank 0 alone calls it.

    Raises HvdtrainError where the file cannot be read, or does not fit the model.
    """
    source = files.expanded(str(recipe.init_from), "init_from")
    live = _live(model)
    held = set(map(id, models.held_variables(model).values()))
    seeds = {name for name in live if name.endswith(networks.SEED)}
    with weights.explained(source), _found(source, model) as (found, where, has_held):
        own = {name: each for name, each in live.items() if name not in seeds and (has_held or id(each) not in held)}
        theirs = {name: f"{_kind(each.dtype)} {list(each.shape)}" for name, each in found.items() if name not in seeds}
        ours = {name: f"{_kind(np.dtype(each.dtype.as_numpy_dtype))} {list(each.shape)}" for name, each in own.items()}
        taken = weights.assigned(recipe, ours, theirs, {})
        for name, there in taken.items():
            own[name].assign(tf.cast(np.asarray(found[there]), own[name].dtype))
    models.refresh(model)
    return weights.line(taken, own, where)


def _live(model: keras.Model) -> dict[str, tf.Variable]:
    """The model's variables by their names in patterns."""
    own = f"model.{model.name}."
    return {name.removeprefix(own).removeprefix("model."): each for name, each in state.of_model(model).items()}


def _kind(dtype: np.dtype[Any]) -> str:
    return "float" if dtype.kind == "f" or dtype.name == "bfloat16" else dtype.name


@contextlib.contextmanager
def _found(source: str, model: keras.Model) -> Iterator[tuple[Mapping[str, Any], str, bool]]:
    """The arrays by name, where they are from, in words, and whether variables of layers' own are among them."""
    path = Path(source)
    if ours := weights.checkpoint_of(source, "tensorflow"):
        by_kind: dict[str, dict[str, np.ndarray]] = {"model": {}, "ema": {}}
        for name, array in ours[0].arrays.items():
            kind, _, rest = name.partition(".")
            by_kind.get(kind, {})[rest] = array
        which = "averaged weights" if by_kind["ema"] else "weights"
        found = by_kind["model"] | by_kind["ema"]
        yield _without_model(found, model), f"the {which} of {ours[1]}", True
        return
    shown = printable(str(path), 200)
    if path.suffix == ".safetensors":
        yield _without_model(weights.safetensors(path, "np"), model), shown, True
        return
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(weights.opened(path))
        if path.suffix == ".keras":
            archive = stack.enter_context(zipfile.ZipFile(file))
            if archive.getinfo(OF_KERAS).compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its {OF_KERAS} is compressed, which Keras's is not")
            file = stack.enter_context(archive.open(OF_KERAS))
        whole = stack.enter_context(h5py.File(file, "r"))
        yield _named(_datasets(whole), model), shown, False


def _without_model(found: Mapping[str, Any], model: keras.Model) -> dict[str, Any]:
    """The arrays without the name of the model that Keras may put before all names."""
    first = {name.partition(".")[0] for name in found}
    is_model = len(first) == 1 and not any(name.partition(".")[0] in first for name in _live(model))
    return {name.partition(".")[2] if is_model else name: each for name, each in found.items()}


def _datasets(whole: Any) -> dict[str, Any]:
    """The arrays of a file of HDF5 by path. No link is followed, and no other file is read. Raises ValueError."""
    found: dict[str, Any] = {}

    def note(name: str, each: Any) -> None:
        if isinstance(each, h5py.Dataset):
            if each.is_virtual or each.external:
                raise ValueError(f"{printable(name)} lies in another file")
            found[name] = each

    whole.visititems(note)
    return found


def _named(found: Mapping[str, Any], model: keras.Model) -> dict[str, Any]:
    """The arrays of Keras's file by the names of the model's weights, where it has one at the same place."""
    names = {id(each): name for name, each in _live(model).items()}
    places = {path: names[id(each.value)] for path, each in private.places(model).items() if id(each.value) in names}

    def name(path: str) -> str:
        # A path has the layer's class, in the place of which a recipe may have one of ours; of Keras 2 its name, twice.
        ours = path if path in places else path.replace("batch_normalization", "batch_norm")
        return places.get(ours) or re.sub(r"^(?:.*/)?([^/]+/[^/]+):0$", r"\1", path).replace("/", ".")

    return {name(path): each for path, each in found.items()}


class Learning:
    """Which of a model's weights learn in which epoch. BatchNorm whose weights are frozen takes its running statistics,
    and leaves them as they are."""

    def __init__(self, recipe: Recipe, model: keras.Model) -> None:
        """Freezes what is frozen at the start."""
        self._until = recipe.freeze_until_epoch
        named = {networks.short(model, weight.path): weight for weight in model.trainable_weights}
        parts = finetuning.parts(recipe, named, networks.norm_weights(model))
        for name, weight in named.items():
            weight.trainable = not (parts[name].is_frozen and self._until is None)
        ever = {name: weight for name, weight in named.items() if weight.trainable}
        self.all, self.parts = list(ever.values()), [parts[name] for name in ever]
        """The weights that ever learn, and how."""
        norms = networks.batch_norm_layers(model)
        frozen = finetuning.frozen_modules(recipe, norms, network.NORM_LEAVES["tensorflow"])
        self._norms = [norms[name] for name in norms if name in frozen]
        self.now: list[int] = []
        """The indices of those that learn now."""
        self.enter(0)

    @property
    def learning(self) -> list[keras.Variable]:
        """The weights that learn now."""
        return [self.all[index] for index in self.now]

    def enter(self, epoch: int) -> bool:
        """Freezes or thaws them for that epoch. Returns whether that changes what learns."""
        is_frozen, before = self._until is None or epoch < self._until, self.now
        for norm in self._norms:
            norm.trainable = not is_frozen
        self.now = [index for index, part in enumerate(self.parts) if not (part.is_frozen and is_frozen)]
        return self.now != before
