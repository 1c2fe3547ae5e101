"""`python -m hvdtrain export RUN --to FORMAT`: the model of a run's checkpoint, as a file that needs no hvdtrain."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
from safetensors import SafetensorError

from hvdtrain import files
from hvdtrain.core import flags, objective, recipe, user_code
from hvdtrain.core.flags import Flag
from hvdtrain.core.network import end_of
from hvdtrain.core.progress import each_once
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.engines.frameworks import require
from hvdtrain.errors import CheckpointError, EngineUnavailable, HvdtrainError, OutputError, RecipeError
from hvdtrain.record import checkpoint, reader
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.folder import MODEL
from hvdtrain.run.options import check_owner
from hvdtrain.run.setup import load_dataset
from hvdtrain.terminal import Status
from hvdtrain.tools import proof
from hvdtrain.tools.convert import recipe_of
from hvdtrain.untrusted import one_line, printable

FORMATS = {"torch": ("pt", "safetensors", "onnx"), "tensorflow": ("keras", "safetensors", "onnx")}
"""The formats that a run of each framework can have."""
ONNX = "import onnxruntime", "onnxruntime.InferenceSession(PATH)"
LARGEST_MODEL = 64 << 20
"""The most bytes of the file that describes a model of Keras's."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Writes the model of a run's newest checkpoint as a file. It holds the averaged weights where the run validates
    with them."""

    run: Annotated[Path, Flag(help="run folder, as runs/digits/2026-11-20_15-33-02", is_positional=True)]
    to: Annotated[
        Literal["pt", "safetensors", "keras", "onnx"],
        Flag("pt: PyTorch's state_dict; keras: a whole model; safetensors: arrays by name; onnx"),
    ]
    best: Annotated[bool, Flag("the checkpoint that was best in validation; left out: the newest")] = False
    output: Annotated[
        Annotated[Path, recipe.expanding("--output")] | None, Flag("left out: RUN.FORMAT in the current folder")
    ] = None
    proof: Annotated[bool, Flag("compare what a fresh process without hvdtrain finds in the file")] = True


class Written(NamedTuple):
    """What a file holds, the statements and the expression that load it from PATH, what `proof` finds there, and how
    far apart outputs may be, of the largest."""

    which: str
    imports: str
    load: str
    own: Sequence[np.ndarray]
    limit: float = 1e-5


def main(argv: Sequence[str]) -> int:
    """Writes the file and prints how it is loaded. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain export", argv)
    run = printable(str(options.run), 200)
    target = options.output or Path(f"{options.run.resolve().name}{'-best' * options.best}.{options.to}")
    shown = printable(str(target), 200)
    if target.suffix != f".{options.to}":
        raise OutputError(f"--output of --to {options.to} must end in .{options.to}, got {shown}.")
    state = chosen(options.run, best=options.best)
    framework = str(state.meta.get("framework"))
    if options.to not in (can := FORMATS.get(framework, ())):
        other = {"torch": "tensorflow", "tensorflow": "torch"}.get(framework)
        remedy = f"or convert it first: python -m hvdtrain convert {run} --to {other}" if other else "give another run"
        raise RecipeError(f"--to must be one of {', '.join(can)} for a run of {framework}, got {options.to}; {remedy}")
    require(framework, "export")
    try:
        with Status(f"writing {shown}"), files.new_file(target) as file:
            made = (_of_torch if framework == "torch" else _of_tensorflow)(options, state, file)
            unproved = _prove(made, shown, file) if options.proof else "\nnot proved"
    except (OSError, RuntimeError, SafetensorError) as error:  # the latter two for a full disk
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        why = getattr(cause, "strerror", None) or one_line(cause, 200)
        raise OutputError(f"cannot write {shown}: {why}; give another --output.") from None
    load = made.load.replace("PATH", repr(str(target)), 1)
    load = f"model.load_state_dict({load})" if options.to == "pt" else load
    print(f"{made.which} of step {state.meta['step']}: {shown}\nload it: {made.imports}; {load}{unproved}")
    return 0


