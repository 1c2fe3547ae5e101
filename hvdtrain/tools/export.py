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

from hvdtrain import files
from hvdtrain.core import flags, user_code
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
from hvdtrain.terminal import Status
from hvdtrain.tools.convert import recipe_of
from hvdtrain.untrusted import one_line, printable

Format = Literal["pt", "safetensors", "keras", "onnx"]
FORMATS: Mapping[str, tuple[Format, ...]] = {
    "torch": ("pt", "safetensors", "onnx"),
    "tensorflow": ("keras", "safetensors", "onnx"),
}
"""The formats that a run of each framework can have."""
LOADED_BY = {
    "pt": "model.load_state_dict(torch.load({!r}, weights_only=True))",
    "safetensors": "safetensors.numpy.load_file({!r}), or safetensors.torch",
    "keras": "keras.saving.load_model({!r})",
    "onnx": "onnxruntime.InferenceSession({!r})",
}
LARGEST_MODEL = 64 << 20
"""The most bytes of the file that describes the layers of a model of Keras's."""
KERAS_TO_ONNX = """
import keras, sys
model = keras.saving.load_model(sys.argv[1])
model.export(sys.argv[2], "onnx", verbose=False, input_signature=model.inputs)
"""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Writes the model of a run's newest checkpoint, or of its best one, as a file of PyTorch's, Keras's, safetensors'
    or ONNX. It holds the averaged weights where the run validates with them."""

    run: Annotated[Path, Flag(help="run folder, as runs/digits/2026-11-20_15-33-02", is_positional=True)]
    to: Annotated[Format, Flag("pt: a state_dict; keras: a whole model; safetensors: arrays by name; onnx")]
    best: Annotated[bool, Flag("the checkpoint that was best in validation; left out: the newest")] = False
    output: Annotated[Path | None, Flag("left out: the run's name with the format's suffix, in this folder")] = None


def main(argv: Sequence[str]) -> int:
    """Writes the file and prints how it is loaded. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain export", argv)
    target = options.output or Path(f"{options.run.resolve().name}{'-best' * options.best}.{options.to}")
    if target.suffix != f".{options.to}":
        raise OutputError(
            f"the file of --to {options.to} must end in .{options.to}, got {printable(str(target), 200)}."
        )
    with Status(f"reading a checkpoint of {printable(str(options.run))}"):
        state = _checkpoint(options)
    framework = state.meta.get("framework")
    if options.to not in FORMATS.get(str(framework), ()):
        raise RecipeError(_not_of(options, framework))
    require(str(framework), "export")
    try:
        with Status(f"writing {printable(str(target), 200)}"), files.new_file(target) as file:
            which = {"torch": _of_torch, "tensorflow": _of_tensorflow}[str(framework)](options, state, file)
    except (OSError, RuntimeError) as error:  # torch.save raises the latter for a full disk
        why = getattr(error, "strerror", None) or one_line(error, 200)
        raise OutputError(f"cannot write {printable(str(target), 200)}: {why}; give another --output.") from None
    score = state.meta.get("valid_score")
    print(f"{which} of step {state.meta['step']}{'' if score is None else f', score {score:.6g}'}: {target}")
    print(f"load it: {LOADED_BY[options.to].format(str(target))}")
    return 0


def _checkpoint(options: Options) -> Checkpoint:
    """The checkpoint to export. Raises CheckpointError."""
    folder = options.run / "checkpoints"
    if options.best:
        path = checkpoint.best(checkpoint.committed(folder))
        if path is None:
            raise CheckpointError(f"{options.run} holds no checkpoint with a score of validation; leave out --best.")
        return checkpoint.read(path)
    state, damaged = checkpoint.newest(folder)
    print("".join(f"{line} The one before it is tried.\n" for line in damaged), end="")
    if state is None:
        raise CheckpointError(f"{options.run} holds no whole checkpoint; give the folder of a run that wrote one.")
    return state


def _not_of(options: Options, framework: object) -> str:
    theirs = FORMATS.get(str(framework))
    if theirs is None:
        return f"the checkpoint of {options.run} names no framework of ours; give another run."
    other = "tensorflow" if framework == "torch" else "torch"
    return (
        f"--to must be {', '.join(theirs[:-1])} or {theirs[-1]} for a run of {framework}, got {options.to}; or convert "
        f"it first: python -m hvdtrain convert {options.run} --to {other}"
    )


def _metadata(options: Options, state: Checkpoint, which: str) -> dict[str, str]:
    """What a file of safetensors says of itself, as texts by name."""
    records = reader.read(options.run, recent=True).recent_of("epoch")
    of_epoch = next((record for record in reversed(records) if record["step"] == state.meta["step"]), {})
    metrics = {name: value for name, value in of_epoch.items() if name.startswith(("train_", "valid_", "val_"))}
    about = {key: str(state.meta.get(key)) for key in ("framework", "model", "step", "epoch", "valid_score")}
    return {**about, "weights": which, "metrics": json.dumps(metrics)}


