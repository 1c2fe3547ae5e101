"""The checks of lab 5: efficiency, a heat map of who computes how long, what limits three runs, and reading ahead."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.terminal import counted
from labtools.exercises import Exercise, first_of, print_right, stopped
from labtools.profiling import PARTS

LIMITS = {"A": "slow rank", "B": "data", "C": "communication"}
"""What limits each of the lab's runs; the lab has arranged it so."""
ARRANGED: Mapping[str, tuple[float, float, Mapping[str, str]]] = {
    "A": (0.0, 0.4, {}),
    "B": (0.4, 0.0, {}),
    "C": (0.0, 0.0, {"HOROVOD_CYCLE_TIME": "500"}),
}
"""How: seconds for each read, seconds by which rank 1 is slower, and the environment."""
ANSWERS = ("computing", "data", "communication", "slow rank")
EMPTY = "is still empty: it gives back nothing (if it computes something, a `return` is missing)."
_READ_AHEAD = 2.0  # seconds for a thread to read a number
_BATCHES = 40


class Check(Exercise):
    """The four gaps of lab 5."""

    lab = 5
    hints: ClassVar = {
        "efficiency": (
            "perfect is: N ranks do N times as many images a second as one. How near does it come?",
            "divide the throughput on N ranks by N, and by that on one rank.",
        ),
        "computing": (
            "stamps[rank, step, 0] is the begin of a step, and the stamp behind backward is number 3.",
            "a difference of two slices: all ranks, all steps, and one stamp each. Seconds become ms by 1,000.",
        ),
        "limits": (
            "first the heat map: do the rows of a run differ? A rank that others wait for is bright alone.",
            "then the bars: if the rows are alike, the part of the step that has grown is what limits.",
            "a large allreduce beside a slow rank is waiting for it. Only where all are ready is it communication.",
        ),
        "prefetch": (
            "a thread has to read the next batch while the loop works on this one: submit the read before `yield`.",
            "reader.submit(next, batches, None) reads one batch in the thread, or gives None at the end.",
            "keep what submit gives back; its result() is the batch. Submit the next one, then give it away.",
        ),
    }

    def efficiency(self, efficiency: Callable[[Mapping[int, float]], Any]) -> None:
        """Gap 1: `efficiency({ranks: images a second})` is the efficiency by number of ranks, 1 where it is perfect."""
        throughput = {1: 50.0, 2: 90.0, 8: 200.0}
        self._judge("efficiency", of_efficiency(self._call("efficiency", efficiency, dict(throughput)), throughput))
        print_right("50, 90 and 200 images/s on 1, 2 and 8 ranks are 100 %, 90 % and 50 %.")

    def computing(self, computing: Callable[[NDArray], Any]) -> None:
        """Gap 2: `computing(stamps)` is the ms [ranks, steps] from a step's begin to the end of its backward."""
        seconds = np.random.default_rng(0).integers(1, 99, (3, 5, 6)) / 1e3
        seconds[..., 4] = seconds[..., 1:4].sum(axis=-1).max(axis=0) - seconds[..., 1:4].sum(axis=-1) + 0.2
        stamps = 1.7e9 + np.cumsum(seconds, axis=-1)
        self._judge("computing", of_computing(self._call("computing", computing, stamps), np.diff(stamps)))
        print_right("a number for each rank and step, in ms, and no waiting in it.")

    def limits(self, limits: Mapping[str, Any], runs: Mapping[str, NDArray]) -> None:
        """Gap 3: `limits` names what limits each run, of which `runs` has the stamps [ranks, steps, parts + 1]."""
        self._judge("limits", of_limits(limits, runs))
        print_right("A waits for rank 1, B for its data, C for Horovod's communication.")

    def prefetch(self, prefetch: Callable[[Iterator[int]], Any]) -> None:
        """Gap 4: `prefetch(batches)` gives the same batches, and reads one ahead in a thread."""
        self._judge("prefetch", of_prefetch(prefetch))
        print_right(f"{_BATCHES} batches in their order, each read while the one before is being worked on.")


def of_efficiency(given: Any, throughput: Mapping[int, float]) -> str | None:
    """What is wrong with the efficiencies given for these throughputs, by number of ranks."""
    if given is None:
        return EMPTY
    if not isinstance(given, Mapping) or set(given) != set(throughput):
        return (
            f"gives back {given!r:.60}, and not a dictionary with an efficiency for each of {list(throughput)} ranks."
        )
    one, most = throughput[1], max(throughput.values())
    ways: dict[str, Callable[[int, float], float]] = {
        "that is the speed-up: divide by the number of ranks as well": lambda n, t: t / one,
        "that is images a second of each rank: divide by those of one rank alone": lambda n, t: t / n,
        "it is turned around, and above 1": lambda n, t: n * one / t,
        "that is in per cent; 1 is perfect here": lambda n, t: 100 * t / n / one,
        "it compares with the largest number of ranks; one rank is the measure": lambda n, t: t / most,
        "the number of ranks is on the wrong side": lambda n, t: n * t / one,
    }
    for n, images in throughput.items():
        right, value = images / n / one, float(given[n])
        if not np.isclose(value, right):
            known = [
                why for why, way in ways.items() if all(np.isclose(given[k], way(k, throughput[k])) for k in given)
            ]
            why = known[0] if known else "throughput on N ranks, by N times that on one"
            shown = f"{value:.3g} for {images:.0f} images/s on {counted(n, 'rank')} (one: {one:.0f})"
            return f"gives {shown}, and {right:.3g} is right: {why}."
    return None


