"""The time of a training on N ranks, by the models of its step that come nearest to measured points."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.float64]

BACKWARD = 2 / 3
"""The backward pass's share of a step's arithmetic: it computes gradients of weights and of
inputs."""
NOISE = 0.02
"""The relative error of a run that was measured once, as published series in test_predict.py
show it."""
SLOWEST_LINK = 0.8
"""The least share of a link's nominal rate that a ring gets."""
SAME = 1e-4
"""Fits whose largest errors differ by no more come as near to the points."""
LEAST_COMPUTE = 1e-3
"""The least share of the time that compute takes, at the point where it takes most."""
CAUSES = ("compute", "fixed", "joining", "network", "stragglers")
"""What takes time."""
COLUMNS = (*CAUSES, "hidden network")
"""What is fitted: the network also with a part of it hidden behind the backward pass."""


@dataclass(frozen=True)
class StepModel:
    """Seconds of a step on N ranks, each with the same batch.

    t(N) = compute max(1, N / cores) + max(tail, allreduce(N) - hidden compute) + drag N + straggle log2 N
    """

    compute: float
    """Seconds of one rank's forward, backward and update."""
    gradient_bytes: float
    byte_seconds: float
    """beta: the seconds of a byte from one node to the next."""
    message_seconds: float = 0.0
    """alpha: the seconds of a message from one node to the next."""
    hidden: float = 0.0
    """The share of `compute` during which an allreduce costs nothing."""
    drag: float = 0.0
    """The seconds that each more rank adds to a step, for what a run does once."""
    node: int = 1
    """The ranks of a node, which add up their gradients first."""
    cores: float = math.inf
    """The cores that all ranks share."""
    node_byte_seconds: float = 0.0
    """The seconds of a byte from one rank to the next of its node."""
    fusion_bytes: float = math.inf
    """Gradients are communicated in buffers of this size, each with messages of its own. The
    last of several is complete only when the backward pass ends, so that nothing hides it."""
    straggle: float = 0.0
    """The seconds that twice as many ranks wait longer for their slowest."""

    @property
    def buffers(self) -> int:
        return max(1, math.ceil(self.gradient_bytes / self.fusion_bytes))

    def allreduce(self, ranks: ArrayLike) -> Numbers:
        """Seconds of an allreduce: 2 (M - 1) messages of the ring among M nodes for each buffer,
        each of 1 / M of it, and the ring among the ranks of a node."""
        ranks = np.asarray(ranks, np.float64)
        nodes = np.maximum(1.0, ranks / self.node)
        inside = np.minimum(ranks, self.node)
        between = (nodes - 1) * (self.buffers * self.message_seconds + self.gradient_bytes * self.byte_seconds / nodes)
        return 2 * (between + (inside - 1) / inside * self.gradient_bytes * self.node_byte_seconds)

    def waited(self, ranks: ArrayLike) -> Numbers:
        """The seconds of the allreduce that compute does not hide."""
        whole = self.allreduce(ranks)
        tail = whole * min(1.0, self.fusion_bytes / self.gradient_bytes) if self.buffers > 1 else 0.0
        return np.maximum(tail, whole - self.hidden * self.compute)

    def step(self, ranks: ArrayLike) -> Numbers:
        """The seconds of a step."""
        ranks = np.asarray(ranks, np.float64)
        beside = self.drag * ranks + self.straggle * np.log2(ranks)
        return self.compute * np.maximum(1, ranks / self.cores) + self.waited(ranks) + beside

    def efficiency(self, ranks: ArrayLike) -> Numbers:
        """A rank's speed among N ranks, as a share of that of a rank alone."""
        return self.step(1) / self.step(ranks)


class Point(NamedTuple):
    """A measured run: so many ranks finished the work in so many seconds."""

    ranks: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """The seconds of the same work on `ranks`, with their bounds, and split by cause."""

    ranks: Numbers
    seconds: Numbers
    low: Numbers
    high: Numbers
    by_cause: dict[str, Numbers]

    def fractions(self, index: int) -> dict[str, float]:
        """The share of that forecast's time, by cause."""
        return {name: float(part[index] / self.seconds[index]) for name, part in self.by_cause.items()}


