"""The settings that engines and the loop read from a recipe, or from the user's own loop, which has no recipe."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

if TYPE_CHECKING:
    from hvdtrain.core.recipe import Recipe

Device = Literal["auto", "cpu", "cuda"]
MTBF = "mtbf_hours, the mean hours between failures of the whole job: those of one node divided by the job's nodes"
"""What `checkpoint_every_steps: auto` needs, in the words of messages."""


@dataclass(frozen=True)
class Compression:
    """How gradients are communicated."""

    dtype: str
    """The type in which gradients are sent, by its name in NumPy, PyTorch and TensorFlow; "" for their own type."""
    bytes: int | None
    """Bytes of a number that is sent; None where they are those of a parameter."""
    engines: tuple[str, ...] = ()
    """The engines that have this compression; () for all."""
    text: str = ""
    """What --help says of it."""


COMPRESSIONS = {
    "none": Compression("", None),
    "fp16": Compression("float16", 2, ("horovod", "local", "ddp")),
    "bf16": Compression("bfloat16", 2, ("ddp",), "engine ddp's"),
    "fp64": Compression("float64", 8, text="sums that no order of ranks changes"),
}


@dataclass(frozen=True)
class UserEngineSettings:
    """The settings of an engine for the user's own loop, with the names and defaults of a Recipe's keys."""

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
    """How batches of the user's own loop are read: as its data set makes them."""

    workers: int = 0
    precision: str | None = None
    data_on_device: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class UserIntervals:
    """When the user's own loop logs, compares replicas and writes checkpoints, with the defaults of a Recipe's keys."""

    log_every_steps: int = 20
    guard_every_steps: int = 100
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | Literal["auto"] | None = None
    keep_checkpoints: int = 2
    mtbf_hours: float | None = None


EngineSettings: TypeAlias = Union["Recipe", UserEngineSettings]
ReadSettings: TypeAlias = Union["Recipe", UserReadSettings]
Intervals: TypeAlias = Union["Recipe", UserIntervals]