def _prove(made: Written, shown: str, file: Path) -> str:
    """Compares what a fresh process without hvdtrain finds, after the line that is printed. Returns a line on what
    cannot be compared. Raises OutputError."""
    if not importlib.util.find_spec(package := re.split("[.;]", made.imports.split()[1])[0]):
        return f"\nnot proved, as {package} is not installed"
    line = f"{made.imports}; loaded = {made.load.replace('PATH', repr(file.name), 1)}"
    path = [str(Path(each).absolute()) for each in sys.path]
    command = [sys.executable, "-I", proof.__file__, json.dumps([path, line, file.suffix[1:]])]
    environ = os.environ | {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, cwd=file.parent, env=environ, capture_output=True, text=True, check=False)
    try:
        if done.returncode:
            raise ValueError(f"{done.stdout} (exit code {done.returncode})")
        if len(found := list(np.load(file.with_name("found.npz")).values())) != len(made.own):
            raise ValueError(f"it computes {len(found) - 1} outputs of the examples, not {len(made.own) - 1}")
        for its, mine in zip(found, made.own, strict=True):
            largest = abs(np.nan_to_num(mine, posinf=0, neginf=0)).max(initial=0)
            np.testing.assert_allclose(its, mine, 0, made.limit * largest if mine.dtype.kind == "f" else 0)
    except (AssertionError, ValueError) as error:
        why = f"a fresh process cannot use it, or finds something else: {one_line(error, 300)}"
        raise OutputError(f"{shown} is not written, as {why}; see --no-proof.") from None
    has_outputs = len(made.own) > 1 or file.suffix in {".pt", ".safetensors"}
    return "" if has_outputs else "\nnot proved: what it computes, which no inputs by its shapes and types show"


def _metadata(options: Options, state: Checkpoint, which: str) -> dict[str, str]:
    """What a file of safetensors says of itself, as texts by name."""
    records = reader.read(options.run, recent=True).recent_of("epoch")
    of_epoch = next((record for record in reversed(records) if record["step"] == state.meta["step"]), {})
    metrics = {name: each for name, each in of_epoch.items() if name not in {"kind", "time"}}
    about = {key: str(state.meta.get(key)) for key in ("framework", "model", "step", "epoch", "valid_score")}
    return {**about, "weights": which, "metrics": json.dumps(metrics)}


def _of_torch(options: Options, state: Checkpoint, file: Path) -> Written:
    import torch
    from safetensors.torch import save_file

    from hvdtrain.torch.state import weights

    found, which = weights(state)
    if options.to == "pt":
        with file.open("wb") as stream:  # so that an OSError says why
            torch.save(found, stream)
        return Written(which, "import torch", "torch.load(PATH, weights_only=True)", proof.of_weights(found))
    if options.to == "safetensors":
        tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
        save_file(tensors, file, _metadata(options, state, which))
        own, load = proof.of_weights(tensors), "safetensors.torch.load_file(PATH)"  # NumPy has no bfloat16
        return Written(which, "import safetensors.torch", load, own)
    _need("onnx", "onnxscript")
    return _torch_to_onnx(*_recipe(options, state), found, which, file)


def _torch_to_onnx(recipe: Recipe, dataset: Dataset, found: dict[str, Any], which: str, file: Path) -> Written:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    from hvdtrain.torch import data

    plain, model = torch_model(recipe, dataset, found)
    batch = next(iter(data.Loader(plain, dataset, torch.device("cpu")).batches(dataset.valid, each_once(2, 2, 0, 1))))
    x = objective.pair(plain, getattr(batch, "data", batch))[0]
    named, args = (x, ()) if isinstance(x, Mapping) else ({}, tuple(x) if isinstance(x, tuple | list) else (x,))
    sizes = {name: {0: "batch"} for name in named} or tuple({0: "batch"} for _ in args)
    torch.onnx.export(model, args, file, kwargs=named, dynamic_shapes=sizes, external_data=False, verbose=False)
    args, named = tree_map(lambda each: torch.cat([each, each[:1]]), (args, dict(named)))  # another batch size
    np.savez(file.with_name("inputs.npz"), *args, **{f"of {name}": each for name, each in named.items()})
    with torch.no_grad():
        own = [np.zeros(0), *(each.double().numpy() for each in tree_leaves(model(*args, **named)))]
    return Written(which, *ONNX, own)