class _Fit(NamedTuple):
    """The causes' weights [causes], the known network, and the largest relative error at a point."""

    weights: Numbers
    network: StepModel | None
    misfit: float


@dataclass(frozen=True)
class Points:
    """The models that come nearest to measured points.

    The time of all ranks together, N T(N), is a sum of causes, none of them negative:

    - compute, which is the same for every N;
    - a fixed part of the run, which grows as N;
    - joining: what any allreduce costs from two ranks on, as copying buffers in and out;
    - the ring among M nodes, 2 (M - 1) / M, and the same ring with the backward pass hiding a part of it;
    - stragglers: with exponential delays, the slowest of N ranks is later by the same for every doubling, so log2 N.

    Non-negative least squares fit them, once with each set of causes. Few points leave open which
    of the causes took the time that was lost between them. So the forecast is the geometric middle
    of the lowest and the highest of the nearest fits, which errs by the least factor, whichever is
    true. The band also holds the nearest fits to points that are off by `noise`, and by what these
    fits miss.

    With a link the ring is known, except for the part that the backward pass hides. Then the
    forecast is the middle of the fits in which joining alone takes the time that the ring does not,
    where they come as near. A link and one rank alone are enough.
    """

    points: tuple[Point, ...]
    node: int
    cores: float = math.inf
    fixed_seconds: float | None = None
    link: StepModel | None = None
    """A known allreduce, as the model of a step without compute."""
    steps: float = 1.0
    """The steps of one rank alone, each with such an allreduce."""
    overlap: float | None = None
    noise: float = NOISE

    def forecast(self, ranks: Sequence[int]) -> Forecast:
        """The middle of the nearest fits, and the band, at each number of ranks."""
        where = np.asarray(ranks, np.float64)
        likely, possible = (np.array([self._seconds(fit, where) for fit in fits]) for fits in self._fits)
        totals, band, each = likely.sum(axis=1), possible.sum(axis=1), np.arange(len(where))
        lowest, highest = (likely[of_rank, :, each].T for of_rank in (totals.argmin(axis=0), totals.argmax(axis=0)))
        few, many = np.sqrt(totals.min(axis=0)), np.sqrt(totals.max(axis=0))
        mixture = (many * lowest + few * highest) / (few + many)  # whose sum is the geometric mean
        by_cause = dict(zip(CAUSES, mixture, strict=True))
        return Forecast(where, few * many, band.min(axis=0), band.max(axis=0), by_cause)

    @functools.cached_property
    def misfit(self) -> float:
        """The relative error by which the nearest fit misses a point."""
        return min(fit.misfit for fit in self._nearest(COLUMNS[1:]))

    @functools.cached_property
    def _fits(self) -> tuple[list[_Fit], list[_Fit]]:
        """The fits whose middle is the forecast, and those that span the band."""
        likely = self._nearest(COLUMNS[1:])
        if self.link and (plain := self._nearest(["joining"]))[0].misfit <= self.misfit + self.noise:
            likely = plain
        possible = list(likely)
        # At most four groups of neighbouring points are off, each either way. The noise of a bench may exceed 1.
        groups = min(4, len(self.points))
        group = np.arange(len(self.points)) * groups // len(self.points)
        for signs in itertools.product((-1, 1), repeat=groups):
            off = np.maximum(0.1, 1 + (self.misfit + self.noise) * np.array(signs)[group])
            possible += [fit for fit in self._nearest(COLUMNS[1:], off, SLOWEST_LINK) if fit.misfit < math.inf]
        return likely, possible

    def _nearest(self, causes: Sequence[str], off: ArrayLike = 1.0, slowest: float = 1.0) -> list[_Fit]:
        """The fits of some of these causes that come as near to the points, times `off`, as any."""
        ranks, seconds = np.array(self.points, np.float64).T
        columns, cost = self._columns(ranks), ranks * seconds * off
        known = [] if self.fixed_seconds is None else ["fixed"]
        known += ["network", "hidden network"] if self.link else []
        # What costs as much at every point cannot be distinguished from compute.
        free = [COLUMNS.index(name) for name in causes if name not in known]
        free = [row for row in free if np.ptp(columns[row]) > 0]
        sets = [[0, *some] for count in range(len(free) + 1) for some in itertools.combinations(free, count)]
        fits = []
        for network in self._networks(slowest):
            wanted = 1 - self._known(network, ranks).sum(axis=0) / cost
            fits += [_fit(columns / cost, rows, wanted, network) for rows in sets]
        least = min(fit.misfit for fit in fits)
        return [fit for fit in fits if fit.misfit <= least + SAME]

    def _networks(self, slowest: float) -> Sequence[StepModel | None]:
        """The known network at its rate and at its slowest, with what the backward pass can hide."""
        if self.link is None:
            return [None]
        once = self.points[0].ranks * (self.points[0].seconds - (self.fixed_seconds or 0.0))
        overlaps = np.linspace(0, BACKWARD, 33).tolist() if self.overlap is None else [self.overlap]
        rates = {self.link.byte_seconds / share for share in (1.0, slowest)}
        model = replace(self.link, compute=once / self.steps)
        return [replace(model, hidden=hidden, byte_seconds=rate) for hidden in overlaps for rate in rates]

    def _seconds(self, fit: _Fit, ranks: Numbers) -> Numbers:
        """The seconds of a rank [causes, ranks]."""
        parts = (fit.weights[:, None] * self._columns(ranks) + self._known(fit.network, ranks)) / ranks
        parts[CAUSES.index("network")] += parts[-1]
        return parts[:-1]

    def _columns(self, ranks: Numbers) -> Numbers:
        """What each cause costs all ranks together [causes, ranks], but for its weight."""
        ring = StepModel(1, 1, 1, node=self.node)
        first, last = self.points[0], self.points[-1]
        lost = max(0.0, last.ranks * last.seconds / (first.ranks * first.seconds) - 1)
        # At most as much is hidden as is waited for: that more is hidden would be a coincidence.
        hidden = min(BACKWARD, lost)
        rate = (lost + hidden) / (float(ring.allreduce(last.ranks)) or 1.0)
        partly = replace(ring, hidden=hidden, byte_seconds=rate).waited(ranks)
        compute = np.maximum(1, ranks / self.cores)
        return np.array([compute, ranks, ranks > 1, ring.allreduce(ranks), np.log2(ranks), partly])

    def _known(self, network: StepModel | None, ranks: Numbers) -> Numbers:
        """What is known of the causes [causes, ranks]."""
        known = np.zeros((len(COLUMNS), len(ranks)))
        known[COLUMNS.index("fixed")] = (self.fixed_seconds or 0.0) * ranks
        if network:
            known[COLUMNS.index("network")] = self.steps * network.waited(ranks)
        return known


def _fit(columns: Numbers, rows: Sequence[int], wanted: Numbers, network: StepModel | None) -> _Fit:
    """The fit of these rows of columns [columns, points], compute among them, to what is wanted at each point."""
    from scipy.optimize import nnls

    scale = columns[rows].max(axis=1)
    matrix = columns[rows].T / scale
    found = nnls(matrix, wanted)[0]
    weights = np.zeros(len(columns))
    weights[rows] = found / scale
    misfit = float(abs(matrix @ found - wanted).max())
    # A run with next to no compute is none: one rank would take no time at all.
    return _Fit(weights, network, misfit if found[0] > LEAST_COMPUTE else math.inf)


def gain_of_halving(seconds: ArrayLike) -> Numbers:
    """By what share a training gets faster when one part of its step takes half the time (Amdahl
    1967).

    `seconds` [parts] are those of the parts of a step. Returns the gain for each part: 0.25 is 25 %
    more images a second.
    """
    parts = np.asarray(seconds, np.float64)
    return 1 / (1 - parts / parts.sum() / 2) - 1
