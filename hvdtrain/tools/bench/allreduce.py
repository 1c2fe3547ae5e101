"""`bench allreduce`: what the network and the libraries over it give, size by size.

Algorithm bandwidth is bytes / seconds; bus bandwidth is that times 2 (N - 1) / N for N ranks: what a perfect ring draws
from its slowest link, whatever N. Source: nccl-tests, doc/PERFORMANCE.md.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
import tyro
from pydantic import Field

from hvdtrain.core import flags
from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.launch.topology import discover
from hvdtrain.terminal import Status
from hvdtrain.tools.bench import measure, ranks
from hvdtrain.tools.rank_status import Show
from hvdtrain.untrusted import quoted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKER = "hvdtrain.tools.bench.workers.torch_allreduce"
MB = 10**6
MOST_MB = 4096
WAYS = {"MPI": "--mpi", "Gloo": "--gloo"}

Found = dict[str, dict[int, list[float]]]
"""Library -> bytes -> seconds of one allreduce, one figure a round."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options(measure.Kept):
    """Measures allreduce of Horovod and of torch.distributed. Under srun, mpirun or torchrun each rank calls it; alone,
    it starts ranks on this machine, over MPI and over Gloo."""

    sizes: Annotated[str, tyro.conf.arg(help="megabytes (10^6 bytes) of float32, smallest first")] = (
        "0.004,0.1,1,10,100"
    )
    ranks: Annotated[
        measure.RankCount, Field(ge=2), tyro.conf.arg(help="ranks on this machine, where no launcher started it")
    ] = 2
    rounds: Annotated[measure.Count, tyro.conf.arg(help="measurements of each library and size, interleaved")] = 5
    device: Annotated[Literal["auto", "cpu", "cuda"], tyro.conf.arg(help="where the tensors lie")] = "auto"

    @property
    def byte_sizes(self) -> list[int]:
        """Whole float32 numbers. Raises RecipeError."""
        try:
            megabytes = [float(size) for size in self.sizes.split(",")]
        except ValueError:
            megabytes = []
        if not megabytes or any(not 0 < size <= MOST_MB for size in megabytes) or megabytes != sorted(set(megabytes)):
            raise RecipeError(
                f"--sizes must be growing numbers of megabytes above 0 and at most {MOST_MB}, as in 1,10,100; "
                f"got {quoted(self.sizes)}."
            )
        return [max(4, int(size * MB) // 4 * 4) for size in megabytes]


def main(argv: Sequence[str]) -> int:
    """Measures; the exit code. Raises HvdtrainError."""
    options = parse(argv)
    if discover(os.environ).size > 1:
        ranks.become([WORKER, *argv])
    with Status("bench allreduce") as status:
        found = _over_both(options, argv, status.update)
    if not found:
        return 1
    answer(found, options.ranks).conclude(options)
    return 0


def _over_both(options: Options, argv: Sequence[str], show: Show) -> Found:
    """Starts ranks for each round and each of Horovod's ways; one that fails is left out, and reported so."""
    found: Found = {}
    ways = dict(WAYS)
    for number in range(options.rounds):
        for way, flag in list(ways.items()) if number % 2 == 0 else reversed(list(ways.items())):
            program = ["-m", WORKER, *argv, "--rounds", "1"]

            def in_round(text: str, title: str = f"round {number + 1} of {options.rounds}, over {way}") -> None:
                show(f"{title}: {text}")

            try:
                now = ranks.launch(program, "horovod", options.ranks, flag, show=in_round)
            except EngineUnavailable as error:
                print(f"Horovod over {way} is left out: {error}", file=sys.stderr, flush=True)
                del ways[way]
                continue
            for library, sizes in now.items():
                for size, seconds in sizes.items():
                    found.setdefault(library, {}).setdefault(int(size), []).extend(seconds)
    return found


def parse(argv: Sequence[str]) -> Options:
    """The flags. Raises RecipeError."""
    options: Options = flags.parse(Options, "python -m hvdtrain bench allreduce", argv)
    _ = options.byte_sizes
    return options


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second through the slowest link of a ring."""
    return size / seconds * 2 * (ranks - 1) / ranks


def answer(found: Found, size: int) -> measure.Answer:
    """The table for `size` ranks, and which library is fastest."""
    rows, figures = [], []
    for library, sizes in found.items():
        for length, seconds in sizes.items():
            middle = measure.spread(seconds).median
            bus = bus_bandwidth(length, middle, size)
            rates = (f"{length / middle / MB:.1f}", f"{bus / MB:.1f}")
            rows.append((library, f"{length / MB:.4g}", measure.summary(seconds, 1e3), *rates))
            row = {"library": library, "bytes": length, "seconds": seconds}
            figures.append({**row, "algorithm_bytes_per_second": length / middle, "bus_bytes_per_second": bus})
    title = f"allreduce over {size} ranks; algorithm and bus bandwidth in MB/s (10^6 bytes)"
    table = [title, *measure.table(("library", "MB", "ms", "algorithm", "bus"), rows)]
    results = {"ranks": size, "found": figures}
    return measure.Answer("allreduce", table, fastest(found), results, lambda axes: draw(axes, found, size))


def fastest(found: Found) -> str:
    """The fastest library at the smallest and at the largest size, as a sentence."""
    sizes = sorted({size for of_library in found.values() for size in of_library})
    return "; ".join(map(functools.partial(_fastest_at, found), dict.fromkeys((sizes[-1], sizes[0])))) + "."


def _fastest_at(found: Found, size: int) -> str:
    seconds = {library: measure.spread(sizes[size]).median for library, sizes in found.items() if size in sizes}
    first, *others = sorted(seconds, key=seconds.__getitem__)
    at = f"at {size / MB:.4g} MB {first} is fastest"
    return f"{at}, {measure.times(seconds[others[0]] / seconds[first])} {others[0]}" if others else at


def draw(axes: "Axes", found: Mapping[str, Mapping[int, Sequence[float]]], ranks: int) -> None:
    """Bus bandwidth over size, a curve for each library with its spread."""
    for (library, sizes), marker in zip(found.items(), "osD^v", strict=False):
        rates = [measure.spread([bus_bandwidth(n, t, ranks) / MB for t in times]) for n, times in sizes.items()]
        middle = [rate.median for rate in rates]
        reach = [[rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]]
        axes.errorbar([n / MB for n in sizes], middle, yerr=reach, marker=marker, capsize=3, label=library)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="Size / MB", ylabel="Bus bandwidth / (MB/s)", title=f"Allreduce over {ranks} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
