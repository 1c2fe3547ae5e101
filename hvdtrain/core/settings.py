"""What engines and the loop read of a recipe, and the same for a loop of the user's, which has none."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

Device = Literal["auto", "cpu", "cuda"]
MTBF = "mtbf_hours, the mean hours between failures of the whole job: those of one node divided by the job's nodes"
"""What an interval by itself needs, as a message says it."""


@dataclass(frozen=True)
class Compression:
    """How gradients are communicated."""

    dtype: str
    """The name of the communicated type, in NumPy, PyTorch and TensorFlow; "" leaves gradients as they are."""
    bytes: int | None
    """Bytes of a communicated number; None: those of a parameter."""
    engines: tuple[str, ...] = ()
    """The engines that can; () is all, as where one process communicates nothing and it changes nothing."""
    text: str = ""
    """What the help says of it."""


COMPRESSIONS = {
    "none": Compression("", None),
    "fp16": Compression("float16", 2, ("horovod", "local", "ddp")),
    "bf16": Compression("bfloat16", 2, ("ddp",), "engine ddp's"),
    "fp64": Compression("float64", 8, text="sums that no order of ranks changes"),
}


@dataclass(frozen=True)
class UserEngineSettings:
    """What an engine is opened with, as a Recipe has it; its defaults, but for what a program says."""

    device: Device = "auto"
    compression: str = "none"
    reduction: str = "average"
    accumulation_steps: int = 1
    fusion_threshold_mb: int | None = None
    cycle_time_ms: float | None = None
    autotune: bool = False
    horovod_timeline: bool = False
    profile: bool = False


@dataclass(frozen=True)
class UserReadSettings:
    """How batches are read: as the program's data set makes them."""

    workers: int = 0
    precision: str | None = None
    data_on_device: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class UserIntervals:
    """When the loop logs, compares replicas and writes a checkpoint; a recipe's defaults, but for what a program
    says."""

    log_every_steps: int = 20
    guard_every_steps: int = 100
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | Literal["auto"] | None = None
    keep_checkpoints: int = 2
    mtbf_hours: float | None = None


EngineSettings: TypeAlias = Union["Recipe", UserEngineSettings]
ReadSettings: TypeAlias = Union["Recipe", UserReadSettings]
Intervals: TypeAlias = Union["Recipe", UserIntervals]
