"""Speed-up and efficiency over numbers of ranks, from `bench scaling` or a folder of runs."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import files, untrusted
from hvdtrain.errors import RecipeError
from hvdtrain.record import reader
from hvdtrain.record.reader import RecordedRun
from hvdtrain.tools.bench.measure import MOST_RANKS
from hvdtrain.tools.bench.scaling import efficiencies
from hvdtrain.tools.predict.scaling import NOISE, Point, Points
from hvdtrain.tools.predict.task import LEAST, MOST, MOST_POINTS, WORST_MISFIT
from hvdtrain.tools.report.costs import WAITING, step_parts
from hvdtrain.tools.report.model import Scaling, ScalingRow, percent
from hvdtrain.untrusted import one_line, printable

FILE = "scaling.json"
MODES = ("weak", "strong")
MOST_RUNS = 200
MOST_ROUNDS = 1000
BEYOND = 4
"""Efficiency is predicted for up to so many times the most ranks that were measured."""

PUBLISHED: Mapping[str, Mapping[int, float]] = {
    "JSC: ResNet50, ImageNet on A100": {1: 1.0, 4: 20531.9 / (4 * 5355.9), 16: 20531.9 / (16 * 1488.2)},
    "TensorFlow 2017: ResNet-50 on the P100s of a DGX-1": {1: 1.0, 2: 422 / (2 * 219), 8: 1734 / (8 * 219)},
    "Horovod 2018: ResNet-101 on P100s, 25 Gbit/s": {1: 1.0, 128: 0.90},
    "Horovod 2018: VGG-16 on P100s, 25 Gbit/s": {1: 1.0, 128: 0.79},
}
"""Efficiency of published weak scaling by GPUs, against one GPU. docs/speed.md and
tests/tools/test_predict.py name the sources."""

Parts = tuple[float, float]
"""The seconds of a step in which a rank reads and computes, and in which it waits for the others."""


@dataclass(frozen=True)
class Measured:
    """The steps of a sweep, by the number of ranks."""

    seconds: dict[int, list[float]]
    """The seconds of a step in each round."""
    batch: dict[int, int]
    """The examples of a step, all ranks together."""
    node: int
    """Ranks a node."""
    cores: float
    """Cores that all ranks share."""
    parts: dict[int, Parts]
    about: str
    """What was measured, and where."""


def scalings(path: Path) -> tuple[tuple[Scaling, ...], tuple[str, ...]]:
    """The sweep in each mode, and a line on each thing not read. Raises RecipeError."""
    if not path.is_dir():
        raise RecipeError(f"--sweep must name a folder, of bench scaling or of runs, got {printable(str(path), 200)}.")
    missing: list[str] = []
    by_mode = _of_bench(path, missing) if (path / FILE).exists() else {}
    by_mode = by_mode or _of_runs(path, missing)
    found = tuple(_scaling(mode, measured) for mode, measured in by_mode.items() if len(measured.seconds) > 1)
    if not found:
        why = f" ({missing[0]})" if missing else ""
        raise RecipeError(
            f"--sweep: {printable(str(path), 200)} has no two runs on different numbers of ranks{why}; make one with: "
            "python -m hvdtrain bench scaling --output DIR"
        )
    return found, tuple(missing)


def _of_bench(path: Path, missing: list[str]) -> dict[str, Measured]:
    """The steps that `bench scaling` measured, by mode."""
    try:
        results = untrusted.mapping(files.read_json(path / FILE, follow=False))
    except (OSError, ValueError) as error:
        missing.append(f"{FILE} cannot be read: {one_line(getattr(error, 'strerror', None) or error, 100)}")
        return {}
    batch, found = untrusted.whole(results.get("batch"), 1), {}
    for mode in MODES:
        seconds = _rounds(untrusted.mapping(results.get(mode)))
        if seconds and batch:
            of_all = {ranks: batch * (ranks if mode == "weak" else 1) for ranks in seconds}
            node = untrusted.whole(results.get("ranks_per_node"), 1) or 1
            cores = untrusted.whole(results.get("cores"), 1)
            waiting = _rounds(untrusted.mapping(untrusted.mapping(results.get("waiting")).get(mode)))
            parts = {}
            for ranks in waiting.keys() & seconds.keys():
                step, waited = statistics.median(seconds[ranks]), statistics.median(waiting[ranks])
                parts[ranks] = max(step - waited, 0.0), min(waited, step)
            host = untrusted.text(untrusted.mapping(results.get("machine")).get("host"), 60)
            about = _about(results.get("model"), batch, mode, host)
            found[mode] = Measured(seconds, of_all, min(node, MOST_RANKS), cores or float("inf"), parts, about)
    if not found:
        missing.append(f"{FILE} has no step times")
    return found


def _about(model: object, batch: int, mode: str, host: str) -> str:
    """A sentence on what was measured and where, as `Resnet50: batch 16 a rank, on laptop.`"""
    name = untrusted.text(model, 60)
    of = f"{f'{name}: ' if name else ''}batch {batch:,}{' a rank' if mode == 'weak' else ''}"
    return f"{of[:1].upper()}{of[1:]}{f', on {host}' if host else ''}."


def _rounds(given: Mapping[str, Any]) -> dict[int, list[float]]:
    """The seconds of each round by ranks, without what is damaged."""
    found = {}
    for key, values in given.items():
        ranks = int(key) if str(key).isdecimal() and len(key) < 6 else 0
        known = [untrusted.number(value, LEAST, MOST) for value in untrusted.items(values, MOST_ROUNDS)]
        if 1 <= ranks <= MOST_RANKS and known and None not in known:
            found[ranks] = [value for value in known if value is not None]
    return dict(sorted(found.items())[:MOST_POINTS])


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep."""

    ranks: int
    batch: int
    """The examples of a step, all ranks together."""
    seconds: float
    """The seconds of a step."""
    node: int
    """Ranks a node."""
    parts: Parts | None
    model: str
    host: str


