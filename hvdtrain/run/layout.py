"""What the help of a run shows: its flags in groups, without those that the recipe cannot use."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from hvdtrain.core.compatibility import Adapter
from hvdtrain.core.flags import Layout
from hvdtrain.core.own_code import MODELS, is_path
from hvdtrain.core.recipe import Recipe
from hvdtrain.engines.registry import ENGINES

GROUPS = {
    "model": ("model", "model_args", "stem", "batch_norm", "buffers", "loss", "metrics", "step"),
    "data": (
        *("dataset", "dataset_args", "collate", "data_dir", "cache_dir", "shuffle", "decoder"),
        *("train_crop", "valid_resize", "valid_crop", "image_size", "classes", "examples", "workers"),
    ),
    "batch and epochs": ("batch_size", "batch_size_per_rank", "accumulation_steps", "epochs", "max_steps", "seed"),
    "learning rate": (
        *("base_lr", "base_batch_size", "lr_rule", "warmup_epochs"),
        *("lr_schedule", "lr_milestones", "lr_factor", "plateau_patience"),
    ),
    "optimizer": (
        *("optimizer", "optimizer_args", "momentum", "nesterov", "weight_decay"),
        *("ema_decay", "label_smoothing", "clip_norm"),
    ),
    "precision and speed": (
        *("precision", "channels_last", "fused_optimizer", "cudnn_benchmark", "compile", "xla", "data_on_device"),
        "device",
    ),
    "communication": (
        *("compression", "reduction", "fusion_threshold_mb", "cycle_time_ms", "autotune", "horovod_timeline"),
    ),
    "checkpoints and logs": (
        *("output", "resume", "checkpoint_every_epochs", "checkpoint_every_steps", "mtbf_hours", "keep_checkpoints"),
        *("guard_every_steps", "log_every_steps", "tracker", "profile", "expected"),
    ),
    "launch": ("engine", "devices", "insecure_rendezvous"),
}
"""Title: keys of a recipe and options of a run."""

TORCH, TENSORFLOW, LIGHTNING = "torch", "tensorflow", "lightning"
USED_BY: Mapping[str, Callable[[Recipe, Adapter | None], bool]] = {
    "model_args": lambda r, of: r.model not in MODELS,
    "stem": lambda r, of: r.model == "resnet50",
    "batch_norm": lambda r, of: r.model != "linear",
    "label_smoothing": lambda r, of: r.model != "linear",
    "channels_last": lambda r, of: r.model != "linear" and of != TENSORFLOW,
    "dataset_args": lambda r, of: is_path(r.dataset),
    "collate": lambda r, of: is_path(r.dataset) and of != TENSORFLOW,
    "data_dir": lambda r, of: r.dataset in {"cifar100", "imagenet"},
    **dict.fromkeys(
        ("cache_dir", "shuffle", "decoder", "train_crop", "valid_resize", "valid_crop"),
        lambda r, of: r.dataset == "imagenet",
    ),
    **dict.fromkeys(("image_size", "classes", "examples"), lambda r, of: r.dataset == "synthetic"),
    "data_on_device": lambda r, of: r.dataset != "imagenet" and not is_path(r.dataset) and of != TENSORFLOW,
    "buffers": lambda r, of: is_path(r.model) and of != TENSORFLOW,
    **dict.fromkeys(("fused_optimizer", "cudnn_benchmark"), lambda r, of: of != TENSORFLOW),
    "compile": lambda r, of: of not in {TENSORFLOW, LIGHTNING},
    "xla": lambda r, of: of not in {TORCH, LIGHTNING},
    **dict.fromkeys(("reduction", "profile"), lambda r, of: of != LIGHTNING),
}
"""Whether an adapter (None: any) uses a key with the recipe's model and data set. What another flag brings into use, as
--lr-schedule step does lr_milestones, is used."""


def of(
    recipe: Recipe,
    adapter: Adapter | None,
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    hidden: Collection[str] = (),
) -> Layout:
    """The layout of the help of a recipe's run: `groups` first, without what is `hidden` or of no use to the recipe."""
    first = {name for names in groups.values() for name in names}
    others = {title: tuple(name for name in names if name not in first) for title, names in GROUPS.items()}
    engines = [name for name, row in ENGINES.items() if adapter is None or adapter in row.classes]
    unused = {key for key, is_used in USED_BY.items() if not is_used(recipe, adapter)} - first
    if not any(ENGINES[name].devices for name in engines):
        unused.add("devices")
    return Layout({**groups, **others}, {*hidden, *unused}, {"engine": f"{{{','.join(('auto', *engines))}}}"})


def description(layout: Layout) -> str:
    """What the help says above the flags."""
    unused = [name for names in GROUPS.values() for name in names if name in USED_BY and name in layout.hidden]
    names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
    return "Defaults are the recipe's values." + (
        f" Not shown, because only other models, data sets or frameworks use them: {names}." if names else ""
    )
