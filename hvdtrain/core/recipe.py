"""Recipes, which say what to train: named YAML entries and flags become one validated, frozen value."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from hvdtrain import datasets
from hvdtrain.core import optimizers
from hvdtrain.core.settings import COMPRESSIONS, MTBF
from hvdtrain.core.user_code import MODELS, NAMED, is_path
from hvdtrain.core.values import (
    BOOLEANS_OF_YAML_1_1,
    LONGEST_NAME,
    Arguments,
    Every,
    Workers,
    check_name,
    entry_keys,
    over,
    shown_key,
)
from hvdtrain.core.wording import nearest, rule
from hvdtrain.errors import RecipeError
from hvdtrain.files import expanded, with_home
from hvdtrain.untrusted import printable, quoted

LOSSES = ("cross_entropy", "mse", "bce_with_logits", "l1")
CROSS_ENTROPIES = {"cross_entropy", "torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"}
"""The names of the cross entropy."""

if TYPE_CHECKING:
    CompressionName = str
else:
    CompressionName = Literal[tuple(COMPRESSIONS)]

# These bounds are far above what anybody trains with; a product of three such numbers does not overflow.
Number = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
Side = Annotated[int, Field(gt=0, le=4096)]
Text = Annotated[str, Field(max_length=LONGEST_NAME)]
Paths = Annotated[dict[Text, Text], Field(max_length=100)]
Folder = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(with_home(str(path))))]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Figures = Annotated[dict[Text, Annotated[float, Field(strict=True)]], Field(max_length=100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what every framework's generator takes


def expanding(key: str) -> AfterValidator:
    """The validator of a flag's path, in which environment variables and ~ are replaced by their values."""
    return AfterValidator(lambda path: Path(expanded(str(path), key)))


