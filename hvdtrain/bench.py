"""`python -m hvdtrain bench`: measurements, each a ratio within one interleaved run."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hvdtrain import flags
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
        Literal["overhead"],
        tyro.conf.Positional,
        tyro.conf.arg(help="overhead: step time of hvdtrain over that of a hand-written Horovod loop"),
    ]
    framework: Annotated[Literal["torch", "tensorflow"], tyro.conf.arg(help="whose loop")] = "torch"
    recipe: Annotated[str, tyro.conf.arg(help="ResNet50 recipe to take both steps from")] = "digits"
    ranks: Annotated[int, tyro.conf.arg(help="local ranks")] = 2
    rounds: Annotated[int, tyro.conf.arg(help="epochs of each loop, in turn; the first is warm-up")] = 6


def main(argv: Sequence[str]) -> int:
    """Starts the ranks of the measurement; its exit code. Raises HvdtrainError."""
    options = flags.parse(Options, "python -m hvdtrain bench", argv)
    _check(options)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if not horovodrun.exists():
        raise EngineUnavailable(f"{horovodrun} is missing; build Horovod first: python -m hvdtrain build")
    command = [str(horovodrun), "-np", str(options.ranks), sys.executable, "-m"]
    command += [f"hvdtrain.{options.framework}.overhead", options.recipe, str(options.rounds)]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "KERAS_BACKEND": "tensorflow"}
    return subprocess.run(command, env=environ, check=False).returncode


def _check(options: Options) -> None:
    if options.ranks < 1:
        raise RecipeError(f"--ranks must be at least 1, got {options.ranks}.")
    if options.rounds < 2:
        raise RecipeError(f"--rounds must be at least 2, as the first is warm-up, got {options.rounds}.")
    recipe = recipes.load(options.recipe)
    for key, wanted in HAND_WRITTEN.items():
        if (got := getattr(recipe, key)) != wanted:
            raise RecipeError(f"--recipe must have {key} {wanted}, as the hand-written loop has, got {got}.")
