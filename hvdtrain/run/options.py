"""The command line of a run: `RECIPE [flags]` -> a recipe and the options around it; and its help."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.core import recipe as recipes
from hvdtrain.core.compatibility import Adapter
from hvdtrain.core.flags import Layout
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.recipe.augmentation import Augmentation
from hvdtrain.core.recipe.classes import Classes
from hvdtrain.core.recipe.finetuning import FineTuning
from hvdtrain.core.recipe.memory import Memory
from hvdtrain.core.recipe.text import Text
from hvdtrain.core.settings import TRACKERS
from hvdtrain.core.user_code import PLAIN, is_path
from hvdtrain.core.values import known
from hvdtrain.datasets import DATASETS, keys_of
from hvdtrain.engines import registry
from hvdtrain.engines.registry import ENGINES
from hvdtrain.errors import RecipeError
from hvdtrain.record.folder import RECIPE
from hvdtrain.untrusted import printable

if TYPE_CHECKING:
    EngineName = str
    TrackerName = str
else:
    EngineName = Literal[("auto", *registry.ENGINES)]
    TrackerName = Literal[(*TRACKERS, "none")]

GROUPS = {
    "model": ("model", "model_args", "stem", "batch_norm", "buffers", "loss", "metrics", "metrics_args", "step"),
    "fine tuning": tuple(FineTuning.model_fields),
    "data": (
        *("dataset", "dataset_args", "collate", "sample_check", "data_dir", "cache_dir", "shuffle", "decoder"),
        *("exif", "train_crop", "valid_resize", "valid_crop", "image_size", "classes", "examples", "workers"),
        *Text.model_fields,
        *(*Classes.model_fields, *Augmentation.model_fields),
    ),
    "batch and epochs": (
        *("batch_size", "batch_size_per_rank", "accumulation_steps", "epochs", "max_steps", "seed"),
        *("stop_patience", "stop_metric", "stop_min_delta", "stop_after_epoch"),
    ),
    "learning rate": (
        *("base_lr", "base_batch_size", "lr_rule", "warmup_epochs"),
        *("lr_schedule", "lr_milestones", "lr_factor", "lr_floor", "plateau_patience"),
    ),
    "optimizer": (
        *("optimizer", "optimizer_args", "momentum", "nesterov", "weight_decay"),
        *("ema_decay", "label_smoothing", "clip_norm"),
    ),
    "precision and speed": (
        *("precision", "channels_last", "fused_optimizer", "cudnn_benchmark", "compile", "xla", "data_on_device"),
        *("device", *Memory.model_fields),
    ),
    "communication": (
        *("compression", "reduction", "fusion_threshold_mb", "cycle_time_ms", "autotune", "horovod_timeline"),
    ),
    "checkpoints and logs": (
        *("output", "resume", "checkpoint_every_epochs", "checkpoint_every_steps", "mtbf_hours", "keep_checkpoints"),
        "best",
        *("check_replicas_every_steps", "log_every_steps", "tracker", "profile", "gradient_noise", "expected"),
    ),
    "evaluation": ("evaluate", "json"),
    "launch": ("engine", "devices", "insecure_rendezvous"),
}
"""The groups of the help: by title, keys of a recipe and options of a run."""
TORCH, TENSORFLOW, LIGHTNING = "torch", "tensorflow", "lightning"
USED_BY: Mapping[str, Callable[[Recipe, Adapter | None], bool]] = {
    "model_args": lambda r, of: r.model not in PLAIN,
    "stem": lambda r, of: r.model == "resnet50",
    "batch_norm": lambda r, of: r.model not in {"linear", "gpt"},
    "label_smoothing": lambda r, of: r.model != "linear",
    **dict.fromkeys(Classes.model_fields, lambda r, of: r.model != "linear"),
    **dict.fromkeys(Augmentation.model_fields, lambda r, of: r.model not in {"linear", "gpt"}),
    "channels_last": lambda r, of: r.model not in {"linear", "gpt"} and of != TENSORFLOW,
    **dict.fromkeys(("dataset_args", "sample_check"), lambda r, of: is_path(r.dataset)),
    "collate": lambda r, of: is_path(r.dataset) and of != TENSORFLOW,
    "data_on_device": lambda r, of: r.dataset in DATASETS and DATASETS[r.dataset].is_in_memory and of != TENSORFLOW,
    "buffers": lambda r, of: is_path(r.model),
    **dict.fromkeys(("fused_optimizer", "cudnn_benchmark"), lambda r, of: of != TENSORFLOW),
    "compile": lambda r, of: of not in {TENSORFLOW, LIGHTNING},
    "xla": lambda r, of: of not in {TORCH, LIGHTNING},
    **dict.fromkeys(("reduction", "profile"), lambda r, of: of != LIGHTNING),
}
"""Whether an adapter (None: any) uses a key with the recipe's model and data set. A key that takes effect with another
flag counts as used, as lr_milestones with --lr-schedule step."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """How a run is started. Nothing of it changes what is trained."""

    output: Annotated[Path, recipes.expanding("--output")] | None = Field(
        None, description="run folder; left out: runs/RECIPE/JOB, or the unfinished run"
    )
    resume: Literal["auto", "never"] = Field("auto", description="auto continues from the newest whole checkpoint")
    engine: EngineName = Field(
        "auto", description="the library that joins the ranks; auto: local for one process, else horovod"
    )
    devices: str | None = Field(
        None, description="of an engine of one process, as cuda:0,cuda:1 or cpu,cpu; left out: all visible GPUs"
    )
    tracker: Annotated[tuple[TrackerName, ...], Field(min_length=1, max_length=len(TRACKERS) + 1)] = Field(
        ("tensorboard",), description="where rank 0 reports beside metrics.jsonl, several at once; none: nowhere"
    )
    evaluate: Annotated[Path, recipes.expanding("--evaluate")] | None = Field(
        None, description="train nothing, but print the metrics of this run's newest checkpoint on the validation set"
    )
    json: bool = Field(False, description="with --evaluate: as JSON")
    insecure_rendezvous: bool = Field(
        False, description="ranks need not prove that they belong together; where no key can be shared"
    )
    best: bool = False
    """Whether --evaluate takes the best checkpoint: --best without the name of a metric, which is a recipe's key."""


