"""The engines that a run may ask for by name, and what each of them cannot do: told before a framework is loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import DeviceError, RecipeError
from hvdtrain.recipe import Recipe

Adapter = Literal["torch", "tensorflow", "lightning"]
Name = Literal[
    "auto", "horovod", "local", "ddp", "dataparallel", "modelparallel",
    "mirrored", "multiworker", "central", "parameter-server",
]  # fmt: skip

DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class Engine:
    """One row of the table: a library that joins ranks or devices."""

    title: str
    """What the library is called in a message."""
    adapters: tuple[Adapter, ...]
    one_process: bool = False
    """Whether one process holds everything: several ranks are then refused."""
    devices: int = 0
    """How many devices of its one process it needs at least; 0 where it takes a rank's own."""
    gpus_only: bool = False
    """Whether these devices can be nothing else than GPUs."""
    replicas: bool = False
    """Whether each of these devices trains on a share of its own."""
    asynchronous: bool = False
    """Whether each update is one rank's, of a batch that no other shares."""
    meets: bool = False
    """Whether its ranks must know the chief's address before it starts."""
    compressions: tuple[str, ...] = ("none", "fp64")
    """What its gradients may travel as. In one process nothing travels, and fp64 changes nothing."""


ENGINES: Mapping[str, Engine] = {
    "horovod": Engine("Horovod", ("torch", "tensorflow", "lightning"), compressions=("none", "fp16", "fp64")),
    "local": Engine(
        "one process", ("torch", "tensorflow", "lightning"), one_process=True, compressions=("none", "fp16", "fp64")
    ),
    "ddp": Engine(
        "torch.distributed", ("torch", "lightning"), meets=True, compressions=("none", "fp16", "bf16", "fp64")
    ),
    "dataparallel": Engine("DataParallel", ("torch",), one_process=True, devices=2, gpus_only=True),
    "modelparallel": Engine("the split model", ("torch",), one_process=True, devices=2),
    "mirrored": Engine("MirroredStrategy", ("tensorflow",), one_process=True, devices=1, replicas=True),
    "multiworker": Engine("MultiWorkerMirroredStrategy", ("tensorflow",), meets=True),
    "central": Engine("CentralStorageStrategy", ("tensorflow",), one_process=True, devices=1, replicas=True),
    "parameter-server": Engine("ParameterServerStrategy", ("tensorflow",), asynchronous=True, meets=True),
}

# Keys of a recipe that only Horovod heeds, and what they are where they ask for nothing.
HOROVODS = {
    "reduction": "average", "autotune": False, "horovod_timeline": False, "fusion_threshold_mb": None,
    "cycle_time_ms": None,
}  # fmt: skip

# Engines that put one process's network on several devices.
SEVERAL_DEVICES = ("dataparallel", "modelparallel")

# Engines whose replicas compute with variables that lie on another device.
FAR_VARIABLES = ("central", "parameter-server")


def choose(name: Name, adapter: Adapter, launcher: str) -> str:
    """The engine's name; "auto" is local for one process, else Horovod. Raises RecipeError."""
    if name == "auto":
        return "local" if launcher == "alone" else "horovod"
    known = [engine for engine, row in ENGINES.items() if adapter in row.adapters]
    if name not in known:
        raise RecipeError(f"engine {name} is none of hvdtrain.{adapter}'s; take one of {', '.join(known)}.")
    return name


def check(name: str, recipe: Recipe) -> None:
    """Refuses what the recipe asks of the engine and the engine has not. Raises RecipeError."""
    engine = ENGINES[name]
    if name not in {"horovod", "local"}:
        for key, nothing in HOROVODS.items():
            if (asked := getattr(recipe, key)) != nothing:
                raise RecipeError(f"{key} {asked} is Horovod's alone, this run takes engine {name}; drop it.")
    if name == "dataparallel" and recipe.batch_norm == "sync":
        raise RecipeError(
            "batch_norm sync needs ranks, which engine dataparallel has not; take local, or --engine ddp."
        )
    if recipe.compile and name in SEVERAL_DEVICES:
        raise RecipeError(f"compile cannot be with engine {name}, whose network lies on several devices; drop it.")
    if recipe.xla and name in FAR_VARIABLES:
        raise RecipeError(
            f"xla cannot be with engine {name}: XLA has no access to variables on another device "
            "(tensorflow.org/xla/known_issues); drop it."
        )
    if engine.asynchronous:
        _check_asynchronous(name, recipe)
    if recipe.compression not in engine.compressions:
        raise RecipeError(
            f"compression must be one of {', '.join(engine.compressions)} with engine {name}, got {recipe.compression}."
        )


def _check_asynchronous(name: str, recipe: Recipe) -> None:
    if recipe.accumulation_steps > 1:
        raise RecipeError(
            f"accumulation_steps must be 1 with engine {name}, whose workers update by themselves, got "
            f"{recipe.accumulation_steps}; take a smaller batch_size."
        )
    if recipe.precision == "float16":
        raise RecipeError(
            f"precision float16 cannot be with engine {name}: its workers would change the loss scale under one "
            "another; take bfloat16."
        )


def devices(name: str, said: str | None, visible: int, wanted: str) -> tuple[str, ...]:
    """The devices of an engine of one process: those `said`, as in cpu,cpu, else the `visible` GPUs, else the CPU.

    `wanted` is the recipe's device; () for an engine that takes a rank's own. Raises DeviceError.
    """
    engine = ENGINES[name]
    if not engine.devices:
        if said is not None:
            several = [other for other, row in ENGINES.items() if row.devices]
            raise DeviceError(f"--devices goes with engine {', '.join(several)}, got engine {name}; drop it.")
        return ()
    gpus = 0 if wanted == "cpu" else visible
    found = tuple(said.split(",")) if said is not None else tuple(f"cuda:{i}" for i in range(gpus)) or ("cpu",)
    if wrong := [device for device in found if not DEVICE.fullmatch(device)]:
        raise DeviceError(f"--devices must list devices such as cuda:0,cuda:1 or cpu,cpu, got {wrong[0]!r}.")
    if len(found) < engine.devices:
        raise DeviceError(
            f"engine {name} needs at least {engine.devices} devices, this process has {len(found)} ({found[0]}); "
            "ask for more GPUs, or name them: --devices cuda:0,cuda:1"
        )
    if engine.gpus_only and "cpu" in found:
        raise DeviceError(f"engine {name} knows GPUs only, got --devices {said}; take --engine modelparallel or ddp.")
    return found
