"""`bench allreduce`: the bandwidth of Horovod's and torch.distributed's allreduce, size by size.

Algorithm bandwidth is bytes / seconds. Bus bandwidth is that times 2 (N - 1) / N for N ranks: the
rate of the slowest link in a perfect ring, whatever N. Source: nccl-tests, doc/PERFORMANCE.md.

`python -m hvdtrain.tools.bench.allreduce`, with the same flags, is one rank. It measures both
libraries, interleaved.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.errors import EngineUnavailable, HvdtrainError, WorldError
from hvdtrain.launch import rendezvous
from hvdtrain.launch.devices import gpu_index
from hvdtrain.launch.display import print_line
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.world import World, joined
from hvdtrain.run.process import end
from hvdtrain.terminal import Show, hidden
from hvdtrain.tools.bench import measure, ranks
from hvdtrain.untrusted import one_line

if TYPE_CHECKING:
    import torch

RANK = "hvdtrain.tools.bench.allreduce"
MB = 10**6
MOST_MB = 4096
WAYS = {"MPI": "--mpi", "Gloo": "--gloo"}
SECONDS = 0.5  # that one measurement takes, unless a single allreduce takes longer

Found = dict[str, dict[int, list[float]]]
"""The seconds of one allreduce in each round, by library and bytes."""
Reduce = Callable[["torch.Tensor"], object]
"""Adds a tensor over all ranks, in place, and returns when that is done."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures allreduce of Horovod and of torch.distributed. Under srun, mpirun or torchrun
    each rank calls it; alone, it starts ranks on this machine, over MPI and over Gloo."""

    sizes: Annotated[str, Flag("megabytes (10^6 bytes) of float32, smallest first")] = "0.004,0.1,1,10,100"
    ranks: Annotated[measure.RankCount, Field(ge=2), Flag("ranks on this machine, where no launcher started it")] = 2
    rounds: Annotated[measure.Count, Flag("measurements of each library and size, interleaved")] = 5
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("where the tensors lie")] = "auto"

    @property
    def byte_sizes(self) -> list[int]:
        """The sizes in bytes of whole float32 numbers. Raises RecipeError."""
        rule = f"--sizes must be growing numbers of megabytes above 0 and at most {MOST_MB}, as in 1,10,100"
        return [max(4, int(size * MB) // 4 * 4) for size in measure.growing(float, self.sizes, MOST_MB, rule)]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; the exit code. Raises HvdtrainError."""
    options = parse(argv)
    if discover(os.environ).size > 1:
        ranks.become(RANK, argv)
    measuring = functools.partial(_over_both, options, argv)
    return measure.run("bench allreduce", measuring, lambda found: answer(found, options.ranks), options)


def _over_both(options: Options, argv: Sequence[str], show: Show, known: measure.Known) -> None:
    """Measures over MPI and Gloo in each round; what fails once is reported and left out."""
    found: Found = {}
    ways, left = dict(WAYS), measure.Left(options.rounds * len(WAYS))
    program = ["-m", RANK, *argv, "--rounds", "1"]
    for number in range(1, options.rounds + 1):
        for way, flag in list(ways.items()) if number % 2 else reversed(list(ways.items())):
            in_round = _titled(show, left.beside(f"round {number} of {options.rounds}, over {way}") + ": {}")
            try:
                now = ranks.launch(program, "horovod", options.ranks, in_round, hidden, flag)
            except EngineUnavailable as error:
                print(f"Horovod over {way} is left out: {error}", file=sys.stderr, flush=True)
                del ways[way]
                continue
            finally:
                left.made += 1
            for library, sizes in now.items():
                for size, seconds in sizes.items():
                    found.setdefault(library, {}).setdefault(int(size), []).extend(seconds)
            known(found)


def _titled(show: Show, title: str) -> Show:
    """Shows a text within a title that has {} for it."""
    return lambda text: show(title.format(text))


def parse(argv: Sequence[str]) -> Options:
    """The flags of the benchmark. Raises RecipeError."""
    options: Options = flags.parse(Options, "python -m hvdtrain bench allreduce", argv)
    _ = options.byte_sizes
    return options


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """The bytes a second through the slowest link of a ring."""
    return size / seconds * 2 * (ranks - 1) / ranks