def _of_runs(path: Path, missing: list[str]) -> dict[str, Measured]:
    """The runs below the folder: weak with the same batch a rank, strong with the same batch."""
    runs = []
    known = {each.parent for pattern in ("*", "*/*") for each in path.glob(f"{pattern}/metrics.jsonl")}
    for each in sorted(known)[:MOST_RUNS]:
        run = _sweep_run(reader.read(each))
        if run:
            runs.append(run)
        else:
            missing.append(f"{printable(each.name, 60)} is left out: it has no images/s, ranks or batch")
    weak = _alike(runs, lambda run: run.batch / run.ranks)
    strong = _alike(runs, lambda run: run.batch)
    return {mode: _joined(alike, mode) for mode, alike in zip(MODES, (weak, strong), strict=True) if alike}


def _sweep_run(run: RecordedRun) -> SweepRun | None:
    """The run's figures; None where it has not recorded how fast it was."""
    column = run.metrics.steps.get("examples_per_second")
    rate, ranks = column.median() if column else None, run.ranks
    batch = untrusted.whole(run.plan.get("global_batch"), 1)
    if not (rate and batch and ranks and ranks <= MOST_RANKS and LEAST < batch / rate < MOST):
        return None
    hosts = run.launch.hosts if run.launch else []
    parts, split = step_parts(run.launches), None
    if parts.keys() >= {"computing", WAITING}:
        split = (parts["computing"] + parts.get("reading", 0.0), parts[WAITING])
    node, host = (hosts.count(hosts[0]), hosts[0]) if hosts else (1, "")
    return SweepRun(ranks, batch, batch / rate, node, split, untrusted.text(run.recipe.get("model"), 60), host)


def _alike(runs: Sequence[SweepRun], key: Callable[[SweepRun], float]) -> list[SweepRun]:
    """The runs of the most frequent key, where they are on several numbers of ranks."""
    common = statistics.mode(map(key, runs)) if runs else None
    alike = [run for run in runs if key(run) == common]
    return alike if len({run.ranks for run in alike}) > 1 else []


