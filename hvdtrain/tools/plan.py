"""`python -m hvdtrain plan RECIPE [flags]`: prints the plan of a run, without running it and without its data."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain.core import flags, plan
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Framework
from hvdtrain.core.network import Network
from hvdtrain.core.recipe import Recipe, located
from hvdtrain.core.user_code import is_path
from hvdtrain.core.wording import counted
from hvdtrain.datasets import DATASETS, Dataset, keys_of
from hvdtrain.datasets.base import default_data_dir
from hvdtrain.engines import frameworks
from hvdtrain.errors import DataError, HvdtrainError, RecipeError
from hvdtrain.record.folder import ResumePoint
from hvdtrain.run import weights
from hvdtrain.run.options import OPTIONS, parse_flags, usage
from hvdtrain.run.setup import load_dataset
from hvdtrain.untrusted import one_line, printable

PROG = "python -m hvdtrain plan"
Number = Annotated[int, Field(gt=0, le=10**9)]


@dataclass(frozen=True, eq=False)
class Blank:
    """Examples in place of those that are missing: black images of class 0, or token 0 throughout."""

    examples: int
    shape: tuple[int, ...] = ()
    """The shape of one image; () where it is not known."""
    labels: None = None

    def __len__(self) -> int:
        return self.examples

    def read(self, indices: NDArray[np.int64], draws: NDArray[np.float32] | None) -> tuple[np.ndarray, np.ndarray]:
        if not self.shape:
            raise DataError("there is no example to look at")
        if len(self.shape) == 1:  # tokens
            return (np.zeros((len(indices), *self.shape), np.int64),) * 2
        return np.zeros((len(indices), *self.shape), np.uint8), np.zeros(len(indices), np.int64)


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """The flags of `plan` itself, beside those of a run."""

    ranks: Number = Field(1, description="the number of ranks to plan for")
    framework: Literal["torch", "tensorflow"] | None = Field(
        None, description="what trains; left out: what the model is of, torch where both have it"
    )
    examples: Number | None = Field(
        None, description="plan for so many training examples; left out: those of the data set"
    )
    valid_examples: Number | None = Field(None, description="plan for so many validation examples")
    memory: bool = Field(False, description="count the bytes that forward keeps for backward too")


OWN = flags.fields_of(Options)
MEASURED = 0.9, 1.4
"""What TensorFlow's executor was seen to take, as a part of what is kept with weights, gradients and state."""


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises HvdtrainError."""
    if {"-h", "--help"} & set(argv[:1]) or not argv:
        of_plan = [f"  --{name.replace('_', '-')}\n      {field.description}" for name, field in OWN.items()]
        print(f"{usage(PROG)};\n         those of a run, and of plan alone:\n", *of_plan, sep="\n")
        return 0 if argv else 2
    recipe, options = _parsed(argv)
    os.environ["KERAS_BACKEND"] = "tensorflow"  # before the user's code imports Keras
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    framework = options.framework or frameworks.framework_of(recipe)
    weights.checked(recipe, framework, ResumePoint())
    dataset, notes = _dataset(recipe, framework, options)
    of_recipe, more = _network(recipe, framework, dataset)
    made = plan.make(recipe, options.ranks, dataset, of_recipe)  # it may be refused, and the rest takes longer
    if of_recipe.parameters:
        if groups := frameworks.lr_groups(recipe, framework, dataset, made.schedule.peak_lr):
            more.append(f"LR groups   {groups}")
        alone = recipe.model_copy(update={"workers": 0})  # two examples need no processes that read
        try:
            flops = frameworks.with_flops(of_recipe, alone, framework, dataset).flops
            made = dataclasses.replace(made, flops=flops)
        except RecipeError:
            raise
        except HvdtrainError as error:
            more.append(f"FLOPs       not counted: {one_line(error)}")
        if options.memory:
            kept = frameworks.kept_bytes(alone, framework, dataset, made.micro_batch)
            whole, examples = kept + made.state_bytes, counted(made.micro_batch, "example")
            parts = MEASURED if framework == "tensorflow" else (1.0,)
            total = " to ".join(f"{whole * part / 2**20:,.1f}" for part in parts)
            more.append(
                f"activations {kept / 2**20:,.1f} MiB of a micro-batch of {examples} are kept for backward: {total} "
                "MiB a rank with weights, gradients and the optimizer's state"
            )
    print("\n".join([*made.lines(), *more, *notes]))
    return 0


def _parsed(argv: Sequence[str]) -> tuple[Recipe, Options]:
    # Users may give the flags of `plan` before the recipe or behind it.
    rest, leading = list(argv), list[str]()
    while rest and rest[0].startswith("--") and rest[0].partition("=")[0][2:].replace("-", "_") in OWN:
        count = 1 if "=" in rest[0] or rest[0] == "--memory" else 2
        leading, rest = leading + rest[:count], rest[count:]
    words = [*rest[:1], *leading, *rest[1:]]
    name, given = parse_flags(PROG, words, {**OPTIONS, **OWN}, groups={"plan": tuple(OWN)}, hidden=OPTIONS)
    options = Options(**{key: given.pop(key) for key in OWN if key in given})
    of_recipe = {key: value for key, value in given.items() if key not in OPTIONS}
    if options.examples and "examples" in keys_of(recipes.load(name, of_recipe).dataset):
        of_recipe["examples"] = options.examples
    return recipes.load(name, of_recipe), options


def _dataset(recipe: Recipe, framework: Framework, options: Options) -> tuple[Dataset, list[str]]:
    """The data set, or one with its published sizes, and lines about it for the user."""
    notes = []
    if is_path(recipe.dataset) and options.examples:
        dataset = Dataset(recipe.dataset, Blank(options.examples), Blank(options.valid_examples or 0), None, (), (), ())
        return dataset, [f"data        {recipe.dataset} is not read: --examples is given"]
    # The data set is neither copied to this node nor decoded.
    recipe = located(recipe.model_copy(update={"cache_dir": None, "decoder": "pillow"}))
    if why := missing(recipe.dataset, recipe.data_dir):
        dataset = _published(recipe)
        counts = f"{counted(len(dataset.train), 'example')} to train, {len(dataset.valid):,} to validate, "
        sizes = "" if options.examples else counts
        notes = [
            f"data        {printable(why, 200)}; taken as published: {sizes}{counted(dataset.classes or 0, 'class')}"
        ]
    else:
        dataset = load_dataset(recipe, framework)
    if options.examples and "examples" not in keys_of(recipe.dataset):
        train_split = Blank(options.examples, dataset.sample_shape)
        dataset = dataclasses.replace(dataset, train=train_split, shards=(), items=())
    if options.valid_examples:
        dataset = dataclasses.replace(dataset, valid=Blank(options.valid_examples, dataset.sample_shape))
    return dataset, notes


def _network(recipe: Recipe, framework: Framework, dataset: Dataset) -> tuple[Network, list[str]]:
    """The network; where its size cannot be known without an example, one of unknown size, and a line about it."""
    try:
        return frameworks.network_of(recipe, framework, dataset), []
    except DataError as error:
        if not isinstance(dataset.train, Blank):
            raise
        return Network(0, has_batch_norm=True), [f"parameters  not counted: {one_line(error)}"]


def missing(name: str, data_dir: Path | None) -> str:
    """Why the files of a published set cannot be read; "" where they may be there, or are in the package."""
    if name not in DATASETS or not DATASETS[name].published:
        return ""
    folder = DATASETS[name].downloaded_to
    if data_dir is None and not folder:
        return "no --data-dir is given"
    # os.access is False, too, for a name that no folder can have.
    if os.access(data_dir or default_data_dir() / (folder or ""), os.F_OK):
        return ""
    return f"{data_dir} is not here" if data_dir else "not downloaded yet"


def _published(recipe: Recipe) -> Dataset:
    """A published data set without its files."""
    row = DATASETS[recipe.dataset]
    assert row.published
    train, valid, classes = row.published
    side = getattr(recipe, row.side) if isinstance(row.side, str) else row.side
    shape = (side, side, 3)
    return Dataset(recipe.dataset, Blank(train, shape), Blank(valid, shape), classes, shape, (0.5,) * 3, (0.5,) * 3)