def of_computing(given: Any, parts: NDArray) -> str | None:
    """What is wrong with the heat map given, of parts [ranks, steps, parts] in seconds."""
    if given is None:
        return EMPTY
    ms = 1e3 * parts
    array, right = np.asarray(given, float), ms[..., :3].sum(axis=-1)
    if array.shape != right.shape:
        return first_of(
            (array.shape == right.T.shape, "has steps and ranks swapped: a row is a rank."),
            (True, f"has the shape {list(array.shape)}, and [ranks, steps] = {list(right.shape)} is right."),
        )
    ways = {
        "in seconds: times 1,000 are ms": right / 1e3,
        "the whole step, waiting included. All ranks need the same for that, so that a slow one cannot be seen": ms.sum(
            -1
        ),
        "the allreduce too: that is waiting, and hides who is waited for": ms[..., :4].sum(-1),
        "the allreduce alone: the map of who waits. The slow rank is the dark row in it": ms[..., 3],
        "backward alone; data and forward come before it": ms[..., 2],
        "forward and backward, without the data that the rank has waited for": ms[..., 1:3].sum(-1),
        "data and forward: backward ends at stamp 3": ms[..., :2].sum(-1),
        "negative: the end minus the begin": -right,
    }
    # Stamps since 1970 have microseconds' digits.
    known = [why for why, wrong in ways.items() if np.allclose(array, wrong, rtol=1e-3, atol=2e-3 * wrong.max() / 1e3)]
    close = np.allclose(array, right, atol=2e-3)
    return None if close else f"is not right: that is {known[0] if known else 'not stamp 3 minus stamp 0'}."


def of_limits(limits: Mapping[str, Any], runs: Mapping[str, NDArray]) -> str | None:
    """What is wrong with an answer, and which figures of the run say so."""
    if any(answer is ... for answer in limits.values()):
        return f"is still empty: for each of the runs A, B, C one of {', '.join(ANSWERS)}."
    if set(limits) != set(LIMITS):
        return f"has the runs {', '.join(map(str, limits))}, and A, B, C are right."
    for run, right in LIMITS.items():
        if limits[run] == right:
            continue
        if limits[run] not in ANSWERS:
            return f"has {limits[run]!r} for run {run}; the answers are {', '.join(ANSWERS)}."
        ms = 1e3 * np.median(np.diff(runs[run])[:, 1:], axis=1)  # [ranks, parts], the first step left out
        ready = ms[:, :3].sum(axis=1)
        shown = ", ".join(f"rank {rank} is ready after {each:.0f} ms" for rank, each in enumerate(ready))
        waits = ", ".join(f"{each:.0f}" for each in ms[:, 3])
        parts = ", ".join(f"{part} {value:.0f}" for part, value in zip(PARTS, ms.mean(axis=0), strict=True))
        why = {
            "slow rank": f"{shown}. The waiting, {waits} ms, is for the slow rank, not for the network",
            "data": f"its parts are {parts} ms: no rank differs much, and `data` has grown. Sums are there at once",
            "communication": f"{shown}: all are ready, and all wait then, {waits} ms. Neither data nor a rank is late",
        }
        return f"calls {limits[run]} what limits run {run}. Look: {why[right]}."
    return None


def of_prefetch(prefetch: Callable[[Iterator[int]], Any]) -> str | None:
    """What is wrong with reading ahead, tried in a thread, so that one that never ends does not stop the notebook."""
    found: list[str | None] = ["never ends: at the end of the batches the loop has to end, too."]
    stop = threading.Event()
    thread = threading.Thread(target=lambda: found.append(_try(prefetch, stop)), daemon=True)
    thread.start()
    thread.join(3 * _READ_AHEAD)
    stop.set()
    return found[-1]


def _try(prefetch: Callable[[Iterator[int]], Any], stop: threading.Event) -> str | None:
    read = [threading.Event() for _ in range(_BATCHES + 1)]
    readers: set[int] = set()

    def batches() -> Iterator[int]:
        for number in range(_BATCHES):
            read[number].set()
            readers.add(threading.get_ident())
            yield number

    taken: list[Any] = []
    try:
        given = prefetch(batches())
        mistake = EMPTY.replace("`return`", "`yield`") if given is None else _take(given, taken, read, stop)
    except Exception as error:
        mistake = stopped(error)
    if mistake:
        return mistake
    right = list(range(_BATCHES))
    return first_of(
        (
            threading.get_ident() in readers,
            "reads some batches in the loop's own thread, which waits for them meanwhile.",
        ),
        (taken[:-1] == right and taken[-1] is None, "gives None as the last batch: the loop would train on it."),
        (taken == right[:-1], f"loses the last batch: {len(taken)} of {_BATCHES} arrive."),
        (taken == right[1:], "loses the first batch: it is read, and never given."),
        (sorted(taken, key=repr) == sorted(right, key=repr) and taken != right, "gives the batches in another order."),
        (taken != right, f"gives {len(taken)} batches of {_BATCHES}."),
    )


def _take(given: Any, taken: list[Any], read: list[threading.Event], stop: threading.Event) -> str | None:
    """Takes the batches one after another: what is wrong meanwhile."""
    for batch in given:
        ahead = len(taken) + 1
        mistake = first_of(
            (batch is ..., EMPTY.replace("`return`", "`yield`")),
            (batch is not None and batch in taken, f"gives batch {batch} twice."),
            (ahead > 2 * _BATCHES or stop.is_set(), "never ends: it gives batches without end."),
            (
                not taken and read[-2].is_set(),
                "reads all batches before it gives the first one: they have to fit into memory, and the loop waits.",
            ),
        )
        if mistake:
            return mistake
        taken.append(batch)
        if ahead < _BATCHES and not read[ahead].wait(_READ_AHEAD):
            return f"does not read ahead: while the loop works on batch {ahead - 1}, nobody reads the next one."
    return None