def chosen(run: Path, *, best: bool) -> Checkpoint:
    """The newest whole checkpoint of a run, or the best one. Prints which are damaged. Raises CheckpointError."""
    with Status(f"reading a checkpoint of {printable(str(run), 200)}"):
        state, damaged = checkpoint.chosen(run, best=best)
    print("".join(f"{line} The one before it is tried.\n" for line in damaged), end="")
    return state


def torch_model(recipe: Recipe, dataset: Dataset, found: Mapping[str, Any]) -> tuple[Recipe, Any]:
    """The recipe's network with these weights, for inference on the CPU, and the recipe of the model so plain."""
    import torch

    from hvdtrain.torch import models
    from hvdtrain.torch.engines.local import LocalEngine

    simple = {"batch_norm": "local", "channels_last": False, "workers": 0, "checkpoint_activations": ()}
    plain = recipe.model_copy(update=simple)
    model = models.build(plain, dataset.classes, LocalEngine(torch.device("cpu")), end_of(recipe, dataset)).eval()
    model.load_state_dict(found)
    return plain, model


def _of_tensorflow(options: Options, state: Checkpoint, file: Path) -> Written:
    kinds: dict[str, dict[str, Any]] = {"model": {}, "ema": {}}
    for name, array in state.arrays.items():
        kind, _, rest = name.partition(".")
        kinds.get(kind, {})[rest] = array
    which = "averaged weights" if kinds["ema"] else "weights"
    if options.to == "safetensors":
        from safetensors.numpy import save_file

        save_file(tensors := kinds["model"] | kinds["ema"], file, _metadata(options, state, which))
        load = "safetensors.numpy.load_file(PATH)"
        return Written(which, "import safetensors.numpy", load, proof.of_weights(tensors))
    if options.to == "onnx":
        _need("torch", "onnx", "onnxscript")
    whole = file.with_suffix(".keras")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # as in the fresh process, which may find no memory there
    model, imports, load = _keras_model(options, state)
    model.save(whole)
    own = proof.of_keras(model)
    limit = 0.1 if any("16" in str(each.compute_dtype) for each in model._flatten_layers()) else 1e-5
    if options.to == "onnx":  # by PyTorch in a process of its own, as tf2onnx does not go with this TensorFlow
        loads = (
            f"import sys; sys.path[:] = {sys.path!r}; {imports}; model = {load.replace('PATH', repr(str(whole)), 1)}"
        )
        writes = f"model.export({str(file)!r}, 'onnx', verbose=False, input_signature=model.inputs)"
        command, environ = [sys.executable, "-c", f"{loads}; {writes}"], os.environ | {"KERAS_BACKEND": "torch"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RecipeError(f"Keras cannot write this model as onnx: {one_line(done.stderr[-300:])}; take keras.")
        np.savez(file.with_name("inputs.npz"), *(proof.inputs(model) if own[1:] else ()))
        return Written(which, *ONNX, [np.zeros(0), *own[1:]], limit)
    return Written(which, imports, load, own, limit)


def _keras_model(options: Options, state: Checkpoint) -> tuple[Any, str, str]:
    """The whole model of a recipe, or of a program's `fit`, and how its file is loaded; see `Written`. Raises
    HvdtrainError."""
    from hvdtrain.tensorflow import without_banner

    with without_banner():
        import keras

        from hvdtrain.tensorflow import models
        from hvdtrain.tensorflow import state as of_model

    if not (options.run / "run.json").exists():
        model = models.build(*_recipe(options, state), None)
        of_model.set_weights(model, state)
        return model, *_loading(models.own_objects(model, json.dumps(keras.saving.serialize_keras_object(model))))
    own, objects = dict[str, str](), {"hvdtrain>SyncBatchNormalization": keras.layers.BatchNormalization}
    try:
        made = json.loads(files.read(options.run / MODEL, LARGEST_MODEL, follow=False))
        check_owner(options.run, made.get("own", {}), "copy the folder if you trust it.", MODEL)
        own = made.get("own", {})
        if any(path.startswith("__main__:") for path in own.values()):
            raise ValueError("it has classes or functions of the program itself, which trains where it is imported")
        objects |= {name: user_code.load(path, "the layer") for name, path in own.items()}
        if not files.is_own((options.run / MODEL).lstat()):  # sizes of others, before anything is allocated for them
            with keras.StatelessScope(initialize_variables=False):
                theirs = keras.saving.deserialize_keras_object(made["model"], custom_objects=objects).weights
            for name, weight in zip(made["weights"][: len(theirs)], theirs, strict=True):
                state.array(name, tuple(weight.shape))
            keras.utils.clear_session()
        model = keras.saving.deserialize_keras_object(made["model"], custom_objects=objects)
        models.assets(model, made.get("assets", {}))
        of_model.set_weights(model, state, made["weights"])
        then = json.loads(state.meta["optimizer"].get("constants", "{}"))
        now = {path: each for path, each in models.held_constants(model).items() if not re.search(r"\b0\]", each)}
        if others := [path for path, each in now.items() if then.get(path, each) != each]:
            raise ValueError(f"it holds another {', '.join(others)} than the checkpoint's model did")
    except (OSError, HvdtrainError, AttributeError, KeyError, TypeError, ValueError) as error:
        unsafe = "'model.keras'" + ", safe_mode=False" * ("lambda" in str(error))
        raise CheckpointError(
            f"the model cannot be made of {MODEL} ({one_line(error, 200)}), which must hold layers of Keras's own, or "
            "of modules beside your program; or end your program with model.save('model.keras') after fit, start it "
            f"again, and load that by {_loading(own)[1].replace('PATH', unsafe, 1)}."
        ) from None
    return model, *_loading(own)


def _loading(own: Mapping[str, str]) -> tuple[str, str]:
    """The statements and the expression that load a model of Keras's from PATH; `own`: see `own_objects`."""
    paths = {name: path.split(":") for name, path in own.items()}
    imports = [f"from {module} import {name.partition('.')[0]}" for module, name in paths.values()]
    given = ", ".join(f"{name!r}: {path[1]}" for name, path in paths.items())
    load = f"keras.saving.load_model(PATH, custom_objects={{{given}}})" if own else "keras.saving.load_model(PATH)"
    return "; ".join(["import keras", *imports]), load


def _recipe(options: Options, state: Checkpoint) -> tuple[Recipe, Dataset]:
    """The recipe of the run and its data set, of which the network is made. Raises RecipeError, DataError."""
    if (options.run / "run.json").exists():
        raise RecipeError(
            f"--to {options.to} needs the network's code, which a run of your own program does not name; take --to pt, "
            "load that there, and call torch.onnx.export."
        )
    return recipe_and_data(options.run, state)


def recipe_and_data(run: Path, state: Checkpoint) -> tuple[Recipe, Dataset]:
    """The recipe of a run with this checkpoint, and its data set. Raises RecipeError, DataError."""
    found = recipe_of(reader.read(run, recent=True), str(state.meta["recipe"]))
    code = {key: path for key, path in recipe.named_by(found).items() if key in {"model", "dataset", "collate"}}
    check_owner(run, code, "copy the folder if you trust it.")
    return found, load_dataset(found, state.meta["framework"])


def _need(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        install = f"{sys.executable} -m pip install {' '.join(missing)}"
        raise EngineUnavailable(f"--to onnx needs {' and '.join(packages)}; install: {install}")
