"""The engines that a run may ask for by name: one row each, whose class is loaded when a run opens it."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core.compatibility import Adapter, EngineSpec
from hvdtrain.core.settings import EngineSettings
from hvdtrain.launch.rendezvous import Endpoint
from hvdtrain.launch.topology import Topology

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
            compressions=("none", "fp16", "fp64"),
        ),
        EngineSpec(
            "local",
            "one process",
            {
                "torch": "hvdtrain.torch.engines.local:LocalEngine",
                "tensorflow": "hvdtrain.tensorflow.engines.local:LocalEngine",
                "lightning": "hvdtrain.torch.engines.local:LocalEngine",
            },
            "one device; the reference of all others",
            horovod_keys=True,
            compressions=("none", "fp16", "fp64"),
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
            compressions=("none", "fp16", "bf16", "fp64"),
        ),
        EngineSpec(
            "dataparallel",
            "DataParallel",
            {"torch": "hvdtrain.torch.engines.dataparallel:DataParallelEngine"},
            "a script that must stay one process; slower than ddp",
            devices=2,
            gpus_only=True,
            splits_network=True,
            splits_statistics=True,
        ),
        EngineSpec(
            "modelparallel",
            "the split model",
            {"torch": "hvdtrain.torch.engines.modelparallel:ModelParallelEngine"},
            "a model that does not fit into one device",
            devices=2,
            splits_network=True,
        ),
        EngineSpec(
            "mirrored",
            "MirroredStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.mirrored:MirroredEngine"},
            "the GPUs of one node, without a launcher",
            devices=1,
            replicas=True,
        ),
        EngineSpec(
            "multiworker",
            "MultiWorkerMirroredStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.multiworker:MultiWorkerEngine"},
            "TensorFlow alone, with nothing to build",
            launcher="horovodrun",
            needs_address=True,
        ),
        EngineSpec(
            "central",
            "CentralStorageStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.central:CentralEngine"},
            "variables too large for every GPU",
            devices=1,
            replicas=True,
            remote_variables=True,
        ),
        EngineSpec(
            "parameter-server",
            "ParameterServerStrategy",
            {"tensorflow": "hvdtrain.tensorflow.engines.parameter_server:ParameterServerEngine"},
            "workers of unequal speed: asynchronous, not the same numbers",
            launcher="horovodrun",
            remote_variables=True,
            asynchronous=True,
            needs_address=True,
        ),
    )
}


@dataclass(frozen=True)
class Setup:
    """What every engine is opened with."""

    settings: EngineSettings
    topology: Topology
    devices: tuple[str, ...]
    """Of an engine of one process that takes several; () elsewhere."""
    endpoints: Sequence[Endpoint]
    """Where each rank can be reached, by rank."""
    timeline: Path | None = None
    """Where Horovod is to write its timeline; on rank 0 alone."""


def choose(name: str, launcher: str) -> EngineSpec:
    """The engine of that name; "auto" is local for one process, else Horovod."""
    auto = "local" if launcher == "alone" else "horovod"
    return ENGINES[auto if name == "auto" else name]


def devices_of(engine: EngineSpec, flag: str | None, visible: int, wanted: str) -> tuple[str, ...]:
    """The devices of an engine of one process: those of the flag, as in cpu,cpu, else the `visible` GPUs, else the CPU.

    `wanted` is the recipe's device; () for an engine that takes a rank's own.
    """
    if not engine.devices:
        return ()
    if flag is not None:
        return tuple(flag.split(","))
    gpus = 0 if wanted == "cpu" else visible
    return tuple(f"cuda:{index}" for index in range(gpus)) or ("cpu",)


def load(name: str, adapter: Adapter) -> Any:
    """The class of the engine's row for that adapter. Raises EngineUnavailable where its library is missing."""
    module, _, attribute = ENGINES[name].classes[adapter].partition(":")
    return getattr(importlib.import_module(module), attribute)
