"""One rank of `bench allreduce`: Horovod and torch.distributed in the same process, interleaved."""

import functools
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hvdtrain.errors import HvdtrainError, WorldError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.devices import gpu_index
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.liveness import print_error
from hvdtrain.ranks.world import World, joined
from hvdtrain.run.ending import end
from hvdtrain.tools.bench import allreduce, measure, ranks
from hvdtrain.tools.rank_status import Show
from hvdtrain.untrusted import one_line

MOST_REPEATS = 20
SECONDS = 0.5  # of one measurement, where a single allreduce does not take longer

Reduce = Callable[[torch.Tensor], object]
"""Adds a tensor over all ranks, in place, and waits until that is done."""


def main(argv: list[str]) -> int:
    """Measures with all ranks; rank 0 prints the result, or leaves it to the process that started the ranks."""
    topology = discover(os.environ)
    world = World(topology, rendezvous.from_launcher(topology, os.environ))
    world.start()
    try:
        options = allreduce.parse(argv)
        if not world.rendezvous:
            world.connect_at(rendezvous.from_host_or_mpi(topology, os.environ))
        with ranks.showing(topology) as show, joined(world, "torch", "horovod", os.environ):
            found = _measure(options, topology, show)
    except HvdtrainError as error:
        if topology.is_rank_0:
            print_error(topology, type(error), one_line(error))
        world.leave(str(error), error.exit_code)
        return error.exit_code
    world.leave()
    if topology.is_rank_0 and not ranks.keep(found):
        allreduce.answer(found, topology.size).conclude(options)
    return 0


def _measure(options: allreduce.Options, topology: Topology, show: Show) -> allreduce.Found:
    reducers, device = _reducers(options, topology)
    found: allreduce.Found = {}
    for size in options.byte_sizes:
        tensor = torch.zeros(size // 4, device=device)  # zeros stay zeros, whatever is added how often
        timed = {name: functools.partial(_seconds, reduce, tensor) for name, reduce in reducers.items()}
        of_size = functools.partial(_show_with, show, f"{size / allreduce.MB:.4g} MB")
        for name, values in measure.interleaved(timed, options.rounds, show=of_size).items():
            found.setdefault(name, {})[size] = values
    dist.destroy_process_group()
    return found


def _show_with(show: Show, size: str, title: str) -> None:
    show(f"{title}, {size}")


def _reducers(options: allreduce.Options, topology: Topology) -> tuple[dict[str, Reduce], torch.device]:
    """Every library's way to add, proved right once, and where their tensors lie."""
    import horovod.torch as hvd

    hvd.init()
    if hvd.size() != topology.size:
        raise WorldError(
            f"{topology.launcher} started {topology.size} ranks, but Horovod reports {hvd.size()}; python -m hvdtrain "
            "doctor in this step shows why."
        )
    over_gpus = bool(hvd.nccl_built()) and dist.is_nccl_available()
    index = gpu_index(options.device, torch.cuda.device_count(), topology, over_gpus)
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if index is not None:
        torch.cuda.set_device(index)
    backend = "gloo" if index is None else "nccl"
    dist.init_process_group(backend, rank=topology.rank, world_size=topology.size)
    controller = "NCCL" if index is not None else "MPI" if hvd.mpi_enabled() else "Gloo"
    reducers: dict[str, Reduce] = {
        f"Horovod over {controller}": lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name="bench"),
        f"torch.distributed ({backend})": dist.all_reduce,
    }
    for name, reduce in reducers.items():
        ones = torch.ones(1000, device=device)
        reduce(ones)
        if not bool((ones == topology.size).all()):
            raise WorldError(f"{name} adds {topology.size} ones to {ones[0].item():g}; do not train with it.")
    return reducers, device


def _seconds(reduce: Reduce, tensor: torch.Tensor) -> float:
    """Of one allreduce, averaged over repeats and ranks."""
    first = _average(reduce, _timed(reduce, tensor, 1), tensor.device)
    repeats = max(1, min(MOST_REPEATS, int(SECONDS / first)))
    return _average(reduce, _timed(reduce, tensor, repeats), tensor.device)


def _timed(reduce: Reduce, tensor: torch.Tensor, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def _average(reduce: Reduce, value: float, device: torch.device) -> float:
    """Over all ranks; they have all come when any of them continues."""
    both = torch.tensor([value, 1.0], device=device)
    reduce(both)
    return float(both[0] / both[1])


if __name__ == "__main__":
    end(main(sys.argv[1:]))