def _of_torch(options: Options, state: Checkpoint, file: Path) -> str:
    import torch
    from safetensors.torch import save_file

    from hvdtrain.torch.state import weights

    found, which = weights(state)
    if options.to == "pt":
        torch.save(found, file)
    elif options.to == "safetensors":
        tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
        save_file(tensors, file, _metadata(options, state, which))
    else:
        _need("onnx", "onnxscript")
        recipe, dataset = _recipe(options, state, "a network in onnx")
        _torch_to_onnx(recipe, dataset, found, file)
    return which


def _torch_to_onnx(recipe: Recipe, dataset: Dataset, found: Mapping[str, Any], file: Path) -> None:
    import torch

    from hvdtrain.torch import data, models
    from hvdtrain.torch.engines.local import LocalEngine

    cpu = torch.device("cpu")
    plain = recipe.model_copy(update={"batch_norm": "local", "channels_last": False, "workers": 0})
    model = models.build(plain, dataset.classes, LocalEngine(cpu))
    model.load_state_dict(dict(found))
    batch = next(iter(data.Loader(plain, dataset, cpu).batches(dataset.valid, each_once(2, 2, 0, 1))))
    x = user_code.pair(plain, getattr(batch, "data", batch))[0]
    args, named = (tuple(x) if isinstance(x, tuple | list) else (x,)), x if isinstance(x, Mapping) else {}
    torch.onnx.export(
        model.eval(),
        () if named else args,
        file,
        kwargs=named,
        dynamo=True,
        external_data=False,
        verbose=False,
        dynamic_shapes={key: {0: "batch"} for key in named} if named else tuple({0: "batch"} for _ in args),
    )


def _of_tensorflow(options: Options, state: Checkpoint, file: Path) -> str:
    which = "averaged weights" if any(name.startswith("ema.") for name in state.arrays) else "weights"
    if options.to == "safetensors":
        from safetensors.numpy import save_file

        of_kind = {kind: _named(state, kind) for kind in ("model.", "ema.")}
        save_file(of_kind["model."] | of_kind["ema."], file, _metadata(options, state, which))
        return which
    if options.to == "onnx":
        _need("torch", "onnx", "onnxscript")
    model = _keras_model(options, state)
    whole = file.with_suffix(".keras")
    model.save(whole)
    if options.to == "onnx":  # by PyTorch, in a process of its own: tf2onnx does not go with this TensorFlow
        environ = {**os.environ, "KERAS_BACKEND": "torch"}
        command = [sys.executable, "-c", KERAS_TO_ONNX, str(whole), str(file)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RecipeError(
                f"Keras cannot export this model as onnx: {one_line(done.stderr[-300:])}; take --to keras."
            )
    return which


def _named(state: Checkpoint, kind: str) -> dict[str, Any]:
    return {name.removeprefix(kind): each for name, each in state.arrays.items() if name.startswith(kind)}


def _keras_model(options: Options, state: Checkpoint) -> Any:
    from hvdtrain.tensorflow import models
    from hvdtrain.tensorflow.state import set_weights

    if (options.run / "run.json").exists():
        return _model_of_fit(options, state)
    recipe, dataset = _recipe(options, state, "a model in keras or onnx")
    model = models.build(recipe, dataset, None)
    set_weights(model, state)
    return model


def _model_of_fit(options: Options, state: Checkpoint) -> Any:
    """The model that a program gave to Keras's fit. Raises CheckpointError."""
    import keras

    from hvdtrain.tensorflow.state import set_weights

    norms = {"hvdtrain>SyncBatchNormalization": keras.layers.BatchNormalization}
    try:
        made = json.loads(files.read(options.run / MODEL, LARGEST_MODEL, follow=False))
        model = keras.saving.deserialize_keras_object(made["model"], custom_objects=norms)
        set_weights(model, state, made["weights"])
    except (OSError, HvdtrainError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the model cannot be made anew from {options.run / MODEL} ({one_line(error, 200)}): its layers must be "
            "Keras's own; save it in your program, after fit: model.save('model.keras')."
        ) from None
    return model


def _recipe(options: Options, state: Checkpoint, what: str) -> tuple[Recipe, Dataset]:
    """The recipe of the run, whose network must be made, and its data set. Raises RecipeError, DataError."""
    if (options.run / "run.json").exists():
        raise RecipeError(
            f"{what} needs the network's code, and {options.run} is a run of your own program; take --to pt, load that "
            "into the network there, and call torch.onnx.export."
        )
    recipe = recipe_of(reader.read(options.run, recent=True), str(state.meta["recipe"]))
    code = [path for path in (recipe.model, recipe.dataset, recipe.collate or "") if user_code.is_path(path)]
    if code and not files.is_own((options.run / "recipe.yaml").lstat()):
        raise RecipeError(
            f"the recipe of {options.run} is another user's and names code, {code[0]}, which would run as yours; copy "
            "the folder if you trust it."
        )
    return recipe, load_dataset(recipe, state.meta["framework"])


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineUnavailable(
            f"--to onnx needs {', '.join(packages)}; install them: {sys.executable} -m pip install {' '.join(missing)}"
        )
