"""The lab on the ring allreduce: what its ranks record and time, the alpha-beta model, and the figures of both."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labtools.worker import tell

if TYPE_CHECKING:  # matplotlib would cost every rank half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIB = 1024
POLL = 0.01  # seconds between two tests by a rank that waits
PHASES = ("reduce-scatter", "allgather")

Times = Mapping[str, np.ndarray]
"""Seconds of each way to do an allreduce: [array sizes]."""


@dataclass(frozen=True)
class Step:
    """One send of one rank: to whom, from which element of the array on, how many bytes, and the array after it."""

    receiver: int
    first: int
    sent_bytes: int
    after: np.ndarray


class Watched:
    """A communicator of mpi4py's that records what is sent from `array` through it."""

    def __init__(self, comm: Any, array: np.ndarray) -> None:
        self._comm, self._array = comm, array
        self._sends: list[tuple[int, int, int]] = []
        self._before: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Send(self, buffer: np.ndarray, dest: int) -> None:  # noqa: N802  mpi4py's name
        """MPI_Send."""
        self._record(buffer, dest)
        self._comm.Send(buffer, dest=dest)

    def Sendrecv(self, buffer: np.ndarray, dest: int, recvbuf: np.ndarray, source: int) -> None:  # noqa: N802
        """MPI_Sendrecv."""
        self._record(buffer, dest)
        self._comm.Sendrecv(buffer, dest=dest, recvbuf=recvbuf, source=source)

    @property
    def steps(self) -> list[Step]:
        """Every send so far, the first one first."""
        after = [*self._before[1:], self._array.copy()]
        return [Step(*send, array) for send, array in zip(self._sends, after, strict=False)]

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""
        return sum(size for _, _, size in self._sends)

    def _record(self, buffer: np.ndarray, receiver: int) -> None:
        offset = buffer.ctypes.data - self._array.ctypes.data
        self._sends.append((receiver, offset // self._array.itemsize, buffer.nbytes))
        self._before.append(self._array.copy())


def on_first_ranks(counts: Iterable[int], function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """`function(comm, *arguments)` by number of ranks: on the first 2 of mpirun's, the first 4, ..., one after another.

    A rank has results only for the communicators that it belongs to. Rank 0 sends the notebook each number done.
    """
    from mpi4py import MPI

    world, results = MPI.COMM_WORLD, {}
    for count in counts:
        comm = world.Split(int(world.rank >= count), world.rank)
        if world.rank < count:
            results[count] = function(comm, *arguments)
        comm.Free()
        if world.rank == 0:
            tell(count)
        everybody = world.Ibarrier()
        while not everybody.Test():  # a rank that waits inside MPI would take a core from those at work
            time.sleep(POLL)
    return results


def timed(
    allreduce: Callable[[np.ndarray], Any], kib: int, barrier: Callable[[], Any], repetitions: int
) -> list[float]:
    """Seconds of each of several allreduces of `kib` KiB of float32, on this rank, from a common start."""
    array = np.ones(kib * KIB // 4, np.float32)
    allreduce(array)  # the first one connects, allocates and agrees on names
    seconds = []
    for _ in range(repetitions):
        array.fill(1)
        barrier()
        began = time.perf_counter()
        allreduce(array)
        seconds.append(time.perf_counter() - began)
    return seconds


def until_the_last(results: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, np.ndarray]:
    """Seconds by way and array size, from every rank's `timed` by way and array size.

    An allreduce is over when the last rank has its sum; of the repetitions the median counts.
    """
    return {way: np.median(np.max([result[way] for result in results], axis=0), axis=-1) for way in results[0]}


@dataclass(frozen=True)
class Link:
    """The alpha-beta model of a network (Hockney 1994): a message of n bytes takes alpha + n beta seconds."""

    alpha: float
    beta: float

    def ring(self, ranks: int, size: np.ndarray) -> np.ndarray:
        """Seconds of a ring allreduce of `size` bytes."""
        return 2 * (ranks - 1) * (self.alpha + size / ranks * self.beta)

    def naive(self, ranks: int, size: np.ndarray) -> np.ndarray:
        """Seconds of gathering `size` bytes from every rank at one, and sending the sum to each."""
        return 2 * (ranks - 1) * (self.alpha + size * self.beta)


def fit_to_ring(ranks: int, sizes: np.ndarray, seconds: np.ndarray) -> Link:
    """The link with which `Link.ring` comes nearest to the seconds measured at these sizes in bytes.

    Least squares of the relative errors, alpha and beta not negative.
    """
    from scipy.optimize import nnls

    steps = 2 * (ranks - 1)
    terms = np.stack([np.full(len(sizes), steps), steps * sizes / ranks], axis=1) / seconds[:, None]
    scale = np.linalg.norm(terms, axis=0)
    (alpha, beta), _ = nnls(terms / scale, np.ones(len(sizes)))
    return Link(alpha / scale[0], beta / scale[1])


def draw_steps(steps: Sequence[Sequence[Step]]) -> "Figure":
    """What every rank (first index) held after each step, as recorded, and the sends that led there.

    The array has one element a chunk; rank r's summand is 2**r, so that each sum shows its summands.
    """
    import matplotlib.pyplot as plt

    ranks, count = len(steps), len(steps[0])
    columns = max(1, count // 2)
    figure, grid = plt.subplots(
        2, columns, figsize=(4 * columns, 8.6), squeeze=False, subplot_kw={"aspect": 1.0}, layout="constrained"
    )
    shades = plt.get_cmap("cividis", ranks)
    for number, axes in enumerate(grid.flat):
        phase = PHASES[number // columns]
        axes.set_title(f"Step {number + 1}: {phase}", fontsize=17)
        _draw_step(axes, [own[number] for own in steps], shades)
    figure.supxlabel("Chunk of the array")
    figure.supylabel("Rank")
    levels = plt.cm.ScalarMappable(plt.Normalize(0.5, ranks + 0.5), shades)
    bar = figure.colorbar(levels, ax=grid, shrink=0.6, ticks=range(1, ranks + 1))
    bar.set_label("Ranks whose numbers are added up in a chunk")
    return figure


def _draw_step(axes: "Axes", sends: Sequence[Step], shades: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    ranks = len(sends)
    for rank, step in enumerate(sends):
        for chunk, total in enumerate(step.after):
            summands = [str(other) for other in range(ranks) if int(total) >> other & 1]
            fill = shades(len(summands) - 1)
            ink = "white" if np.dot(fill[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"
            axes.add_patch(
                FancyBboxPatch(
                    (chunk - 0.42, rank - 0.26), 0.84, 0.52, boxstyle="round,pad=0,rounding_size=.08", fc=fill
                )
            )
            text = "+".join(summands) if len(summands) < max(4, ranks) else "all"
            axes.text(chunk, rank, text, ha="center", va="center", color=ink, fontsize=12)
        _draw_arrow(axes, rank, step, ranks)
    axes.set(xlim=(-0.6, ranks - 0.4), ylim=(ranks - 0.2, -0.8), xticks=range(ranks), yticks=range(ranks))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_arrow(axes: "Axes", rank: int, step: Step, ranks: int) -> None:
    """From the sender's chunk to the receiver's; from the last rank to the first it leaves below and enters above."""
    from labtools import style

    arrow = {"arrowstyle": "-|>,head_width=.35,head_length=.5", "lw": 3, "color": style.COLOURS["vermillion"]}
    arrow |= {"shrinkA": 0, "shrinkB": 0}
    below, above = rank + 0.26, step.receiver - 0.26
    pieces = [(below, above)] if step.receiver == rank + 1 else [(below, below + 0.45), (above - 0.45, above)]
    for start, end in pieces:
        axes.annotate("", (step.first, end), (step.first, start), arrowprops=arrow)


def draw_times(times: Mapping[int, Times], sizes: np.ndarray, links: Mapping[int, Link]) -> "Figure":
    """Points: the seconds of each way, a panel for each number of ranks; lines: what the links predict.

    `sizes` are in bytes.
    """
    import matplotlib.pyplot as plt

    from labtools import style

    figure, panels = plt.subplots(1, len(times), figsize=(4 * len(times), 6.5), sharey=True, squeeze=False)
    fine = np.geomspace(sizes[0], sizes[-1], 100)
    for axes, (ranks, ways) in zip(panels[0], times.items(), strict=True):
        for number, (way, seconds) in enumerate(ways.items()):
            colour, marker, _ = style.of_rank(number)
            axes.plot(sizes / KIB**2, 1e3 * seconds, marker, color=colour, markersize=9, label=way)
        models = {"naive": links[ranks].naive, "ring": links[ranks].ring}
        for number, (way, seconds_of) in enumerate(models.items()):
            colour, _, linestyle = style.of_rank(number)
            label = f"{way}, model" + (" (fitted)" if way == "ring" else " (same links)")
            axes.plot(fine / KIB**2, 1e3 * seconds_of(ranks, fine), linestyle, color=colour, label=label)
        axes.set(xscale="log", yscale="log", xlabel="Array / MiB", title=f"{ranks} ranks")
    panels[0][0].set_ylabel("Time per allreduce / ms")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
