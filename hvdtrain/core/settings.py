"""What engines and the loop read of a recipe, and the same for a loop of one's own, which has no recipe."""

from dataclasses import dataclass
from typing import Literal, Protocol

Device = Literal["auto", "cpu", "cuda"]
MTBF = "mtbf_hours, the mean hours between failures of the whole job: those of one node divided by the job's nodes"
"""What an interval by itself needs, as a message says it."""


class EngineSettings(Protocol):
    """What an engine is opened with; a Recipe has all of it."""

    @property
    def device(self) -> Device: ...
    @property
    def compression(self) -> str: ...
    @property
    def reduction(self) -> str: ...
    @property
    def accumulation_steps(self) -> int: ...
    @property
    def fusion_threshold_mb(self) -> int | None: ...
    @property
    def cycle_time_ms(self) -> float | None: ...
    @property
    def autotune(self) -> bool: ...
    @property
    def horovod_timeline(self) -> bool: ...
    @property
    def profile(self) -> bool: ...


class ReadSettings(Protocol):
    """How batches are read; a Recipe has all of it."""

    @property
    def precision(self) -> str | None: ...
    @property
    def workers(self) -> int: ...
    @property
    def data_on_device(self) -> bool: ...
    @property
    def channels_last(self) -> bool: ...


class Intervals(Protocol):
    """When the loop logs, compares replicas and writes a checkpoint; a Recipe has all of it."""

    @property
    def log_every_steps(self) -> int: ...
    @property
    def guard_every_steps(self) -> int: ...
    @property
    def checkpoint_every_epochs(self) -> int: ...
    @property
    def checkpoint_every_steps(self) -> int | Literal["auto"] | None: ...
    @property
    def mtbf_hours(self) -> float | None: ...
    @property
    def keep_checkpoints(self) -> int: ...


@dataclass(frozen=True)
class OwnEngineSettings:
    """Without a recipe: its defaults, but for what a program says."""

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
class OwnReadSettings:
    """Without a recipe: batches as the program's data set makes them."""

    workers: int = 0
    precision: str | None = None
    data_on_device: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class OwnIntervals:
    """Without a recipe: its defaults, but for what a program says."""

    log_every_steps: int = 20
    guard_every_steps: int = 100
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | Literal["auto"] | None = None
    keep_checkpoints: int = 2
    mtbf_hours: float | None = None
