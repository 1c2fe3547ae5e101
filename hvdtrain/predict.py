"""`python -m hvdtrain predict`: time, throughput and efficiency on N ranks, and how sure that is."""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import tyro
from pydantic import BaseModel, ConfigDict, Field

from hvdtrain import flags
from hvdtrain.errors import RecipeError
from hvdtrain.scaling import NOISE, Forecast, Link, Physics, Point, Points, StepModel, gain_of_halving
from hvdtrain.untrusted import quoted, read_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROG = "python -m hvdtrain predict"
MOST_RANKS = 16_384
MOST_POINTS = 32  # each of them, and each number of ranks asked for, takes a fit
LEAST, MOST = 1e-9, 1e12  # of seconds, megabytes, ...: far beyond any, and their products are numbers still
MOST_BYTES = 2**20  # of a file of points
WORST_MISFIT = 0.25
TITLES = {
    "compute": "compute",
    "fixed": "fixed part",
    "joining": "joining",
    "network": "network",
    "stragglers": "stragglers",
}
REMEDIES = {
    "joining": "what any allreduce costs, whatever the ranks: a larger batch a rank",
    "fixed": "what a run does once: start, find the files, start the readers anew, save",
    "network": "a faster link, a larger batch a rank, compression",
    "stragglers": "even readers and storage, pinned CPUs, nothing else on the nodes",
}
WORTH_TELLING = 0.05  # of the time
WIDE = 1.2  # of the band's ends


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Predicts time, throughput and efficiency on N ranks.

    From measured runs: --point 4:5355.9 --point 16:1488.2 (ranks:seconds for the same work, each rank with the same
    batch), or --from the JSON of `bench scaling`. Or from --step-seconds, --gradient-mb and --link-gbit.
    """

    point: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help="ranks:seconds of a run; twice or more")
    ] = ()
    from_file: Annotated[
        Path | None, tyro.conf.arg(name="from", help="scaling.json, of bench scaling --output", metavar="FILE")
    ] = None
    ranks: Annotated[str | None, tyro.conf.arg(help="as 32,64,128; left out: powers of two", metavar="N,N")] = None
    ranks_per_node: Annotated[
        int | None, tyro.conf.arg(help="left out: the fewest ranks of a point, else 1", metavar="N")
    ] = None
    cores: Annotated[int | None, tyro.conf.arg(help="that all ranks share; left out: enough", metavar="N")] = None
    fixed_seconds: Annotated[
        float | None, tyro.conf.arg(help="of a run, the same whatever the ranks; left out: not known", metavar="S")
    ] = None
    examples: Annotated[int | None, tyro.conf.arg(help="that a run reads, all epochs together", metavar="N")] = None
    batch: Annotated[int | None, tyro.conf.arg(help="examples a rank and step", metavar="N")] = None
    step_seconds: Annotated[float | None, tyro.conf.arg(help="of one rank alone", metavar="S")] = None
    gradient_mb: Annotated[float | None, tyro.conf.arg(help="4 bytes a parameter; 1e6 bytes", metavar="MB")] = None
    link_gbit: Annotated[float | None, tyro.conf.arg(help="of a node, each way; 1e9 bits/s", metavar="GBIT")] = None
    latency_us: Annotated[float, tyro.conf.arg(help="of a message between nodes", metavar="US")] = 0.0
    node_gbit: Annotated[float | None, tyro.conf.arg(help="of a rank inside its node; left out: free")] = None
    overlap: Annotated[
        float | None, tyro.conf.arg(help="part of a step behind which the allreduce hides; left out: 0 to 2/3")
    ] = None
    fusion_mb: Annotated[
        float | None, tyro.conf.arg(help="buffers of this size, the last never hidden; left out: one, hidden")
    ] = None
    json: Annotated[bool, tyro.conf.arg(help="print JSON alone")] = False
    picture: Annotated[Path | None, tyro.conf.arg(help="draw efficiency over ranks", metavar="FILE.png")] = None


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked: the model, the ranks, and the units of the answer."""

    model: Points | Physics
    ranks: tuple[int, ...]
    against: Point
    """What efficiency is against: the point of fewest ranks, or one rank."""
    per_second: float
    """Throughput of a run of one second."""
    unit: str
    steps: float | None
    """Of one rank alone, where known."""
    whole_run: bool
    """Whether seconds are those of a run; else of a step's work of one rank."""


