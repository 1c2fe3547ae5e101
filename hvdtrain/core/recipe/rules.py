"""The rules between the keys of a recipe."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from hvdtrain import datasets
from hvdtrain.core import optimizers
from hvdtrain.core.network import GPT
from hvdtrain.core.recipe.keys import CROSS_ENTROPIES, LOSSES, Keys
from hvdtrain.core.settings import MTBF
from hvdtrain.core.user_code import MODELS, NAMED, is_path
from hvdtrain.core.values import check_name
from hvdtrain.core.wording import misfit, nearest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable, quoted


def check(r: Keys) -> None:
    """Raises RecipeError where keys do not go together."""
    for text in (r.name, str(r.data_dir or ""), str(r.cache_dir or ""), *r.expected):
        check_name(text)
    if (r.batch_size is None) == (r.batch_size_per_rank is None):
        raise RecipeError(
            "the batch must be given once: batch_size (global) or batch_size_per_rank, "
            f"got batch_size={r.batch_size}, batch_size_per_rank={r.batch_size_per_rank}."
        )
    if r.warmup_epochs > r.epochs:
        raise RecipeError(f"warmup_epochs must lie in [0, epochs={r.epochs}], got {r.warmup_epochs:g}.")
    if r.lr_rule != "none" and r.base_batch_size is None:
        raise RecipeError(f"lr_rule {r.lr_rule} needs base_batch_size, the global batch that base_lr holds at.")
    if r.lr_schedule == "step" and not r.lr_milestones:
        raise RecipeError("lr_schedule step needs lr_milestones, the epochs at which the LR drops.")
    if r.lr_floor and r.lr_schedule != "cosine":
        raise RecipeError(f"lr_floor is where lr_schedule cosine ends, got {r.lr_schedule}; drop it.")
    if list(r.lr_milestones) != sorted(set(r.lr_milestones)):
        raise RecipeError(f"lr_milestones must rise, got {quoted(list(r.lr_milestones))}.")
    if r.checkpoint_every_steps == "auto" and r.mtbf_hours is None:
        raise RecipeError(f"checkpoint_every_steps auto needs {MTBF}.")
    optimizers.check_optimizer(r)
    _check_user_code(r)
    if r.reduction == "adasum" and (r.clip_norm or r.compression == "fp16"):
        raise RecipeError("reduction adasum goes with neither clip_norm nor compression fp16; drop them.")
    if r.reduction == "adasum" and r.precision == "float16":
        raise RecipeError("reduction adasum goes with float32 or bfloat16: float16's overflows are not shared.")
    if r.valid_crop > r.valid_resize:
        raise RecipeError(f"valid_crop must be at most valid_resize={r.valid_resize}, got {r.valid_crop}.")
    if "shuffle" not in datasets.keys_of(r.dataset) and (r.shuffle == "shards" or r.cache_dir):
        takers = " or ".join(name for name, row in datasets.DATASETS.items() if "shuffle" in row.keys)
        raise RecipeError(f"shuffle shards and cache_dir go with dataset {takers}, got {r.dataset}; drop them.")
    _check_speed(r)


def _check_speed(r: Keys) -> None:
    if r.xla and r.batch_norm == "sync":
        raise RecipeError("xla goes with batch_norm local or frozen: sync puts a collective into what XLA compiles.")
    if r.compile and r.batch_norm == "sync":
        raise RecipeError("compile goes with batch_norm local or frozen: sync puts a collective into what is compiled.")
    if r.label_smoothing and (r.model == "linear" or r.loss not in {None, *CROSS_ENTROPIES}):
        what = "model linear" if r.model == "linear" else f"loss {r.loss}"
        raise RecipeError(f"label_smoothing is for classes, which {what} has not; drop it.")
    if r.data_on_device and (is_path(r.dataset) or not datasets.DATASETS[r.dataset].is_in_memory):
        raise RecipeError(f"data_on_device needs a data set in memory, {r.dataset} is read from files; drop it.")
    if r.data_on_device and r.workers:
        raise RecipeError(f"data_on_device leaves nothing to read: workers must be 0, got {r.workers}.")


def _check_user_code(r: Keys) -> None:
    _check_name_or_path("model", r.model, (*MODELS, *NAMED))
    _check_name_or_path("dataset", r.dataset, tuple(datasets.DATASETS))
    _check_name_or_path("loss", r.loss or LOSSES[0], LOSSES)
    paths = {"step": r.step, "collate": r.collate, **{f"metrics {name}": path for name, path in r.metrics.items()}}
    for key, path in paths.items():
        if path is not None:
            _check_name_or_path(key, path, ())
    for name, given in r.metrics_args.items():
        if name not in r.metrics or not isinstance(given, Mapping):
            what = f"map arguments to values, got {quoted(given)}" if name in r.metrics else "be of a name in metrics"
            raise RecipeError(f"metrics_args {printable(name)} must {what}; as in f1: {{num_classes: 10}}.")
    is_user_data = is_path(r.dataset)
    if not is_path(r.model) and not is_user_data and (r.model == "linear") != (r.dataset == "linear"):
        raise RecipeError(f"model {r.model} cannot learn dataset {r.dataset}: linear goes with linear only.")
    if r.model == "gpt":
        _check_gpt(r)
    elif r.model_args and r.model in MODELS:
        raise RecipeError(f"model_args go with a model of your own, got model {r.model}; drop them.")
    if (r.dataset_args or r.collate) and not is_user_data:
        key = "dataset_args go" if r.dataset_args else "collate goes"
        raise RecipeError(f"{key} with a data set of your own, got dataset {r.dataset}; drop it.")
    if is_user_data and not (r.loss or r.step):
        raise RecipeError(
            f"dataset {r.dataset} needs a loss ({', '.join(LOSSES)}, or your own, as cells.losses:dice), or a step."
        )
    if r.step and (r.loss or r.metrics or r.label_smoothing):
        raise RecipeError("step computes loss and metrics itself; drop loss, metrics and label_smoothing.")
    for name in r.metrics:
        if not name.isidentifier() or name in {"loss", "acc1"}:
            raise RecipeError(f"a metric's name must be a word other than loss and acc1, got {quoted(name)}.")


def _check_gpt(r: Keys) -> None:
    try:
        sizes = GPT(**r.model_args)
    except ValidationError as error:
        raise RecipeError(misfit(error, "model gpt", "model_args", GPT.model_fields)) from None
    if sizes.width % sizes.heads:
        raise RecipeError(f"width in model_args must be a multiple of heads={sizes.heads}, got {sizes.width}.")


def _check_name_or_path(key: str, value: str, names: Sequence[str]) -> None:
    if value not in names and not is_path(value):
        either = f"one of {', '.join(names)}, or " if names else ""
        raise RecipeError(
            f"{key} must be {either}an import path such as package.module:name, got {quoted(value)}."
            f"{nearest(value, list(names))}"
        )