def answer(found: Found, size: int) -> measure.Answer:
    """The table of a world of `size` ranks, and which library is fastest."""
    rows, figures = [], []
    rates = dict[str, dict[float, list[float]]]()
    for library, sizes in found.items():
        for length, seconds in sizes.items():
            middle = measure.spread(seconds).median
            bus = bus_bandwidth(length, middle, size)
            both = (f"{length / middle / MB:.1f}", f"{bus / MB:.1f}")
            rows.append((library, f"{length / MB:.4g}", measure.summary(seconds, 1e3), *both))
            of_rounds = [bus_bandwidth(length, each, size) / MB for each in seconds]
            rates.setdefault(library, {})[length / MB] = of_rounds
            row = {"library": library, "bytes": length, "seconds": seconds}
            figures.append({**row, "algorithm_bytes_per_second": length / middle, "bus_bytes_per_second": bus})
    title = f"allreduce over {size} ranks; algorithm and bus bandwidth in MB/s (10^6 bytes)"
    table = [title, *measure.table(("library", "MB", "ms", "algorithm", "bus"), rows)]
    results = {"ranks": size, "found": figures}
    figure = measure.Figure(rates, "MB", "Bus bandwidth, MB/s", base=10)
    return measure.Answer("allreduce", table, fastest(found), results, figure)


def fastest(found: Found) -> str:
    """A sentence on the fastest library at the largest and at the smallest size."""
    known = sorted({size for sizes in found.values() for size in sizes})
    parts = []
    for size in dict.fromkeys((known[-1], known[0])):
        seconds = {library: measure.spread(sizes[size]).median for library, sizes in found.items() if size in sizes}
        first, *others = sorted(seconds, key=seconds.__getitem__)
        beside = f", {measure.times(seconds[others[0]] / seconds[first])} {others[0]}" if others else ""
        parts.append(f"at {size / MB:.4g} MB {first} is fastest{beside}")
    return "; ".join(parts) + "."


def rank(argv: Sequence[str]) -> int:
    """Measures on every rank; rank 0 prints the answer, or keeps the figures."""
    topology = discover(os.environ)
    world = World(topology, rendezvous.from_launcher(topology, os.environ))
    world.start()
    try:
        options = parse(argv)
        if not world.rendezvous:
            world.connect_at(rendezvous.from_host_or_mpi(topology, os.environ))
        with ranks.showing(topology) as show, joined(world, "torch", "horovod", os.environ):
            found = _measure(options, topology, show)
    except HvdtrainError as error:
        if topology.is_rank_0:
            print_line(topology, type(error).__name__, one_line(error))
        world.leave(str(error), error.exit_code)
        return error.exit_code
    world.leave()
    if topology.is_rank_0 and not ranks.keep(found):
        answer(found, topology.size).conclude(options)
    return 0


def _measure(options: Options, topology: Topology, show: Show) -> Found:
    import torch
    import torch.distributed as dist

    reducers, device = _reducers(options, topology)
    found: Found = {}
    for size in options.byte_sizes:
        tensor = torch.zeros(size // 4, device=device)  # zeros stay zeros, whatever is added how often
        timed = {name: functools.partial(_seconds, reduce, tensor) for name, reduce in reducers.items()}
        of_size = _titled(show, f"{{}}, {size / MB:.4g} MB")
        for name, values in measure.interleaved(timed, options.rounds, show=of_size).items():
            found.setdefault(name, {})[size] = values
    dist.destroy_process_group()
    return found


def _reducers(options: Options, topology: Topology) -> "tuple[dict[str, Reduce], torch.device]":
    """The allreduce of each library, checked once on ones, and the device of their tensors."""
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist

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


def _seconds(reduce: Reduce, tensor: "torch.Tensor") -> float:
    """The seconds of one allreduce, averaged over repeats and ranks."""

    def reduced() -> "torch.Tensor":
        reduce(tensor)
        return tensor

    def average(value: float) -> float:
        both = tensor.new_tensor([value, 1.0])
        reduce(both)  # no rank returns before all have called it
        return float(both[0] / both[1])

    return measure.of_one(reduced, average, SECONDS)


if __name__ == "__main__":
    end(rank(sys.argv[1:]))
