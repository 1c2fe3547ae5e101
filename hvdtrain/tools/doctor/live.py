"""One rank of the doctor's allreduce: `python -m hvdtrain.tools.doctor.live torch`, its host's findings on stdin."""

import json
import os
import sys
import time
from typing import Any

from hvdtrain.core import sharing
from hvdtrain.launch import rendezvous
from hvdtrain.launch.topology import discover
from hvdtrain.ranks.world import World, joined
from hvdtrain.tools.doctor.framework import emit, imported

MEGABYTES = (1, 16, 64)
SECONDS_PER_SIZE = 0.3
LONGEST = 2.0


def main(framework: str) -> None:
    """Prints rank and size as soon as Horovod has them; then all ranks join, and rank 0 prints what they measured."""
    mine = json.load(sys.stdin)
    topology = discover(os.environ)
    world = World(topology, rendezvous.from_launcher(topology, os.environ))
    world.start()
    with joined(world, framework, "horovod", os.environ):
        _measured(framework, mine)
    world.leave()


def _measured(framework: str, mine: dict[str, Any]) -> None:
    module, hvd = imported(framework)
    hvd.init()
    emit(rank=hvd.rank(), size=hvd.size())
    ranks = _of_ranks({**mine, "rank": hvd.rank()}, module, hvd)
    ones, over = _device(framework, module, hvd)
    _average(module, hvd, 0.0)  # every rank has passed it at the same moment, to a millisecond or so
    clocks = _of_ranks(time.time(), module, hvd)
    seconds = _measure(module, hvd, ones)
    if hvd.rank() == 0:
        emit(ranks=ranks, clocks=clocks, seconds=seconds, over=over)
    hvd.shutdown()


def _of_ranks(value: Any, module: Any, hvd: Any) -> list[Any]:
    tensor = module.from_numpy if module.__name__ == "torch" else module.constant
    return sharing.of_ranks(
        value, hvd.rank(), hvd.size(), lambda row: hvd.allreduce(tensor(row), op=hvd.Sum, name="doctor.rank").numpy()
    )


def _device(framework: str, module: Any, hvd: Any) -> tuple[Any, str]:
    """What makes a vector of ones where this Horovod averages best, and the name of that way."""
    if framework == "torch" and hvd.nccl_built() and module.cuda.device_count() in {1, hvd.local_size()}:
        index = hvd.local_rank() if module.cuda.device_count() > 1 else 0
        return lambda count: module.ones(count, device=f"cuda:{index}"), "NCCL"
    return lambda count: module.ones([count]), "MPI" if hvd.mpi_enabled() else "Gloo"


def _measure(module: Any, hvd: Any, ones: Any) -> dict[int, float]:
    """Seconds of one allreduce, by its bytes; a size that would take long is left out."""
    seconds: dict[int, float] = {}
    for megabytes in MEGABYTES:
        size = megabytes * 10**6
        if seconds and (size / max(seconds)) * seconds[max(seconds)] > LONGEST:
            break
        vector = ones(size // 4)
        # The ranks must agree how often to repeat, so they average what each has measured.
        first = _average(module, hvd, _timed(hvd, vector, 1))
        repeats = max(1, min(20, int(SECONDS_PER_SIZE / first)))
        seconds[size] = _average(module, hvd, _timed(hvd, vector, repeats))
    return seconds


def _timed(hvd: Any, vector: Any, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        total = hvd.allreduce(vector, op=hvd.Sum, name="doctor")
    float(total[0])  # a GPU has finished only once it is read
    return (time.perf_counter() - started) / repeats


def _average(module: Any, hvd: Any, value: float) -> float:
    tensor = hvd.allreduce(module.ones([1]) * value, op=hvd.Average, name="doctor.average")
    return float(tensor[0])


if __name__ == "__main__":
    main(sys.argv[1])
