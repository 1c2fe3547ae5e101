"""The keys of a recipe: every field is a key of the YAML entry and a flag of the command line."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from hvdtrain import datasets
from hvdtrain.core import optimizers
from hvdtrain.core.settings import COMPRESSIONS
from hvdtrain.core.values import (
    Arguments,
    Count,
    Every,
    Figures,
    Folder,
    Fraction,
    Number,
    Paths,
    Seed,
    Side,
    Text,
    Workers,
)

LOSSES = ("cross_entropy", "mse", "bce_with_logits", "l1")
CROSS_ENTROPIES = {"cross_entropy", "torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"}
"""The names of the cross entropy."""

if TYPE_CHECKING:
    CompressionName = str
else:
    CompressionName = Literal[tuple(COMPRESSIONS)]


class Keys(BaseModel):
    """What to train, how, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Text = Field(description="recipe and entry, as in cifar100:bs256")
    model: Text = Field(
        description="the network: linear, resnet50, resnet101, gpt, inception_v3, vgg16; or yours, as cells.nets:UNet"
    )
    model_args: Arguments = Field(
        {}, description="arguments of your own model, as depth=3; gpt: layers, heads, width, dropout"
    )
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
    lr_floor: Fraction = Field(0.0, description="cosine: the fraction of the highest LR at which it ends")
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
