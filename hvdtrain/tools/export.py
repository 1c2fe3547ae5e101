"""`python -m hvdtrain export RUN --to FORMAT`: the model of a run's checkpoint, as a file that needs no hvdtrain."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from safetensors import SafetensorError

from hvdtrain import files
from hvdtrain.core import flags, recipe, user_code
from hvdtrain.core.flags import Flag
from hvdtrain.core.network import require
from hvdtrain.core.progress import each_once
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.errors import CheckpointError, EngineUnavailable, HvdtrainError, OutputError, RecipeError
from hvdtrain.record import checkpoint, reader
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.record.folder import MODEL
from hvdtrain.run.main import load_dataset
from hvdtrain.run.options import check_owner
from hvdtrain.terminal import Status
from hvdtrain.tools.convert import recipe_of
from hvdtrain.untrusted import one_line, printable

FORMATS = {"torch": ("pt", "safetensors", "onnx"), "tensorflow": ("keras", "safetensors", "onnx")}
"""The formats that a run of each framework can have."""
LOADED_BY = {
    "pt": "model.load_state_dict(torch.load({!r}, weights_only=True))",
    "safetensors": "safetensors.numpy.load_file({!r})",
    "keras": "keras.saving.load_model({!r})",
    "onnx": "onnxruntime.InferenceSession({!r})",
}
LARGEST_MODEL = 64 << 20
"""The most bytes of the file that describes a model of Keras's."""
TO_ONNX = """
import keras, sys
model = keras.saving.load_model(sys.argv[1])
model.export(sys.argv[2], "onnx", verbose=False, input_signature=model.inputs)
"""


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


