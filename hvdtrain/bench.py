"""`python -m hvdtrain bench`: measurements, each a ratio within one interleaved run."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hvdtrain import bench_engines, flags
from hvdtrain import recipe as recipes
from hvdtrain.errors import EngineUnavailable, RecipeError

# What the hand-written loops do and leave out.
HAND_WRITTEN = {
    "model": "resnet50", "precision": "float32", "accumulation_steps": 1, "clip_norm": None, "batch_norm": "local",
    "compression": "none", "reduction": "average", "channels_last": False, "xla": False, "max_steps": None,
    "checkpoint_every_steps": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures this machine."""

    what: Annotated[
        Literal["overhead", "engines"],
        tyro.conf.Positional,
        tyro.conf.arg(
            help="overhead: step time of hvdtrain over that of a hand-written loop; engines: every engine's step time"
        ),
    ]
    framework: Annotated[
        Literal["torch", "tensorflow"] | None,
        tyro.conf.arg(help="whose loop; left out: torch, for engines all that are installed"),
    ] = None
    engine: Annotated[Literal["horovod", "ddp"], tyro.conf.arg(help="overhead: what joins the ranks")] = "horovod"
    recipe: Annotated[str, tyro.conf.arg(help="ResNet50 recipe to take the steps from")] = "digits"
    ranks: Annotated[int, tyro.conf.arg(help="local ranks, or devices of one process")] = 2
    rounds: Annotated[int, tyro.conf.arg(help="epochs (engines: runs) of each, in turn; overhead: first warms up")] = 6
    steps: Annotated[int, tyro.conf.arg(help="engines: steps of a run, besides its warm-up")] = 10


def main(argv: Sequence[str]) -> int:
    """Starts the ranks of the measurement; its exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain bench", argv)
    _check(options)
    if options.what == "engines":
        installed = [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)]
        chosen = [options.framework] if options.framework else installed
        return bench_engines.main(chosen, options.recipe, options.ranks, options.rounds, options.steps)
    return _overhead(options)


def _overhead(options: Options) -> int:
    framework = options.framework or "torch"
    module = [f"hvdtrain.{framework}.overhead", options.recipe, str(options.rounds)]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "KERAS_BACKEND": "tensorflow"}
    if options.engine == "ddp":
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [torchrun, "--standalone", "--nproc-per-node", str(options.ranks), "-m", *module, "ddp"]
        return subprocess.run(command, env=environ, check=False).returncode
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if not horovodrun.exists():
        raise EngineUnavailable(f"{horovodrun} is missing; build Horovod first: python -m hvdtrain build")
    command = [str(horovodrun), "-np", str(options.ranks), sys.executable, "-m", *module]
    command += ["horovod"] if framework == "torch" else []
    return subprocess.run(command, env=environ, check=False).returncode


def _check(options: Options) -> None:
    if options.ranks < 1:
        raise RecipeError(f"--ranks must be at least 1, got {options.ranks}.")
    least = 2 if options.what == "overhead" else 1
    if options.rounds < least:
        why = ", as the first is warm-up" if least == 2 else ""
        raise RecipeError(f"--rounds must be at least {least}{why}, got {options.rounds}.")
    if options.steps < 1:
        raise RecipeError(f"--steps must be at least 1, got {options.steps}.")
    if options.engine == "ddp" and options.framework == "tensorflow":
        raise RecipeError("--engine ddp is PyTorch's; drop --framework tensorflow.")
    recipe = recipes.load(options.recipe)
    if options.what == "engines":
        return
    for key, wanted in HAND_WRITTEN.items():
        if (got := getattr(recipe, key)) != wanted:
            raise RecipeError(f"--recipe must have {key} {wanted}, as the hand-written loop has, got {got}.")