def _joined(runs: Sequence[SweepRun], mode: str) -> Measured:
    """The steps of these runs, of which those on the same number of ranks are rounds."""
    seconds, batch, parts = dict[int, list[float]](), dict[int, int](), dict[int, Parts]()
    for ranks in sorted({run.ranks for run in runs})[:MOST_POINTS]:
        rounds = [run for run in runs if run.ranks == ranks]
        seconds[ranks], batch[ranks] = [run.seconds for run in rounds], rounds[0].batch
        if known := [run.parts for run in rounds if run.parts]:
            computing, waiting = zip(*known, strict=True)
            parts[ranks] = (statistics.median(computing), statistics.median(waiting))
    first, node = runs[0], max(run.node for run in runs)
    about = _about(first.model, first.batch // (first.ranks if mode == "weak" else 1), mode, first.host)
    return Measured(seconds, batch, node, float("inf"), parts, about)


def _scaling(mode: str, measured: Measured) -> Scaling:
    """The sweep's efficiencies, with a prediction and published runs beside weak scaling."""
    of_ranks, fewest, rows = measured.seconds, min(measured.seconds), []
    if len({len(rounds) for rounds in of_ranks.values()}) > 1:  # of unequal rounds against a median
        alone = statistics.median(of_ranks[fewest])
        found = {n: efficiencies(mode, {fewest: [alone] * len(of), n: of})[n] for n, of in of_ranks.items()}
    else:
        found = efficiencies(mode, of_ranks)
    for ranks, ratios in found.items():
        seconds = measured.seconds[ranks]
        middle = statistics.median(ratios)
        rate = measured.batch[ranks] / statistics.median(seconds)
        reach = (middle, min(ratios), max(ratios))
        rows.append(ScalingRow(ranks, tuple(seconds), rate, middle * ranks / fewest, reach))
    shares = min(measured.node, max(measured.seconds)) > measured.cores
    published = PUBLISHED if mode == "weak" and not shares else {}
    crowded = f" {max(measured.seconds):,} ranks shared {measured.cores:,.0f} cores: that is no measure of a cluster."
    middle, low, high = rows[-1].efficiency
    spread = f" ({percent(low)} to {percent(high)} over the rounds)" if len(rows[-1].step_seconds) > 1 else ""
    work = "each rank with the same batch" if mode == "weak" else "all ranks sharing one batch"
    quicker = f"{rows[-1].ranks:,} ranks are {rows[-1].speedup:.3g} times as fast as {rows[0].ranks:,}, {work}"
    return Scaling(
        mode=mode,
        rows=tuple(rows),
        predicted=_predicted(measured) if mode == "weak" else (),
        published=tuple((name, tuple(points.items())) for name, points in published.items()),
        communication=tuple((ranks, *parts) for ranks, parts in measured.parts.items()),
        sentence=f"{quicker}: an efficiency of {percent(middle)}{spread}. {measured.about}{crowded if shares else ''}",
    )


def _predicted(measured: Measured) -> tuple[tuple[int, float, float, float], ...]:
    """Ranks and efficiency as predicted from the first two points; () where no model fits."""
    first = dict(sorted(measured.seconds.items())[:2])
    points = tuple(Point(ranks, statistics.median(of) / ranks) for ranks, of in first.items())
    spread = max((max(of) - min(of)) / 2 / statistics.median(of) for of in first.values())
    model = Points(points, measured.node, measured.cores, 0.0, noise=max(NOISE, spread))
    most = max(measured.seconds)
    more = [most * 2**power for power in range(1, BEYOND.bit_length()) if most * 2**power <= MOST_RANKS]
    ranks = sorted({*measured.seconds, *more})
    if model.misfit > WORST_MISFIT:
        return ()
    forecast = model.forecast(ranks)
    work = points[0].ranks * points[0].seconds
    columns = [work / (forecast.ranks * seconds) for seconds in (forecast.seconds, forecast.high, forecast.low)]
    return tuple((int(n), float(a), float(b), float(c)) for n, a, b, c in zip(ranks, *columns, strict=True))