class Recipe(BaseModel):
    """What to train. Every field is a key of the YAML entry and a flag of the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Text = Field(description="recipe and entry, as in cifar100:bs256")
    model: Text = Field(
        description="the network: linear, resnet50, resnet101, inception_v3, vgg16, or your own, as cells.nets:UNet"
    )
    model_args: Arguments = Field({}, description="arguments of your own model, as depth=3")
    stem: Literal["imagenet", "cifar"] = Field("imagenet", description="resnet50: cifar has stride 1 and no max-pool")
    dataset: Text = Field(description=f"the data set: {', '.join(datasets.DATASETS)}, or your own, as cells.data:Cells")
    dataset_args: Arguments = Field(
        {}, description="arguments of your own data set; $NAME stands for that variable's value"
    )
    collate: Text | None = Field(
        None, description="PyTorch, your own data set: what makes a batch of samples, as cells.data:collate"
    )
    sample_check: Literal["on", "off"] = Field(
        "on", description="your own data set: some examples are compared over the ranks and with the checkpoint"
    )
    loss: Text | None = Field(
        None, description=f"{', '.join(LOSSES)}, or your own, as cells.losses:dice; left out: by the data set"
    )
    metrics: Paths = Field(
        {},
        description="your own, as iou=cells.metrics:iou: values of the examples [n], or (sum, count); or of the whole "
        "validation set, as f1=torchmetrics.classification:MulticlassF1Score",
    )
    metrics_args: Arguments = Field({}, description="arguments of metrics by name, as f1={num_classes: 10}")
    step: Text | None = Field(
        None,
        description="instead of loss and metrics: a function of model and batch that returns both, as cells.train:step",
    )
    data_dir: Folder | None = Field(None, description="folder of the data set")
    cache_dir: Folder | None = Field(
        None, description="imagenet, packed: folder of the node's own, as $TMPDIR or /dev/shm, to copy the set to"
    )
    shuffle: Literal["global", "shards"] = Field(
        "global", description="imagenet, packed; shards: each rank reads shard after shard, another order for other N"
    )
    decoder: datasets.Decoder = Field(
        "turbo", description="imagenet, training JPEGs; turbo: libjpeg-turbo and OpenCV; pillow: exact"
    )
    exif: datasets.Exif = Field(
        "ignore", description="imagenet; apply: images are turned upright by their EXIF orientation"
    )
    train_crop: Side = Field(224, description="imagenet: side of a training image, pixels")
    valid_resize: Side = Field(256, description="imagenet: shorter side before the crop, pixels")
    valid_crop: Side = Field(224, description="imagenet: side of a validation image, pixels")
    image_size: Side = Field(32, description="synthetic: side of an image, pixels")
    classes: Annotated[int, Field(gt=0, le=10**7)] = Field(100, description="synthetic: number of classes")
    examples: Number = Field(50_000, description="synthetic: number of training images")

    batch_size: Number | None = Field(None, description="global batch: examples in one update, all ranks")
    batch_size_per_rank: Number | None = Field(None, description="instead of batch_size: examples a rank")
    accumulation_steps: Number = Field(1, description="micro-batches into which a rank's local batch is divided")
    epochs: Number = Field(description="passes over the training set")
    max_steps: Annotated[int, Field(gt=0, le=10**15)] | None = Field(None, description="stop after this many updates")
    seed: Seed = Field(0, description="seed of the weights, the order and the augmentation")

    base_lr: Annotated[float, Field(gt=0, le=1e38)] = Field(description="learning rate at base_batch_size")
    base_batch_size: Number | None = Field(None, description="global batch that base_lr holds at")
    lr_rule: Literal["none", "linear", "sqrt"] = Field("none", description="how the LR follows the batch")
    warmup_epochs: Annotated[float, Field(ge=0)] = Field(0.0, description="epochs of linear warm-up from 0")
    lr_schedule: Literal["constant", "step", "cosine", "plateau"] = Field("constant", description="the decay")
    lr_milestones: Annotated[tuple[Number, ...], Field(strict=False, max_length=1000)] = Field(
        (), description="step: epochs at which the LR is multiplied by lr_factor"
    )
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="step, plateau: the multiplier")
    plateau_patience: Count = Field(10, description="plateau: epochs without a better validation loss")
    optimizer: Text = Field("sgd", description=f"{', '.join(optimizers.NAMED)}; or yours, as torch.optim:RAdam")
    optimizer_args: Arguments = Field({}, description="arguments of the optimizer, as betas=[0.9,0.99] eps=1e-6")
    momentum: Fraction = Field(0.0, description="momentum of the optimizers that have one, as sgd")
    nesterov: bool = Field(False, description="sgd: Nesterov momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="weight decay of any named optimizer")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="decay of an average of the weights, which validation then takes"
    )
    label_smoothing: Fraction = Field(0.0, description="fraction of the target spread over all classes; training only")
    clip_norm: PositiveFloat | None = Field(None, description="largest norm of the averaged gradient")

    precision: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32", description="bfloat16, float16: mixed; float64: to compare runs exactly"
    )
    batch_norm: Literal["local", "sync", "frozen"] = Field(
        "local", description="statistics of a rank's local batch, of the global batch, or left as they are"
    )
    buffers: Literal["local", "average", "rank_0"] = Field(
        "local", description="what a forward pass writes into buffers other than BatchNorm's, over the ranks"
    )
    channels_last: bool = Field(False, description="PyTorch: NHWC memory layout, which TensorFlow always has")
    fused_optimizer: bool = Field(False, description="PyTorch: one kernel for the whole update")
    cudnn_benchmark: bool = Field(False, description="PyTorch: let cuDNN time its algorithms first")
    compile: bool = Field(False, description="PyTorch: compile the network, on one GPU the update as one CUDA graph")
    data_on_device: bool = Field(False, description="PyTorch: keep the data set on the device and augment it there")
    xla: bool = Field(False, description="TensorFlow: compile forward and backward with XLA")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to train")
    workers: Workers = Field(
        0, description="readers a rank: processes (PyTorch), threads (TensorFlow); 0 is one thread, auto by its cores"
    )

    compression: CompressionName = Field(
        "none",
        description="; ".join(
            (
                "communicated dtype of gradients",
                *(f"{name}: {row.text}" for name, row in COMPRESSIONS.items() if row.text),
            )
        ),
    )
    reduction: Literal["average", "adasum"] = Field("average", description="how gradients are combined")
    fusion_threshold_mb: Annotated[int, Field(ge=0, le=2**20)] | None = Field(
        None, description="most MiB of gradients that are communicated together"
    )
    cycle_time_ms: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="Horovod's cycle, milliseconds"
    )
    autotune: bool = Field(False, description="let Horovod tune threshold and cycle")
    # Not `timeline`: horovodrun would read --timeline as an abbreviation of its own flags.
    horovod_timeline: bool = Field(False, description="write Horovod's timeline into the run folder")
    profile: bool = Field(False, description="trace ten steps, Horovod's timeline; PyTorch: a step's phases")

    log_every_steps: Number = Field(20, description="steps between two log lines")
    checkpoint_every_epochs: Number = Field(1, description="epochs between two checkpoints")
    checkpoint_every_steps: Every = Field(
        None, description="checkpoints inside an epoch too; auto: as often as lost work is worth, by mtbf_hours"
    )
    mtbf_hours: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None, description="checkpoint_every_steps auto: mean hours between failures of the whole job"
    )
    keep_checkpoints: Number = Field(2, description="how many of the newest are kept, besides the best")
    check_replicas_every_steps: Number = Field(100, description="steps between two comparisons of the replicas")
    expected: Figures = Field(
        {}, description="validation metrics that the recipe is known to reach, as valid_acc1=0.978; the report compares"
    )


def load(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe `FILE[:ENTRY]`, in which `overrides` replace keys.

    FILE is the name of a shipped recipe or the path of a .yaml file; ENTRY is "default" where it is left out. Raises
    RecipeError for anything that breaks a rule.
    """
    return validate({**over(entry_keys(name, (), {}), overrides or {}), "name": name})