OPTIONS = {name: field for name, field in flags.fields_of(Options).items() if name != "best"}


def parse_run(prog: str, argv: Sequence[str], adapter: Adapter | None = None) -> tuple[Recipe, Options]:
    """RECIPE and flags (dash or underscore) -> the validated recipe and the options.

    The help, which exits on -h, leaves out what the recipe and the adapter cannot use. Raises RecipeError, in one line,
    for anything that breaks a rule.
    """
    run = Path(argv[1]) if argv[:1] == ["--evaluate"] and len(argv) > 1 else None
    name, given = parse_flags(prog, [_recipe_of(run), *argv] if run else argv, OPTIONS, adapter)
    if best := given.get("best") == "":  # without the name of a metric
        del given["best"]
    options = Options(**{key: given.pop(key) for key in OPTIONS if key in given}, best=best)
    if options.evaluate and (options.output or adapter == LIGHTNING):
        what = "--output" if options.output else "hvdtrain.lightning"
        raise RecipeError(f"--evaluate goes without {what}: it prints, in hvdtrain.torch or hvdtrain.tensorflow.")
    if options.evaluate and given.get("best"):
        metric = printable(given["best"], 200)
        raise RecipeError(f"--best names no metric with --evaluate: the run has chosen; drop {metric}.")
    if (options.best or options.json) and not options.evaluate:
        raise RecipeError(f"--{'best' if options.best else 'json'} needs --evaluate RUN; drop it.")
    if "none" in options.tracker and len(options.tracker) > 1:
        raise RecipeError(f"--tracker none stands alone, got {' '.join(options.tracker)}; drop none or the others.")
    recipe = recipes.load(name, given)
    if run:
        code = {key: path for key, path in recipes.named_by(recipe).items() if key.partition(" ")[0] not in given}
        check_owner(run, code, f"name a recipe of your own: RECIPE.yaml --evaluate {run}")
    return recipe, options