Seconds = Annotated[float, Field(ge=LEAST, le=MOST)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]


class Scaling(BaseModel):
    """What is read of `bench scaling`'s JSON: seconds of a step by the number of ranks, one figure a round."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    batch: Annotated[int, Field(ge=1, le=10**9)]
    cores: Annotated[int, Field(ge=1, le=10**6)] | None
    ranks_per_node: Ranks
    weak: Annotated[
        dict[Annotated[Ranks, Field(strict=False)], Annotated[list[Seconds], Field(min_length=1)]],
        Field(max_length=MOST_POINTS),
    ]


def main(argv: Sequence[str]) -> int:
    """Prints the forecast. Raises RecipeError, OutputError, EngineUnavailable."""
    options: Options = flags.parse(Options, PROG, argv)
    task = task_of(options)
    forecast = task.model.forecast(task.ranks)
    if options.json:
        print(json.dumps(facts(task, forecast)))
    else:
        print("\n".join([*table(task, forecast), "", *remarks(task, forecast)]))
    if options.picture:
        from hvdtrain.bench.measure import picture

        picture(lambda axes: draw(axes, task), options.picture)
    return 0


def task_of(options: Options) -> Task:
    """The options' meaning. Raises RecipeError for what breaks a rule."""
    _refuse_bad_numbers(options)
    measured = bool(options.point or options.from_file)
    if measured and options.step_seconds is not None:
        raise RecipeError("--step-seconds and measured points are two ways to ask; give one of them.")
    if options.point and options.from_file:
        raise RecipeError("--from has points of its own; give --point or --from.")
    if options.from_file:
        return _from_file(options, options.from_file)
    if measured:
        points = parse_points(options.point)
        _refuse_rising(points, options)
        return _from_points(options, points, NOISE, options.fixed_seconds)
    return _from_physics(options)


def parse_points(words: Sequence[str]) -> tuple[Point, ...]:
    """`ranks:seconds` each -> points by ranks. Raises RecipeError."""
    points = []
    if len(words) > MOST_POINTS:
        raise RecipeError(f"--point must be given at most {MOST_POINTS} times, got {len(words)}.")
    for word in words:
        ranks, _, seconds = word.partition(":")
        try:
            points.append(Point(int(ranks), float(seconds)))
        except ValueError:
            raise RecipeError(f"--point must read like 4:5355.9 (ranks:seconds), got {quoted(word)}.") from None
        if not (1 <= points[-1].ranks <= MOST_RANKS and 0 < points[-1].seconds < math.inf):
            raise RecipeError(f"--point must have 1 to {MOST_RANKS} ranks and more than 0 seconds, got {quoted(word)}.")
        if not LEAST <= points[-1].seconds <= MOST:
            raise RecipeError(f"--point must have {LEAST:g} to {MOST:g} seconds, got {quoted(word)}.")
    points.sort()
    for few, many in itertools.pairwise(points):
        if few.ranks == many.ranks:
            raise RecipeError(
                f"--point gives {few.ranks} ranks twice; give each number once, with the median of its runs."
            )
    if len(points) == 1:
        raise RecipeError(
            "--point must be given at least twice, got 1; or give --step-seconds, --gradient-mb and --link-gbit."
        )
    return tuple(points)


def facts(task: Task, forecast: Forecast) -> dict[str, Any]:
    """The forecast as JSON; a `band` is [lowest, highest]."""
    model = task.model
    found: dict[str, Any] = {"throughput_unit": task.unit, "efficiency_against": {"ranks": task.against.ranks}}
    if isinstance(model, Points):
        found |= {"points": [point._asdict() for point in model.points], "misfit": max(0.0, model.misfit)}
        found |= {"ranks_per_node": model.node}
    else:
        found |= {"ranks_per_node": model.model.node}
    rows = []
    for index, ranks in enumerate(task.ranks):
        times = [float(column[index]) for column in (forecast.seconds, forecast.low, forecast.high)]
        throughputs = [task.per_second / seconds for seconds in times]
        efficiencies = [_efficiency(task, ranks, seconds) for seconds in times]
        band = {"seconds": times[1:], "throughput": throughputs[:0:-1], "efficiency": efficiencies[:0:-1]}
        row: dict[str, Any] = {"ranks": ranks, "seconds": times[0], "throughput": throughputs[0]}
        row |= {"efficiency": efficiencies[0], "band": band}
        if task.steps:
            row["step_seconds"] = times[0] * ranks / task.steps
        shares = forecast.shares(index)
        rows.append({**row, "shares": shares, "limited_by": _limit(shares)})
    return {**found, "forecast": rows}


