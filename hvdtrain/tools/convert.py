"""`python -m hvdtrain convert RUN --to FRAMEWORK`: a run's newest checkpoint for the other framework."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic

from hvdtrain import files
from hvdtrain.core import flags, network, optimizers, user_code
from hvdtrain.core import recipe as recipes
from hvdtrain.core.flags import Flag
from hvdtrain.core.network import ALONE, EMBEDDING, KERNEL, NORM
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.values import parsed
from hvdtrain.engines.frameworks import LIBRARIES
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import CheckpointError, OutputError, RecipeError
from hvdtrain.record import checkpoint, reader
from hvdtrain.record import folder as folders
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.terminal import Status
from hvdtrain.untrusted import one_line, printable

Framework = Literal["torch", "tensorflow"]
Named = tuple[str, np.ndarray]

ONLY = {"torch": ("compile", "data_on_device"), "tensorflow": ("xla",)}
"""Switches of a recipe that one framework alone has."""
TO_TENSORFLOW = {2: (1, 0), 4: (2, 3, 1, 0)}
"""The order of a kernel's axes in TensorFlow, as indices of PyTorch's, by the number of axes."""
TO_TORCH = {2: (1, 0), 4: (3, 2, 0, 1)}
STEP = "step"  # PyTorch keeps one for each parameter, TensorFlow one for all
BATCHES = "num_batches_tracked"  # PyTorch counts them, but with a fixed momentum never reads them


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Turns a run's newest checkpoint into one that the other framework continues from."""

    run: Annotated[Path, Flag(help="run folder, as runs/digits/2026-11-20_15-33-02", is_positional=True)]
    to: Annotated[Framework, Flag("the framework to convert to")]
    output: Annotated[Path | None, Flag("new run folder; left out: RUN-torch or RUN-tensorflow")] = None


def main(argv: Sequence[str]) -> int:
    """Writes the new run folder and prints the command that continues from it. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain convert", argv)
    with Status(f"reading the newest checkpoint of {printable(str(options.run))}"):
        state, damaged = checkpoint.newest(options.run / "checkpoints")
    print("".join(f"{line} The one before it is tried.\n" for line in damaged), end="")
    if state is None:
        raise CheckpointError(f"{options.run} holds no whole checkpoint; give the folder of a run that wrote one.")
    run = options.run.resolve() if options.run.name in {"", ".."} else options.run
    target = options.output or run.with_name(f"{run.name}-{options.to}")
    if target.is_symlink() and not options.output:
        raise OutputError(f"{target} is a link, which may lead elsewhere; remove it, or give --output.")
    with Status(f"converting step {state.meta['step']} for {options.to}"):
        source = reader.read(options.run, recent=True)
        recipe = _recipe(source, state, options.to)
        left_out = {key: "True" for key in ONLY[state.meta["framework"]] if getattr(recipe, key)}
        engines = (engine for engine in ENGINES.values() if options.to in engine.classes)
        if not any(recipe.compression in engine.compressions(options.to) for engine in engines):
            left_out["compression"] = recipe.compression
        recipe = recipe.model_copy(update={key: Recipe.model_fields[key].default for key in left_out})
        of_target = converted(state, options.to, 1 + bool(recipe.no_weight_decay))
        _check_arrays(state.arrays if options.to == "tensorflow" else of_target.arrays, recipe)
        _write(source, target, of_target, recipe)
    print(f"step {state.meta['step']} of {options.run}, for {options.to}: {target}")
    for key, value in left_out.items():
        print(f"left out, as {options.to} has none: {key} {value}")
    command = ["python", "-m", f"hvdtrain.{options.to}", str(target / "recipe.yaml"), "--output", str(target)]
    print(f"continue with: {shlex.join(command)}")
    return 0


def _recipe(source: reader.RecordedRun, state: Checkpoint, to: Framework) -> Recipe:
    """The run's recipe. Raises CheckpointError where the framework `to` could not train it from the checkpoint."""
    theirs = state.meta.get("framework")
    if theirs not in ONLY or not isinstance(state.meta.get("recipe"), str):
        raise CheckpointError(
            f"the checkpoint of step {state.meta['step']} names no framework and recipe of ours; give another run."
        )
    if theirs == to:
        raise CheckpointError(f"the checkpoint of step {state.meta['step']} is {to}'s already: nothing to convert.")
    recipe = recipe_of(source, state.meta["recipe"])
    users = (f"{key} {path} is {LIBRARIES[theirs]} code" for key, path in recipes.named_by(recipe).items())
    is_other = recipe.model not in user_code.MODELS
    plain = {*recipe.no_weight_decay} in ({"norm"}, {"bias", "norm"}, set())  # which mean the same in both
    has_parts = recipe.freeze or recipe.lr_scale or not plain
    other = f"model {recipe.model} is another one in {LIBRARIES[to]}" if is_other else ""
    parts = "the patterns of freeze, lr_scale and no_weight_decay are names of its own" if has_parts else ""
    if why := next(users, other or parts):
        raise CheckpointError(
            f"{source.path} cannot be converted: {why}; recipes with model {', '.join(user_code.MODELS)} and no code "
            f"of your own can. Train on with hvdtrain.{theirs}, or anew with hvdtrain.{to}."
        )
    return recipe