def _recipe_of(run: Path) -> str:
    """The path of the recipe in a run's folder. Raises RecipeError."""
    if (run / "run.json").is_file() and not (run / RECIPE).exists():
        raise RecipeError(
            f"{run} is the run of a program, which alone knows its network; let the program evaluate: in a loop of "
            "your own with run.each_once, in Lightning with trainer.validate, in Keras with model.evaluate."
        )
    return str(run / RECIPE)


def check_owner(run: Path, code: Mapping[str, str], remedy: str, file: str = RECIPE) -> None:
    """Raises RecipeError where that file of another user's run would choose the `code` that runs here."""
    path = run / file
    if code and not all(map(files.is_own, (run.stat(), path.lstat()))):
        named = " ".join(next(iter(code.items())))
        raise RecipeError(
            f"{path} is another user's and names code, {named}, which would run as yours; read it, and {remedy}"
        )


def parse_flags(
    prog: str,
    argv: Sequence[str],
    own: Mapping[str, FieldInfo],
    adapter: Adapter | None = None,
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    hidden: Collection[str] = (),
) -> tuple[str, dict[str, Any]]:
    """RECIPE and flags -> the recipe's name, and the values of the flags: those of the recipe's keys, and `own`.

    The help shows the `groups` first, and no flag that is `hidden`. Raises RecipeError.
    """
    if not argv or argv[0] in {"-h", "--help"}:
        print(usage(prog))
        raise SystemExit(0 if argv else 2)
    flags.check_arguments(argv)
    if argv[0].startswith("-"):
        first = printable(argv[0])
        raise RecipeError(f"the recipe comes first, got {first!r}; as in: {prog} {known()[0]} {first}")
    name, *rest = argv
    base = recipes.load(name)
    of_recipe = {key: field for key, field in Recipe.model_fields.items() if key not in {"name", *own}}
    defaults = {key: getattr(base, key) for key in of_recipe}
    shown = layout_of(base, adapter, groups, hidden)
    return name, flags.given({**own, **of_recipe}, f"{prog} {name}", rest, defaults, _description(shown), shown)


def usage(prog: str) -> str:
    """The help of a run without a recipe."""
    return (
        f"usage: {prog} RECIPE [flags]\n\n"
        f"recipes: {', '.join(known())};\n"
        "         an entry of one, as cifar100:bs256; or a file ending in .yaml\n"
        f"flags:   {prog} RECIPE --help\n"
        "         lists those that the recipe can use, with its values"
    )


def layout_of(
    recipe: Recipe,
    adapter: Adapter | None,
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    hidden: Collection[str] = (),
) -> Layout:
    """The layout of the help for a recipe: `groups` come first; flags that are `hidden`, or that the recipe cannot use,
    are left out."""
    first = {name for names in groups.values() for name in names}
    others = {title: tuple(name for name in names if name not in first) for title, names in GROUPS.items()}
    engines = [name for name, row in ENGINES.items() if adapter is None or adapter in row.classes]
    unused = {key for key, is_used in USED_BY.items() if not is_used(recipe, adapter)} - first
    unused |= {key for row in DATASETS.values() for key in row.keys} - {"seed", *keys_of(recipe.dataset), *first}
    unused |= set() if any(ENGINES[name].devices for name in engines) else {"devices"}
    text = f"{', '.join(('auto', *engines))}: {OPTIONS['engine'].description}"
    return Layout({**groups, **others}, {*hidden, *unused}, {"engine": text})


def _description(layout: Layout) -> str:
    """The text above the flags in the help."""
    unused = [name for names in GROUPS.values() for name in names if name in layout.hidden and name not in OPTIONS]
    names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
    return "Defaults are the recipe's values." + (
        f" Not shown, because only other models, data sets or frameworks use them: {names}." if names else ""
    )
