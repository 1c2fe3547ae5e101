"""The time of a training on N ranks, by all models of its step that measured points allow."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
CAUSES = ("fixed", "joining", "network", "stragglers")
"""The causes that may take time beside compute."""


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
    by_cause: "ByCause"

    def fractions(self, index: int) -> dict[str, float]:
        """The share of that forecast's time, by cause."""
        return {name: float(part[index] / self.seconds[index]) for name, part in self.by_cause.items()}


@dataclass(frozen=True)
class Link:
    """A known allreduce: the model of a step without compute, and the steps of one rank alone."""

    model: StepModel
    steps: float


Column = Callable[[Numbers], Numbers]
ByCause = dict[str, Numbers]


@dataclass(frozen=True)
class Points:
    """All models that pass through measured points.

    The time of all ranks together, N T(N), is a sum of causes, none of them negative:

    - compute, which is the same for every N;
    - a fixed part of the run, which grows as N;
    - joining: what any allreduce costs from two ranks on, as copying buffers in and out;
    - stragglers: with exponential delays, the slowest of N ranks is later by the same for every doubling, so log2 N;
    - the ring among M nodes, 2 (M - 1) / M, and the same ring with the backward pass hiding a part of it.

    Two points leave open which of the causes took the time that was lost between them. So the
    forecast is the geometric middle of the lowest and the highest of these models, which errs by
    the least factor, whichever is true.

    With a link the ring is known, except for the part that the backward pass hides. Then the
    forecast is the middle of those models in which joining alone takes the time that the ring does
    not, where there are any.
    """

    points: tuple[Point, ...]
    node: int
    cores: float = math.inf
    fixed_seconds: float | None = None
    link: Link | None = None
    overlap: float | None = None
    noise: float = NOISE

    def forecast(self, ranks: Sequence[int]) -> Forecast:
        where = np.asarray(ranks, np.float64)
        likely, possible = self._fits
        low, high = _widest([fit.reach(where, fit.misfit * (1 + 1e-6) + 1e-9) for fit in likely])
        lowest, highest = _widest([fit.reach(where, max(fit.misfit, self.misfit + self.noise)) for fit in possible])
        few, many = _sum(low), _sum(high)
        seconds = np.sqrt(few * many)
        by_cause = {name: (low[name] + high[name]) * seconds / (few + many) for name in low}
        return Forecast(where, seconds, _sum(lowest), _sum(highest), by_cause)

    @property
    def misfit(self) -> float:
        """The relative error by which every model misses at least one point."""
        return min(fit.misfit for fit in self._fits[1])

    @functools.cached_property
    def _fits(self) -> "tuple[list[_Fit], list[_Fit]]":
        """The fits whose middle is the forecast, and those that span the band."""
        if self.link is None:
            fits = [self._fit(None, CAUSES)]
            return fits, fits
        overlaps = [self.overlap] if self.overlap is not None else np.linspace(0, BACKWARD, 33).tolist()
        possible, plain = ([self._fit(overlap, causes) for overlap in overlaps] for causes in (CAUSES, ("joining",)))
        least, least_plain = (min(fit.misfit for fit in fits) for fits in (possible, plain))
        near = [fit for fit in possible if fit.misfit <= least + self.noise]
        likely = [fit for fit in plain if fit.misfit <= least_plain + 1e-4]
        ends = [near[0], near[-1]]
        return ([likely[0], likely[-1]] if least_plain <= least + self.noise else ends), [*ends, *likely]

    def _fit(self, overlap: float | None, causes: Sequence[str]) -> "_Fit":
        ranks, seconds = (np.asarray(column, np.float64) for column in zip(*self.points, strict=True))
        cost = ranks * seconds
        columns: dict[str, Column] = {"compute": lambda n: np.maximum(1, n / self.cores)}
        known: dict[str, Column] = {}
        if "stragglers" in causes:
            columns["stragglers"] = np.log2
        if "joining" in causes and ranks[0] == 1:  # or it could not be distinguished from compute
            columns["joining"] = lambda n: np.where(n > 1, 1.0, 0.0)
        if self.fixed_seconds is not None:
            fixed = self.fixed_seconds
            known["fixed"] = lambda n: fixed * n
        elif "fixed" in causes:
            columns["fixed"] = lambda n: n
        if self.link:
            once = cost[0] - (self.fixed_seconds or 0.0) * ranks[0]
            model = replace(self.link.model, compute=once / self.link.steps, hidden=overlap or 0.0)
            steps = self.link.steps
            known["network"] = lambda n: steps * model.waited(n)
        elif ranks[-1] > self.node:
            bare = StepModel(cost[0], 1.0, 1.0, node=self.node)
            columns["network"] = bare.allreduce
            lost = max(0.0, cost[-1] - cost[0]) / cost[0]
            # At most as much is hidden as is waited for: that more is hidden would be a coincidence.
            hidden = min(BACKWARD, lost)
            if hidden:
                reach = float(bare.allreduce(ranks[-1]))
                columns["hidden network"] = replace(
                    bare, byte_seconds=(lost + hidden) * cost[0] / reach, hidden=hidden
                ).waited
        return _Fit(ranks, cost, columns, known)