def table(task: Task, forecast: Forecast) -> list[str]:
    """Lines for people: a row for each number of ranks."""
    per_step = not task.whole_run and task.steps
    time = "step/ms" if per_step else "seconds"
    rows = [("ranks", time, "lowest-highest", task.unit, "efficiency/%", "lowest-highest", "where the time goes")]
    for row, ranks in zip(facts(task, forecast)["forecast"], task.ranks, strict=True):
        scale = 1e3 * ranks / task.steps if per_step and task.steps else 1.0
        low, high = (_short(scale * end) for end in row["band"]["seconds"])
        worst, best = (f"{100 * end:.0f}" for end in row["band"]["efficiency"])
        told = sorted(row["shares"].items(), key=lambda item: -item[1])
        where = ", ".join(f"{TITLES[name]} {share:.0%}" for name, share in told if share >= 0.005)
        cells = (_short(scale * row["seconds"]), f"{low}-{high}", _short(row["throughput"]))
        rows.append((str(ranks), *cells, f"{100 * row['efficiency']:.0f}", f"{worst}-{best}", where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)), row[-1]])
        for row in rows
    ]


def remarks(task: Task, forecast: Forecast) -> list[str]:
    """What efficiency is against, what limits next, and what would narrow the band."""
    found = [f"Efficiency is against {task.against.ranks} rank{'s' if task.against.ranks > 1 else ''}."]
    if isinstance(task.model, Points) and task.model.misfit > NOISE:
        found.append(f"No such model comes nearer to all points than {task.model.misfit:.1%}.")
    model = task.model
    if isinstance(model, Points) and not model.link and model.points[-1].ranks <= model.node < task.ranks[-1]:
        found.append("No point spans two nodes, so the network between them is left out; --link-gbit brings it in.")
    limit = _next_limit(task)
    shares = forecast.shares(-1)
    most = task.ranks[-1]
    if limit is None:
        found.append(f"Compute limits up to {MOST_RANKS} ranks: faster devices, or more of them.")
    else:
        cause, ranks = limit
        gain = gain_of_halving(list(shares.values()))[list(shares).index(cause)]
        found.append(
            f"What limits next: the {TITLES[cause]}, from {ranks} ranks on more than a tenth of the time; half of it "
            f"would make {most} ranks {gain:.0%} faster ({REMEDIES[cause]})."
        )
    wide = forecast.high[-1] > WIDE * forecast.low[-1]
    if wide and isinstance(task.model, Points):
        missing = [] if task.model.fixed_seconds is not None else ["--fixed-seconds (the time to a run's first step)"]
        steps = "--gradient-mb, --batch and --examples" if task.whole_run else "--gradient-mb"
        missing += [] if task.model.link else [f"--link-gbit with {steps}"]
        missing += ["one more point"]
        found.append(f"The points leave open what took the time. Narrower with: {', or '.join(missing)}.")
    elif wide:
        found.append("Narrower with --overlap (0 to 0.67), or with two measured points.")
    return found