def validate(keys: Mapping[str, Any]) -> Recipe:
    """The recipe with these keys. Raises RecipeError, which names the first key that breaks a rule."""
    try:
        recipe = Recipe.model_validate({shown_key(key): value for key, value in keys.items()})
    except ValidationError as error:
        raise RecipeError(_first_line(error)) from None
    _check_together(recipe)
    return recipe


def of_program(**keys: Any) -> Recipe:
    """What engine, loop and loader of a user's program, which has no recipe, read of one: these keys, which no rule
    checks, and the defaults of the others."""
    return Recipe.model_construct(name="program", **keys)


def fixed_workers(recipe: Recipe) -> int:
    """The number of readers; 0 where a run has not replaced `auto`: whoever reads a few examples needs none."""
    return 0 if recipe.workers == "auto" else recipe.workers


def named_by(r: Recipe) -> dict[str, str]:
    """The import paths in a recipe, by key."""
    paths = {key: getattr(r, key) or "" for key in ("model", "dataset", "collate", "loss", "step", "optimizer")}
    paths |= {f"metrics {name}": path for name, path in r.metrics.items()}
    return {key: path for key, path in paths.items() if is_path(path)}


def located(recipe: Recipe) -> Recipe:
    """The recipe with the environment variables in its folders replaced. The recipe itself keeps $NAME, because values
    differ from node to node and from job to job. Raises RecipeError where a variable is not set."""
    folders = {"data_dir": recipe.data_dir, "cache_dir": recipe.cache_dir}
    found = {key: Path(expanded(str(path), key)) for key, path in folders.items() if path}
    return recipe.model_copy(update=found)


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML from which `load` makes an equal recipe."""
    text = io.StringIO()
    keys = recipe.model_dump(mode="json", exclude={"name"})
    YAML().dump({"default": _marked(keys)}, text)
    return f"# {recipe.name}, resolved\n{text.getvalue()}"


def _marked(value: Any) -> Any:
    """The value, with quotes around those texts that are refused without."""
    if isinstance(value, dict):
        return {key: _marked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked(each) for each in value]
    is_refused = isinstance(value, str) and value.lower() in BOOLEANS_OF_YAML_1_1
    return DoubleQuotedScalarString(value) if is_refused else value


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"unknown key {quoted(key)}.{nearest(key, list(Recipe.model_fields))}"
    if first["type"] == "missing":
        return f"{key} is missing: {Recipe.model_fields[key].description}."
    subject = f"each of {key}" if len(first["loc"]) > 1 else key
    return f"{subject} must {rule(first)}, got {quoted(first['input'])}."


def _check_together(recipe: Recipe) -> None:
    r = recipe
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


def _check_speed(r: Recipe) -> None:
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


def _check_user_code(r: Recipe) -> None:
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
    if r.model_args and r.model in MODELS:
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


def _check_name_or_path(key: str, value: str, names: Sequence[str]) -> None:
    if value not in names and not is_path(value):
        either = f"one of {', '.join(names)}, or " if names else ""
        raise RecipeError(
            f"{key} must be {either}an import path such as package.module:name, got {quoted(value)}."
            f"{nearest(value, list(names))}"
        )
