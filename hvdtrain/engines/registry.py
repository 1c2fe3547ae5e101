"""The engines that a run can name, one row each, whose class is loaded when a run opens the engine; the modules that a
framework is asked by; and Horovod's settings: its variables, and how gradients are fused.

In each cycle Horovod's ranks exchange which gradients are ready. Without GPUs the cycle is not Horovod's 1 ms. Between
hosts it is 10 ms: shorter ones took time from the processors that compute (four hosts at 1 Gbit/s and 50 us). On one
host it is half a millisecond, because a small step mostly waits for it (`linear` on two ranks over MPI took 6.4 s in
place of 7.1).
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core.compatibility import Adapter, EngineSpec
from hvdtrain.core.recipe import Recipe
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology
from hvdtrain.untrusted import whole_number

ENGINES = {
    row.name: row
    for row in (
        EngineSpec(
            "horovod",
            "Horovod",
            {
                "torch": "hvdtrain.torch.engines.horovod:HorovodEngine",
                "tensorflow": "hvdtrain.tensorflow.engines.horovod:HorovodEngine",
                "lightning": "hvdtrain.torch.engines.horovod:HorovodEngine",
            },
            "any launcher, any MPI, both frameworks",
            launcher="horovodrun",
            horovod_keys=True,
        ),
        EngineSpec(
            "local",
            "one process",
            {
                "torch": "hvdtrain.torch.engines.local:LocalEngine",
                "tensorflow": "hvdtrain.tensorflow.engines:Engine",
                "lightning": "hvdtrain.torch.engines.local:LocalEngine",
            },
            "one device; the reference of all others",
            horovod_keys=True,
        ),
        EngineSpec(
            "ddp",
            "torch.distributed",
            {
                "torch": "hvdtrain.torch.engines.ddp:DdpEngine",
                "lightning": "hvdtrain.torch.engines.ddp:DdpEngine",
            },
            "PyTorch alone, with nothing to build",
            launcher="torchrun",
            needs_address=True,
        ),
        EngineSpec(
            "dataparallel",
            "DataParallel",
            {"torch": "hvdtrain.torch.engines.local:DataParallelEngine"},
            "a script that must stay one process; slower than ddp",
            devices=2,
            gpus_only=True,
            splits_network=True,
            splits_statistics=True,
        ),
        EngineSpec(
            "modelparallel",
            "the split model",
            {"torch": "hvdtrain.torch.engines.local:ModelParallelEngine"},
            "a model that does not fit into one device",
            devices=2,
            splits_network=True,
        ),
        EngineSpec(
            "mirrored",
            "MirroredStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.distribute:MirroredEngine"},
            "the GPUs of one node, without a launcher",
            devices=1,
            replicas=True,
        ),
        EngineSpec(
            "multiworker",
            "MultiWorkerMirroredStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.distribute:MultiWorkerEngine"},
            "TensorFlow alone, with nothing to build",
            launcher="horovodrun",
            needs_address=True,
        ),
        EngineSpec(
            "central",
            "CentralStorageStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.distribute:CentralEngine"},
            "variables too large for every GPU",
            devices=1,
            replicas=True,
            remote_variables=True,
        ),
        EngineSpec(
            "parameter-server",
            "ParameterServerStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.distribute:ParameterServerEngine"},
            "workers of unequal speed: asynchronous, not the same numbers",
            launcher="horovodrun",
            remote_variables=True,
            asynchronous=True,
            needs_address=True,
        ),
    )
}


FRAMEWORKS = {"torch": "hvdtrain.torch", "tensorflow": "hvdtrain.tensorflow"}
"""The packages whose modules examples, flops and networks lower folders ask. They name none but here and in ENGINES:
tests/test_layers.py."""


@dataclass(frozen=True)
class Setup:
    """What an engine is opened with."""

    settings: Recipe
    topology: Topology
    devices: tuple[str, ...]
    """The devices of an engine of one process that takes several; () for other engines."""
    endpoints: Sequence[Endpoint]
    """The host and port of each rank, by rank."""
    timeline: Path | None = None
    """The file to which Horovod writes its timeline; None on all ranks but 0."""


def choose(name: str, topology: Topology) -> EngineSpec:
    """The engine of that name. "auto" is local for a process without a launcher, and else Horovod."""
    auto = "local" if topology.is_alone else "horovod"
    return ENGINES[auto if name == "auto" else name]


def devices_of(engine: EngineSpec, flag: str | None, visible: int, wanted: str) -> tuple[str, ...]:
    """The devices of an engine of one process: those of the flag, as in cpu,cpu, or the `visible` GPUs, or the CPU.

    `wanted` is the recipe's device. For an engine whose ranks use their own devices, the result is ().
    """
    if not engine.devices:
        return ()
    if flag is not None:
        return tuple(flag.split(","))
    gpus = 0 if wanted == "cpu" else visible
    return tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",)


def load(name: str, adapter: Adapter) -> Any:
    """The engine's class for that adapter. Raises EngineUnavailable where its library is not installed."""
    module, _, attribute = ENGINES[name].classes[adapter].partition(":")
    return getattr(importlib.import_module(module), attribute)


def module(framework: str, name: str) -> Any:
    """The module of that name in the framework's package."""
    return importlib.import_module(f"{FRAMEWORKS[framework]}.{name}")


FUSION_BYTES = 2 * 2**20  # the fastest, of 0.25 to 25 MiB, on one host and on four
CYCLE_MS_BETWEEN_HOSTS = 10
CYCLE_MS_ON_ONE_HOST = 0.5


def horovod_variables(settings: Recipe, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for Horovod that follow from the settings; others stay as they are in `environ`."""
    found = {"HOROVOD_AUTOTUNE": "1"} if settings.autotune else {}
    if has_timeline(settings):
        found["HOROVOD_TIMELINE"] = "DYNAMIC"  # without it start_timeline refuses
    if settings.fusion_threshold_mb is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(settings.fusion_threshold_mb * 2**20)
    if settings.cycle_time_ms is not None:
        found["HOROVOD_CYCLE_TIME"] = str(settings.cycle_time_ms)
    elif not (settings.autotune or _has_gpu(settings, environ)):
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
        cycle_ms = CYCLE_MS_ON_ONE_HOST if on_one_host else CYCLE_MS_BETWEEN_HOSTS
        found["HOROVOD_CYCLE_TIME"] = environ.get("HOROVOD_CYCLE_TIME", str(cycle_ms))
    return found


def has_timeline(settings: Recipe) -> bool:
    """Whether Horovod writes its timeline: where the settings request it or a profile."""
    return settings.horovod_timeline or settings.profile


def fusion_bytes(settings: Recipe, environ: Mapping[str, str]) -> int | None:
    """How many bytes of gradients PyTorch's engine sends together. None leaves this to Horovod: for Adasum, with GPUs,
    and where autotune finds the best number."""
    if settings.autotune or settings.reduction == "adasum" or _has_gpu(settings, environ):
        return None
    if settings.fusion_threshold_mb is not None:
        return settings.fusion_threshold_mb * 2**20
    chosen = whole_number(environ.get("HOROVOD_FUSION_THRESHOLD", ""))
    return FUSION_BYTES if chosen is None else chosen


def _has_gpu(settings: Recipe, environ: Mapping[str, str]) -> bool:
    return settings.device != "cpu" and visible_gpus(environ) > 0