def draw(axes: "Axes", task: Task) -> None:
    """Efficiency over ranks: the forecast, its band, and the measured points."""
    from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

    most = max(task.ranks)
    least = task.against.ranks
    ranks = sorted({round(least * (most / least) ** (step / 24)) for step in range(25)} | {*task.ranks})
    forecast = task.model.forecast(ranks)
    low, middle, high = (
        [_efficiency(task, n, s) for n, s in zip(ranks, column.tolist(), strict=True)]
        for column in (forecast.high, forecast.seconds, forecast.low)
    )
    axes.fill_between(ranks, low, high, color="#56B4E9", alpha=0.3, linewidth=0, label="lowest to highest")
    axes.plot(ranks, middle, color="#0072B2", label="forecast")
    if isinstance(task.model, Points):
        measured = task.model.points
        values = [_efficiency(task, *point) for point in measured]
        axes.plot([point.ranks for point in measured], values, "o", color="#D55E00", markersize=8, label="measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**k for k in range(math.ceil(math.log2(least)), int(math.log2(most)) + 1)])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", rotation=45 if most > 1024 else 0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axes.set_ylim(0, 1.05 * max(1.0, *high))
    axes.set(xlabel="Number of ranks", ylabel=f"Efficiency against {least} rank{'s' if least > 1 else ''} / %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")


def _refuse_bad_numbers(options: Options) -> None:
    positive = ("ranks_per_node", "cores", "examples", "batch", "step_seconds", "gradient_mb", "link_gbit")
    for name in (*positive, "node_gbit", "fusion_mb"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise RecipeError(f"{_flag(name)} must be more than 0, got {value:g}.")
        if value is not None and not LEAST <= value <= MOST:
            raise RecipeError(f"{_flag(name)} must lie in [{LEAST:g}, {MOST:g}], got {value:g}.")
    for name in ("fixed_seconds", "latency_us"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise RecipeError(f"{_flag(name)} must be at least 0, got {value:g}.")
        if value is not None and value > MOST:
            raise RecipeError(f"{_flag(name)} must be at most {MOST:g}, got {value:g}.")
    if options.overlap is not None and not 0 <= options.overlap <= 1:
        raise RecipeError(f"--overlap must lie in [0, 1], got {options.overlap:g}.")


def _refuse_rising(points: Sequence[Point], options: Options) -> None:
    for few, many in itertools.pairwise(points):
        enough_cores = options.cores is None or many.ranks <= options.cores
        if many.seconds >= few.seconds and enough_cores and options.link_gbit is None:
            raise RecipeError(
                f"--point: {many.ranks} ranks take {many.seconds:g} s, no less than {few.ranks} with {few.seconds:g} "
                "s; give the seconds for the same work, or say --link-gbit where the network is that slow."
            )


def _ranks(options: Options, fewest: int) -> tuple[int, ...]:
    """Those asked for, or powers of two above the points."""
    if options.ranks is None:
        first = 2 ** max(0, math.ceil(math.log2(fewest)))
        return tuple(n for n in (first * 2**k for k in range(1, 8)) if n <= MOST_RANKS) or (MOST_RANKS,)
    try:
        ranks = tuple(sorted({int(word) for word in options.ranks.split(",")}))
    except ValueError:
        raise RecipeError(f"--ranks must read like 32,64,128, got {quoted(options.ranks)}.") from None
    bad = next((n for n in ranks if not 1 <= n <= MOST_RANKS), None)
    if bad is not None:
        raise RecipeError(f"--ranks must lie in [1, {MOST_RANKS}], got {quoted(bad)}.")
    if len(ranks) > MOST_POINTS:
        raise RecipeError(f"--ranks must be at most {MOST_POINTS} numbers, got {len(ranks)}.")
    return ranks


def _from_points(options: Options, points: tuple[Point, ...], noise: float, fixed: float | None) -> Task:
    cores = options.cores or math.inf
    if fixed is not None and fixed >= points[-1].seconds:
        raise RecipeError(
            f"--fixed-seconds must be less than the {points[-1].seconds:g} s of a whole run, got {fixed:g}."
        )
    steps = options.examples / options.batch if options.examples and options.batch else None
    node = options.ranks_per_node or points[0].ranks
    link = None
    if options.link_gbit is not None:
        if steps is None or options.gradient_mb is None:
            raise RecipeError(
                "--link-gbit beside points needs --gradient-mb, --batch and --examples, to know how often the "
                "gradients travel."
            )
        link = Link(_step_model(options, points[0].seconds, node), steps)
    elif options.overlap is not None:
        raise RecipeError("--overlap beside points needs --link-gbit; without it the points alone speak.")
    model = Points(points, node, cores, fixed, link, options.overlap, noise)
    if model.misfit > WORST_MISFIT:
        raise RecipeError(
            f"--point: the model has to miss a point by {model.misfit:.0%}; give seconds of the same work, each rank "
            "with the same batch."
        )
    per_second, unit = (options.examples, "examples/s") if options.examples else (3600.0, "runs/h")
    return Task(model, _ranks(options, points[-1].ranks), points[0], per_second, unit, steps, whole_run=True)


def _from_file(options: Options, path: Path) -> Task:
    """The task of `bench scaling`'s JSON: steps without a run's fixed part."""
    try:
        found = Scaling.model_validate_json(read_bytes(path, MOST_BYTES))
    except OSError as error:
        raise RecipeError(f"--from must name the JSON of bench scaling, got {path}: {error.strerror}.") from None
    except ValueError:  # of the JSON, or of a number in it
        raise RecipeError(
            f"--from must name the JSON of bench scaling with its weak part, got {path}; make one with: "
            "python -m hvdtrain bench scaling --output DIR"
        ) from None
    middle = {n: statistics.median(times) for n, times in found.weak.items()}
    spread = max(((max(times) - min(times)) / 2 / middle[n] for n, times in found.weak.items()), default=0.0)
    if len(middle) < 2:
        raise RecipeError(f"--from needs at least two numbers of ranks, {path} has {len(middle)}; bench more of them.")
    points = tuple(Point(n, seconds / n) for n, seconds in sorted(middle.items()))
    of_a_step = dataclasses.replace(
        options,
        batch=found.batch,
        examples=found.batch,
        cores=options.cores or found.cores,
        ranks_per_node=options.ranks_per_node or found.ranks_per_node,
    )
    task = _from_points(of_a_step, points, max(NOISE, spread), 0.0)
    return dataclasses.replace(task, whole_run=False)


def _from_physics(options: Options) -> Task:
    lacks = [_flag(name) for name in ("step_seconds", "gradient_mb", "link_gbit") if getattr(options, name) is None]
    if lacks:
        raise RecipeError(
            f"nothing to predict from: give --point RANKS:SECONDS twice, or --from FILE, or add {', '.join(lacks)}."
        )
    assert options.step_seconds is not None
    batch = options.batch or 1
    steps = (options.examples or batch) / batch
    model = _step_model(options, options.step_seconds, options.ranks_per_node or 1)
    physics = Physics(model, steps, options.fixed_seconds or 0.0, options.overlap)
    alone = Point(1, float(physics.forecast([1]).seconds[0]))
    unit = "examples/s" if options.batch or options.examples else "rank-steps/s"
    return Task(physics, _ranks(options, 1), alone, steps * batch, unit, steps, whole_run=options.examples is not None)


def _step_model(options: Options, compute: float, node: int) -> StepModel:
    assert options.gradient_mb is not None
    assert options.link_gbit is not None
    return StepModel(
        compute,
        1e6 * options.gradient_mb,
        8e-9 / options.link_gbit,
        message_seconds=1e-6 * options.latency_us,
        node=node,
        cores=options.cores or math.inf,
        node_byte_seconds=8e-9 / options.node_gbit if options.node_gbit else 0.0,
        fusion_bytes=1e6 * options.fusion_mb if options.fusion_mb else math.inf,
    )


def _efficiency(task: Task, ranks: int, seconds: float) -> float:
    return task.against.ranks * task.against.seconds / (ranks * seconds)


def _limit(shares: dict[str, float]) -> str:
    """The cause that takes most beside compute, where it takes enough to be worth telling; else compute."""
    cause = max((name for name in shares if name != "compute"), key=shares.__getitem__)
    return cause if shares[cause] >= WORTH_TELLING else "compute"


def _next_limit(task: Task) -> tuple[str, int] | None:
    """The first cause that takes more than a tenth of the time, and from how many ranks on, by powers of two beyond
    the points."""
    known = task.model.points[-1].ranks if isinstance(task.model, Points) else 1
    ranks = [2**k for k in range(MOST_RANKS.bit_length()) if 2**k > known]
    if not ranks:
        return None
    forecast = task.model.forecast(ranks)
    for index, number in enumerate(ranks):
        shares = forecast.shares(index)
        cause = max((name for name in shares if name != "compute"), key=shares.__getitem__)
        if shares[cause] > 0.1:
            return cause, number
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _short(value: float) -> str:
    """Four digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