def main(argv: Sequence[str]) -> int:
    """Writes the file and prints how it is loaded. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain export", argv)
    run = printable(str(options.run), 200)
    target = options.output or Path(f"{options.run.resolve().name}{'-best' * options.best}.{options.to}")
    shown = printable(str(target), 200)
    if target.suffix != f".{options.to}":
        raise OutputError(f"--output of --to {options.to} must end in .{options.to}, got {shown}.")
    with Status(f"reading a checkpoint of {run}"):
        state, damaged = checkpoint.chosen(options.run, best=options.best)
    print("".join(f"{line} The one before it is tried.\n" for line in damaged), end="")
    framework = str(state.meta.get("framework"))
    if options.to not in (can := FORMATS.get(framework, ())):
        other = {"torch": "tensorflow", "tensorflow": "torch"}.get(framework)
        remedy = f"or convert it first: python -m hvdtrain convert {run} --to {other}" if other else "give another run"
        raise RecipeError(f"--to must be one of {', '.join(can)} for a run of {framework}, got {options.to}; {remedy}")
    require(framework, "export")
    try:
        with Status(f"writing {shown}"), files.new_file(target) as file:
            which = (_of_torch if framework == "torch" else _of_tensorflow)(options, state, file)
    except (OSError, RuntimeError, SafetensorError) as error:  # the latter two for a full disk
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        why = getattr(cause, "strerror", None) or one_line(cause, 200)
        raise OutputError(f"cannot write {shown}: {why}; give another --output.") from None
    print(f"{which} of step {state.meta['step']}: {shown}\nload it: {LOADED_BY[options.to].format(str(target))}")
    return 0


def _metadata(options: Options, state: Checkpoint, which: str) -> dict[str, str]:
    """What a file of safetensors says of itself, as texts by name."""
    records = reader.read(options.run, recent=True).recent_of("epoch")
    of_epoch = next((record for record in reversed(records) if record["step"] == state.meta["step"]), {})
    metrics = {name: each for name, each in of_epoch.items() if name not in {"kind", "time"}}
    about = {key: str(state.meta.get(key)) for key in ("framework", "model", "step", "epoch", "valid_score")}
    return {**about, "weights": which, "metrics": json.dumps(metrics)}


def _of_torch(options: Options, state: Checkpoint, file: Path) -> str:
    import torch
    from safetensors.torch import save_file

    from hvdtrain.torch.state import weights

    found, which = weights(state)
    if options.to == "pt":
        with file.open("wb") as stream:  # so that an OSError says why
            torch.save(found, stream)
    elif options.to == "safetensors":
        tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
        save_file(tensors, file, _metadata(options, state, which))
    else:
        _need("onnx", "onnxscript")
        _torch_to_onnx(*_recipe(options, state), found, file)
    return which


def _torch_to_onnx(recipe: Recipe, dataset: Dataset, found: dict[str, Any], file: Path) -> None:
    import torch

    from hvdtrain.torch import data, models
    from hvdtrain.torch.engines.local import LocalEngine

    cpu = torch.device("cpu")
    plain = recipe.model_copy(update={"batch_norm": "local", "channels_last": False, "workers": 0})
    model = models.build(plain, dataset.classes, LocalEngine(cpu)).eval()
    model.load_state_dict(found)
    batch = next(iter(data.Loader(plain, dataset, cpu).batches(dataset.valid, each_once(2, 2, 0, 1))))
    x = user_code.pair(plain, getattr(batch, "data", batch))[0]
    named, args = (x, ()) if isinstance(x, Mapping) else ({}, tuple(x) if isinstance(x, tuple | list) else (x,))
    sizes = {name: {0: "batch"} for name in named} or tuple({0: "batch"} for _ in args)
    torch.onnx.export(model, args, file, kwargs=named, dynamic_shapes=sizes, external_data=False, verbose=False)


def _of_tensorflow(options: Options, state: Checkpoint, file: Path) -> str:
    kinds: dict[str, dict[str, Any]] = {"model": {}, "ema": {}}
    for name, array in state.arrays.items():
        kind, _, rest = name.partition(".")
        kinds.get(kind, {})[rest] = array
    which = "averaged weights" if kinds["ema"] else "weights"
    if options.to == "safetensors":
        from safetensors.numpy import save_file

        save_file(kinds["model"] | kinds["ema"], file, _metadata(options, state, which))
        return which
    if options.to == "onnx":
        _need("torch", "onnx", "onnxscript")
    whole = file.with_suffix(".keras")
    _keras_model(options, state).save(whole)
    if options.to == "onnx":  # by PyTorch in a process of its own, as tf2onnx does not go with this TensorFlow
        command = [sys.executable, "-c", TO_ONNX, str(whole), str(file)]
        environ = os.environ | {"KERAS_BACKEND": "torch"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RecipeError(f"Keras cannot write this model as onnx: {one_line(done.stderr[-300:])}; take keras.")
    return which


def _keras_model(options: Options, state: Checkpoint) -> Any:
    """The whole model of a recipe, or of a program's `fit`. Raises HvdtrainError."""
    from hvdtrain.tensorflow import without_banner

    with without_banner():
        import keras

        from hvdtrain.tensorflow import models
        from hvdtrain.tensorflow import state as of_model

    if not (options.run / "run.json").exists():
        model = models.build(*_recipe(options, state), None)
        of_model.set_weights(model, state)
        return model
    norms = {"hvdtrain>SyncBatchNormalization": keras.layers.BatchNormalization}
    try:
        made = json.loads(files.read(options.run / MODEL, LARGEST_MODEL, follow=False))
        model = keras.saving.deserialize_keras_object(made["model"], custom_objects=norms)
        of_model.set_weights(model, state, made["weights"])
    except (OSError, HvdtrainError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the model cannot be made of {MODEL} ({one_line(error, 120)}), which must hold layers of Keras's own; end "
            "your program with model.save('model.keras') after fit, and start it again."
        ) from None
    return model


def _recipe(options: Options, state: Checkpoint) -> tuple[Recipe, Dataset]:
    """The recipe of the run and its data set, of which the network is made. Raises RecipeError, DataError."""
    if (options.run / "run.json").exists():
        raise RecipeError(
            f"--to {options.to} needs the network's code, which a run of your own program does not name; take --to pt, "
            "load that there, and call torch.onnx.export."
        )
    found = recipe_of(reader.read(options.run, recent=True), str(state.meta["recipe"]))
    code = {key: path for key, path in user_code.named_by(found).items() if key in {"model", "dataset", "collate"}}
    check_owner(options.run, code, "copy the folder if you trust it.")
    return found, load_dataset(found, state.meta["framework"])


def _need(*packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        install = f"{sys.executable} -m pip install {' '.join(missing)}"
        raise EngineUnavailable(f"--to onnx needs {' and '.join(packages)}; install: {install}")
