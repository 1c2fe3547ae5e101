"""`python -m hvdtrain.tools.doctor.child torch`: a process of the doctor's, which imports a framework and Horovod.

It prints what it finds; a crash ends only this process. With `--join` it is one rank of the doctor's allreduce, and
reads what the doctor found on its host from stdin.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.tools.bench import measure
from hvdtrain.tools.doctor import gpus
from hvdtrain.tools.doctor.findings import MARK, NO_KERAS

MEGABYTES = (1, 16, 64)
SECONDS_PER_SIZE = 0.3
LONGEST = 2.0


def imported(name: str) -> tuple[Any, Any]:
    """The modules of the framework and of Horovod for it. Prints about each as soon as it is imported."""
    module = importlib.import_module(name)
    emit(version=module.__version__, **(_cuda(module) if name == "torch" else _keras(module)))
    hvd = importlib.import_module(f"horovod.{name}")
    emit(nccl_built=bool(hvd.nccl_built()))
    return module, hvd


def emit(**values: Any) -> None:
    """Prints the values with a mark, so that the doctor finds them between the output of libraries."""
    print(MARK + json.dumps(values), flush=True)


def _cuda(torch: Any) -> dict[str, str]:
    cuda = torch.version.cuda or ""
    nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else ()
    return {"cuda": cuda, "nccl": ".".join(map(str, nccl))}


def _keras(tensorflow: Any) -> dict[str, str]:
    cuda = tensorflow.sysconfig.get_build_info().get("cuda_version", "")
    try:
        keras = tensorflow.keras
        return {"keras": importlib.metadata.version("keras" if hasattr(keras, "ops") else "tf_keras"), "cuda": cuda}
    except ImportError:  # TF_USE_LEGACY_KERAS is set
        return {"keras": NO_KERAS, "cuda": cuda}


def join(framework: str) -> None:
    """Joins the other ranks. Prints rank and size once Horovod has them, and on rank 0 what all ranks measured."""
    from hvdtrain.launch import rendezvous
    from hvdtrain.launch.topology import discover
    from hvdtrain.ranks.world import World, joined

    mine = json.load(sys.stdin)
    topology = discover(os.environ)
    world = World(topology, rendezvous.from_launcher(topology, os.environ))
    world.start()
    with joined(world, framework, "horovod", os.environ), tempfile.TemporaryDirectory() as logs:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{logs}/nccl"}
        _measured(framework, mine, Path(logs, "nccl"))
    world.leave()


def _measured(framework: str, mine: dict[str, Any], log: Path) -> None:
    module, hvd = imported(framework)
    hvd.init()
    emit(rank=hvd.rank(), size=hvd.size())
    ranks = _of_ranks({**mine, "rank": hvd.rank()}, module, hvd)
    ones, over = _device(framework, module, hvd)
    _average(module, hvd, 0.0)  # all ranks end it within about a millisecond
    clocks = _of_ranks(time.time(), module, hvd)
    seconds = _measure(module, hvd, ones)
    connections = {tuple(each) for found in _of_ranks(gpus.connections_in(log), module, hvd) for each in found}
    if hvd.rank() == 0:
        emit(ranks=ranks, clocks=clocks, seconds=seconds, over=over, connections=sorted(connections))
    hvd.shutdown()


def _of_ranks(value: Any, module: Any, hvd: Any) -> list[Any]:
    from hvdtrain.core import sharing

    tensor = module.from_numpy if module.__name__ == "torch" else module.constant
    return sharing.of_ranks(
        value, hvd.rank(), hvd.size(), lambda row: hvd.allreduce(tensor(row), op=hvd.Sum, name="doctor.rank").numpy()
    )


def _device(framework: str, module: Any, hvd: Any) -> tuple[Callable[[int], Any], str]:
    """A function that makes a vector of ones where this Horovod averages fastest, and what it averages over."""
    if framework == "torch" and hvd.nccl_built() and module.cuda.device_count() in {1, hvd.local_size()}:
        index = hvd.local_rank() if module.cuda.device_count() > 1 else 0
        return lambda count: module.ones(count, device=f"cuda:{index}"), "NCCL"
    return lambda count: module.ones([count]), "MPI" if hvd.mpi_enabled() else "Gloo"


def _measure(module: Any, hvd: Any, ones: Callable[[int], Any]) -> dict[int, float]:
    """The seconds of one allreduce, by its bytes. Sizes that would take long are left out."""
    seconds: dict[int, float] = {}
    for megabytes in MEGABYTES:
        size = megabytes * 10**6
        if seconds and (size / max(seconds)) * seconds[max(seconds)] > LONGEST:
            break
        reduce = functools.partial(hvd.allreduce, ones(size // 4), op=hvd.Sum, name="doctor")
        seconds[size] = measure.of_one(reduce, functools.partial(_average, module, hvd), SECONDS_PER_SIZE)
    return seconds


def _average(module: Any, hvd: Any, value: float) -> float:
    tensor = hvd.allreduce(module.ones([1]) * value, op=hvd.Average, name="doctor.average")
    return float(tensor[0])


if __name__ == "__main__":
    (join if "--join" in sys.argv else imported)(sys.argv[1])
