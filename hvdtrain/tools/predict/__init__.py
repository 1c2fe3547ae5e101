"""`python -m hvdtrain predict`: time, throughput and efficiency on N ranks, with their bounds."""

import json
from collections.abc import Sequence
from typing import Any

from hvdtrain.core import flags
from hvdtrain.core.wording import counted
from hvdtrain.errors import RecipeError
from hvdtrain.terminal import Status
from hvdtrain.tools.bench import measure
from hvdtrain.tools.bench.measure import MOST_RANKS
from hvdtrain.tools.predict.scaling import NOISE, Forecast, gain_of_halving
from hvdtrain.tools.predict.task import Options, Task, task_of
from hvdtrain.untrusted import quoted

TITLES = {"fixed": "fixed part"}
"""What a cause is called where its name says too little."""
REMEDIES = {
    "joining": "what any allreduce costs, whatever the ranks: a larger batch a rank",
    "fixed": "what a run does once: start, find the files, start the readers anew, save",
    "network": "a faster link, a larger batch a rank, compression",
    "stragglers": "even readers and storage, pinned CPUs, nothing else on the nodes",
}
"""What takes less time where a cause limits, by the cause."""
WORTH_NAMING = 0.05  # the share of the time from which a cause limits
WIDE = 1.2  # the ratio of the ends of a wide band


def main(argv: Sequence[str]) -> int:
    """Prints the forecast; the exit code. Raises RecipeError, OutputError, EngineUnavailable."""
    options: Options = flags.parse(Options, "python -m hvdtrain predict", argv)
    if options.picture and options.picture.suffix != ".html":
        raise RecipeError(f"--picture is a page: name a file that ends in .html, got {quoted(str(options.picture))}.")
    with Status("fitting the model of a step"):
        task = task_of(options)
        forecast = task.model.forecast(task.ranks)
        if options.json:
            lines = [json.dumps(to_json(task, forecast))]
        else:
            wrapped = [line for text in remarks(task, forecast) for line in measure.folded(text)]
            lines = [*table(task, forecast), "", *wrapped]
    print("\n".join(lines))
    if options.picture:
        sentence, *_ = remarks(task, forecast)
        page = measure.page("predict", sentence, figure(task), table(task, forecast))
        measure.save(options.picture, page, "--picture a file")
    return 0


def to_json(task: Task, forecast: Forecast) -> dict[str, Any]:
    """The forecast for JSON; a `band` is [lowest, highest]."""
    model = task.model
    found: dict[str, Any] = {"throughput_unit": task.unit, "efficiency_against": {"ranks": task.against.ranks}}
    if task.measured:
        found |= {"points": [point._asdict() for point in model.points], "misfit": model.misfit}
    found["ranks_per_node"] = model.node
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
        fractions = forecast.fractions(index)
        rows.append({**row, "shares": fractions, "limited_by": _limit(fractions)})
    return {**found, "forecast": rows}


def table(task: Task, forecast: Forecast) -> list[str]:
    """The lines of the table: a row for each number of ranks, and below where its time goes."""
    per_step = not task.whole_run and task.steps
    time = "step/ms" if per_step else "seconds"
    header = ("ranks", time, "lowest-highest", task.unit, "efficiency/%", "lowest-highest")
    rows = []
    causes = ["ranks  where the time goes"]
    for row, ranks in zip(to_json(task, forecast)["forecast"], task.ranks, strict=True):
        scale = 1e3 * ranks / task.steps if per_step and task.steps else 1.0
        low, high = (_short(scale * end) for end in row["band"]["seconds"])
        worst, best = (f"{100 * end:.0f}" for end in row["band"]["efficiency"])
        largest = sorted(row["shares"].items(), key=lambda item: -item[1])
        where = ", ".join(f"{TITLES.get(name, name)} {fraction:.0%}" for name, fraction in largest if fraction >= 0.005)
        cells = (_short(scale * row["seconds"]), f"{low}-{high}", _short(row["throughput"]))
        rows.append((str(ranks), *cells, f"{100 * row['efficiency']:.0f}", f"{worst}-{best}"))
        causes.append(f"{ranks:5}  {where}")
    return [*measure.table(header, rows), "", *causes]