@dataclass(frozen=True)
class Physics:
    """A forecast without measured runs, from what a step computes and communicates."""

    model: StepModel
    steps: float
    """The steps that one rank alone makes."""
    fixed_seconds: float = 0.0
    overlap: float | None = None

    def forecast(self, ranks: Sequence[int]) -> Forecast:
        """The geometric middle between no overlap and all that the backward pass can hide."""
        where = np.asarray(ranks, np.float64)
        least, most = (0.0, BACKWARD) if self.overlap is None else (self.overlap, self.overlap)
        slow = replace(self.model, byte_seconds=self.model.byte_seconds / SLOWEST_LINK)
        many, few = (self._seconds(replace(self.model, hidden=part), where) for part in (least, most))
        seconds = np.sqrt(few * many)
        compute = self.steps / where * self.model.compute * np.maximum(1, where / self.model.cores)
        fixed = np.full_like(where, self.fixed_seconds)
        by_cause = {"compute": compute, "fixed": fixed, "network": seconds - compute - fixed}
        high = self._seconds(replace(slow, hidden=least), where)
        return Forecast(where, seconds, few * (1 - NOISE), high * (1 + NOISE), by_cause)

    def _seconds(self, model: StepModel, ranks: Numbers) -> Numbers:
        return self.steps / ranks * model.step(ranks) + self.fixed_seconds


@dataclass(frozen=True)
class _Fit:
    """The sum of columns with weights, none negative, that passes near the measured points."""

    ranks: Numbers
    cost: Numbers
    columns: Mapping[str, Column]
    known: Mapping[str, Column]

    @functools.cached_property
    def misfit(self) -> float:
        """The relative error by which these columns miss at least one point."""
        from scipy.optimize import linprog

        matrix, wanted = self._system()
        free = np.append(np.zeros(matrix.shape[1]), 1.0)
        slack = -np.ones((2 * len(wanted), 1))
        rows = np.hstack([np.vstack([matrix, -matrix]), slack])
        found = linprog(free, rows, np.concatenate([wanted, -wanted]))
        return float(found.fun) if found.success else float("inf")

    def reach(self, ranks: Numbers, tolerance: float) -> tuple[ByCause, ByCause]:
        """The least and the most seconds by cause, with all points met within the tolerance."""
        low, high = (
            [self._extreme(n, max(tolerance, self.misfit + 1e-9), sign) for n in ranks.tolist()] for sign in (1, -1)
        )
        return _columns(low), _columns(high)

    def _extreme(self, n: float, tolerance: float, sign: int) -> dict[str, float]:
        from scipy.optimize import linprog

        matrix, wanted = self._system()
        objective = sign * self._scaled(np.array([n]))[0]
        rows, limits = np.vstack([matrix, -matrix]), np.concatenate([wanted + tolerance, tolerance - wanted])
        weights = linprog(objective, rows, limits).x
        by_cause = dict.fromkeys(("compute", *CAUSES), 0.0)
        for name, part in zip(self.columns, sign * objective * weights * self.cost[-1] / n, strict=True):
            by_cause[name.removeprefix("hidden ")] += float(part)
        for name, column in self.known.items():
            by_cause[name] += float(column(np.array([n]))[0] / n)
        return by_cause

    def _system(self) -> tuple[Numbers, Numbers]:
        """The columns at the points, and what they must sum up to, relative to the points."""
        known = sum((column(self.ranks) for column in self.known.values()), np.zeros_like(self.cost))
        return self._scaled(self.ranks) * self.cost[-1] / self.cost[:, None], 1 - known / self.cost

    def _scaled(self, ranks: Numbers) -> Numbers:
        """Each column at `ranks` [ranks, columns], 1 at the last point."""
        return np.stack([column(ranks) / column(self.ranks[-1:]) for column in self.columns.values()], axis=1)


def _columns(rows: Sequence[dict[str, float]]) -> ByCause:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _sum(by_cause: ByCause) -> Numbers:
    return np.sum(list(by_cause.values()), axis=0)


def _widest(ends: Sequence[tuple[ByCause, ByCause]]) -> tuple[ByCause, ByCause]:
    """The lowest and the highest of several reaches, at each number of ranks."""
    lows, highs = zip(*ends, strict=True)
    fewest = np.argmin([_sum(low) for low in lows], axis=0)
    most = np.argmax([_sum(high) for high in highs], axis=0)
    picked = [(lows, fewest), (highs, most)]
    low, high = (
        {name: np.choose(index, [by_cause[name] for by_cause in every]) for name in every[0]} for every, index in picked
    )
    return low, high


def gain_of_halving(seconds: ArrayLike) -> Numbers:
    """By what share a training gets faster when one part of its step takes half the time (Amdahl
    1967).

    `seconds` [parts] are those of the parts of a step. Returns the gain for each part: 0.25 is 25 %
    more images a second.
    """
    parts = np.asarray(seconds, np.float64)
    return 1 / (1 - parts / parts.sum() / 2) - 1