def recipe_of(source: reader.RecordedRun, name: str) -> Recipe:
    """The recipe of that name that the run has trained. Raises RecipeError where its folder does not show it."""
    if gap := next((gap for gap in source.gaps if gap.name in {"recipe.yaml", "plan.json"}), None):
        raise RecipeError(f"{source.path}: {gap.line}; give another run.")
    path = source.path / "recipe.yaml"
    entries = parsed(str(path), source.recipe_text)
    if not isinstance(entries, dict) or not isinstance(keys := entries.get("default"), dict):
        raise RecipeError(f"{path} must hold named entries, default among them; give another run.")
    return recipes.validate({**keys, "name": name})


def _check_arrays(arrays: Mapping[str, np.ndarray], recipe: Recipe) -> None:
    """Raises CheckpointError where the recipe's network and optimizer have other arrays, by PyTorch's names."""
    of_classes = (arrays[name].shape[:1] for name in ("model.fc.bias", "model.wte.weight") if name in arrays)
    trained, statistics = network.weights(recipe, *next(of_classes, ()) or (0,))
    optimizer = optimizers.settings(recipe)
    slots = ["model", *optimizer.slots, *(["ema"] if recipe.ema_decay else [])]
    wanted = {f"{slot}.{name}": shape for slot in slots for name, shape in trained.items()}
    wanted |= {f"model.{name}": shape for name, shape in statistics.items()}
    wanted |= {f"{STEP}.{name}": () for name in trained if optimizer.has_step}
    found = {name: array.shape for name, array in arrays.items()}
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            theirs, ours = (list(of[name]) if name in of else "missing" for of in (found, wanted))
            raise CheckpointError(
                f"{printable(name, 200)} of the checkpoint is {theirs}, of model {recipe.model} with optimizer "
                f"{recipe.optimizer} {ours}; give another run."
            )


def converted(state: Checkpoint, to: Framework, parts: int = 1) -> Checkpoint:
    """The same state with the names and layouts of the framework `to`; in TensorFlow so many parts of the model count
    their updates.

    Raises CheckpointError where no network of hvdtrain's has such arrays.
    """
    try:
        to_tensorflow, step = to == "tensorflow", state.meta["step"]
        pairs = list(_to_tensorflow(state.arrays, parts) if to_tensorflow else _to_torch(state.arrays, step))
        if len(arrays := dict(pairs)) < len(pairs):
            raise KeyError("two of one name")
    except KeyError as error:
        what = f"arrays that no model of hvdtrain has ({one_line(error, 200)})"
        raise CheckpointError(f"the checkpoint has {what}.") from None
    return Checkpoint(arrays, {**state.meta, "framework": to})


def _to_tensorflow(arrays: Mapping[str, np.ndarray], parts: int) -> Iterator[Named]:
    norms = network.norms_of({name[6:]: each.shape for name, each in arrays.items() if name.startswith("model.")})
    steps = [array for name, array in arrays.items() if name.startswith(f"{STEP}.")]
    if any(not np.array_equal(steps[0], step) for step in steps):
        raise CheckpointError(
            "the optimizer's steps differ between parameters, TensorFlow keeps one; give another run."
        )
    yield from ((f"{STEP}@{part}" if part else STEP, step) for part in range(parts) for step in steps[:1])
    for name, array in arrays.items():
        kind, _, path = name.partition(".")
        if path.rpartition(".")[2] != BATCHES and kind != STEP:
            made = network.in_tensorflow(path, norms)
            yield f"{kind}.{made}", array if made.endswith(EMBEDDING["weight"]) else _transposed(array, TO_TENSORFLOW)


def _to_torch(arrays: Mapping[str, np.ndarray], step: int) -> Iterator[Named]:
    leaves = {theirs: ours for table in (NORM, KERNEL, EMBEDDING) for ours, theirs in table.items()}
    slots = (name.partition(".")[0] for name in arrays if not name.startswith(("model.", "ema.", STEP)))
    beside = next(slots, "model") if STEP in arrays else ""
    for name, array in arrays.items():
        if name.partition("@")[0] == STEP:
            continue
        kind, module, leaf = _split(name)
        prefix = f"{kind}." if module == ALONE else f"{kind}.{module}."
        yield prefix + leaves[leaf], array if leaf == EMBEDDING["weight"] else _transposed(array, TO_TORCH)
        if kind == beside:
            yield f"{STEP}{prefix.removeprefix(kind)}{leaves[leaf]}", arrays[STEP]
        if leaf == "moving_mean":
            yield prefix + BATCHES, np.array(step, np.int64)


def _split(name: str) -> tuple[str, str, str]:
    """`exp_avg.layer1.0.conv1.weight` -> exp_avg, layer1.0.conv1, weight."""
    kind, _, path = name.partition(".")
    module, _, leaf = path.rpartition(".")
    return kind, module, leaf


def _transposed(array: np.ndarray, orders: Mapping[int, tuple[int, ...]]) -> np.ndarray:
    return array.transpose(orders[array.ndim]) if array.ndim in orders else array


def _write(source: reader.RecordedRun, target: Path, state: Checkpoint, recipe: Recipe) -> None:
    """Makes a run folder that continues from this state."""
    folder = folders.hold(target)
    with folder.lock:
        if checkpoint.committed(folder.checkpoints):
            raise OutputError(f"{target} holds checkpoints already; give another --output.")
        checkpoint.commit(folder.checkpoints, state, recipe.keep_checkpoints)
        try:
            files.write(target / "recipe.yaml", recipes.dump(recipe))
            plan = {**source.plan, "framework": state.meta["framework"]}
            files.write(target / "plan.json", json.dumps(plan, indent=1))
            folder.write_status("running", step=state.meta["step"])
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"cannot turn {source.path} into {target}: {reason}; give another --output.") from None