def remarks(task: Task, forecast: Forecast) -> list[str]:
    """Sentences on what efficiency is against, what limits next, and what would narrow the band."""
    found = [f"Efficiency is against {counted(task.against.ranks, 'rank')}."]
    model = task.model
    if model.misfit > NOISE:
        found.append(f"The nearest fit misses a point by {model.misfit:.1%}.")
    if not model.link and model.points[-1].ranks <= model.node < task.ranks[-1]:
        found.append("No point spans two nodes, so the network between them is left out; --link-gbit brings it in.")
    limit = _next_limit(task)
    fractions = forecast.fractions(-1)
    most = task.ranks[-1]
    if limit is None:
        found.append(f"Compute limits up to {MOST_RANKS} ranks: faster devices, or more of them.")
    else:
        cause, ranks = limit
        gain = gain_of_halving(list(fractions.values()))[list(fractions).index(cause)]
        title = TITLES.get(cause, cause)
        found.append(
            f"What limits next: the {title}, from {counted(ranks, 'rank')} on more than a tenth of the time; half of "
            f"it would make {counted(most, 'rank')} {gain:.0%} faster ({REMEDIES[cause]})."
        )
    wide = forecast.high[-1] > WIDE * forecast.low[-1]
    if wide and task.measured:
        missing = [] if model.fixed_seconds is not None else ["--fixed-seconds (the time to a run's first step)"]
        steps = "--gradient-mb, --batch and --examples" if task.whole_run else "--gradient-mb"
        missing += [] if model.link else [f"--link-gbit with {steps}"]
        missing += ["one more point"]
        found.append(f"The points leave open what took the time. Narrower with: {', or '.join(missing)}.")
    elif wide:
        found.append("Narrower with --overlap (0 to 0.67), or with two measured points.")
    return found


def figure(task: Task) -> measure.Figure:
    """The chart of efficiency over ranks: the forecast with its band, and the measured points."""
    most, least = max(task.ranks), task.against.ranks
    ranks = sorted({round(least * (most / least) ** (step / 24)) for step in range(25)} | {*task.ranks})
    found = task.model.forecast(ranks)
    rows = zip(ranks, found.low.tolist(), found.seconds.tolist(), found.high.tolist(), strict=True)
    lines = {"forecast": {n: [100 * _efficiency(task, n, each) for each in seconds] for n, *seconds in rows}}
    if task.measured:
        lines["measured"] = {point.ranks: [100 * _efficiency(task, *point)] for point in task.model.points}
    return measure.Figure(lines, "ranks", f"% of a rank's speed on {counted(least, 'rank')}", base=2)


def _efficiency(task: Task, ranks: int, seconds: float) -> float:
    return task.against.ranks * task.against.seconds / (ranks * seconds)


def _limit(fractions: dict[str, float], least: float = WORTH_NAMING) -> str:
    """The cause other than compute that takes the largest share of the time, where this is at least `least`; else
    compute."""
    cause = max((name for name in fractions if name != "compute"), key=fractions.__getitem__)
    return cause if fractions[cause] >= least else "compute"


def _next_limit(task: Task) -> tuple[str, int] | None:
    """The cause to take more than a tenth of the time first, and from how many ranks on."""
    known = task.model.points[-1].ranks
    ranks = [2**k for k in range(MOST_RANKS.bit_length()) if 2**k > known]
    if not ranks:
        return None
    forecast = task.model.forecast(ranks)
    causes = (_limit(forecast.fractions(index), 0.1) for index in range(len(ranks)))
    return next(((cause, number) for cause, number in zip(causes, ranks, strict=False) if cause != "compute"), None)


def _short(value: float) -> str:
    """A number in four digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
