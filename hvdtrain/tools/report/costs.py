"""Where a run's time and energy went: the parts of its wall time, each rank's time of a step, joules.

All launches are on one axis of time, from submit to the last sign of life. It is made of what lies between two
launches, and of each launch's own clock. So the parts add up to the wall time whatever the hosts' clocks say: a launch
that seems to begin before the one before it has ended begins at its end.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdtrain import untrusted
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.record.history import MOST_RANKS, PHASES, STEPS, Launch, Times
from hvdtrain.tools.report.model import Energy, EnergyRow, HeatMap, Part, Waterfall

NAMES = {"first_step": "first step", "checkpoint": "checkpoints"}
NOTES = {
    "queue": "waiting for SLURM to start the job",
    "start": "from the job's start until the program runs: nodes, the launcher, Python",
    "import": "loading the framework and the user's code",
    "rendezvous": "until all ranks had found each other",
    "data": "opening the data set",
    "model": "building the network",
    "first step": "until the first update of a launch, with what is compiled or warmed up for it",
    "training": "steps that count",
    "validation": "",
    "checkpoints": "as far as they held up training",
    "lost work": "steps that a later launch made again",
    "end": "last checkpoint, files, goodbye to the other ranks",
    "idle": "between two launches, without a queue that explains it",
}
COLUMNS = 300
WAITING = "waiting for other ranks"
PARTS = {"reading": "reading", "computing": "computing", "waiting": WAITING}
"""By the name in the records, the parts of a step."""
MARK = " is "
"""What stands between a slow rank's name and the reason in the text of its event."""
JOULES = 3.6e6
"""Joules of a kWh."""
JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,8})?")
MOST_JOBS = 100
FIELDS = ("JobIDRaw", "Start", "ElapsedRaw", "NNodes", "ConsumedEnergyRaw")
LONG_JOB = 1.25
"""A job that took so many times the run's own time did something else, too."""
SLURM, SLURM_SCOPE = "SLURM ConsumedEnergy", "whole nodes of the job, from its start to its end"
NOT_MEASURED = 2**63
"""Figures from this one on stand for none: SLURM prints 2^64 - 2 for what it has not measured."""
SOURCES = {
    "pm_counters": ("Cray pm_counters", "whole nodes"),
    "nvml": ("NVML", "GPUs of the job only"),
    "amdsmi": ("amdsmi", "GPUs of the job only"),
    "rapl": ("RAPL", "processors and memory of the nodes, whoever used them"),
}
"""By the key in the run's records: name and scope. In the order in which the run's figure is chosen."""
DEVICES = ("nvml", "amdsmi")


@dataclass(frozen=True)
class Axis:
    """The report's axis of time, in seconds since its beginning."""

    began: float | None
    """When it begins, in seconds since 1970: at submit, else at the first launch."""
    launches: tuple[float, ...]
    """Where each launch begins."""
    gaps: tuple[tuple[tuple[str, float], ...], ...]
    """The intervals before each launch: their names and seconds."""
    end: float


def axis_of(launches: Sequence[Launch]) -> Axis:
    """All launches one after another."""
    if not launches:
        return Axis(None, (), (), 0.0)
    first = launches[0]
    candidates = [time for time in (first.submit, first.start, first.time) if time is not None]
    began = min(candidates, default=0.0)
    now, starts, gaps, before = began, [], [], None
    for launch in launches:
        begins = max(now, now if launch.time is None else launch.time)
        gaps.append(tuple(_gap(launch, before, now, begins)))
        before = launch
        starts.append(begins - began)
        now = begins + launch.clock
    return Axis(began if candidates else None, tuple(starts), tuple(gaps), now - began)


def _gap(launch: Launch, before: Launch | None, since: float, until: float) -> list[tuple[str, float]]:
    """What lies between the end of a launch and the beginning of this one, in intervals."""
    if launch.start is None or (before and before.job == launch.job and launch.start < since):
        return [("idle", until - since)]  # no job's start lies here
    start = min(max(launch.start, since), until)
    submit = start if launch.submit is None else min(max(launch.submit, since), start)
    return [("idle", submit - since), ("queue", start - submit), ("start", until - start)]


def waterfall(launches: Sequence[Launch], axis: Axis) -> Waterfall | None:
    """None where no launch has recorded its time."""
    parts: dict[str, float] = {}
    for index, (launch, gap) in enumerate(zip(launches, axis.gaps, strict=True)):
        later = launches[index + 1 :]
        for name, seconds in (*gap, *_inside(launch, later).items()):
            if seconds > 0:
                parts[name] = parts.get(name, 0.0) + seconds
    if not parts:
        return None
    wall = sum(parts.values())
    goodput = parts.get("training", 0.0) / wall if any(launch.phases for launch in launches) else None
    return Waterfall(wall, tuple(Part(name, seconds, NOTES.get(name, "")) for name, seconds in parts.items()), goodput)


def _inside(launch: Launch, later: Sequence[Launch]) -> dict[str, float]:
    """The launch's phases by their names in the report; they add up to its clock."""
    phases = dict(launch.phases)
    was_killed = bool(later) and launch.end is None
    after = "training" if was_killed else launch.grew or PHASES[0]  # since the last record of phases
    phases[after] = phases.get(after, 0.0) + launch.clock - sum(launch.phases.values())
    lost = _lost(launch, phases, later)
    phases = _without(phases, lost)
    return {NAMES.get(name, name): seconds for name, seconds in phases.items()} | {"lost work": lost}


def _lost(launch: Launch, phases: Mapping[str, float], later: Sequence[Launch]) -> float:
    """Seconds of the launch's steps that a later one made again."""
    if not later:
        return 0.0
    kept = min(following.first_step for following in later)
    if launch.end and launch.end.state in {"finished", "stopped"} and kept >= launch.last_step:
        return 0.0
    steps = sum(phases.get(name, 0.0) for name in STEPS)
    return max(0.0, steps - launch.step_seconds_until(kept))


def _without(phases: dict[str, float], lost: float) -> dict[str, float]:
    """The phases without so many seconds of their last steps."""
    training = min(lost, phases.get("training", 0.0))
    first = lost - training
    return phases | {
        "training": phases.get("training", 0.0) - training,
        "first_step": phases.get("first_step", 0.0) - first,
    }


def step_parts(launches: Sequence[Launch]) -> dict[str, float]:
    """Median seconds of a step over the ranks and the run, of those of PARTS that are known; the first record of a
    launch has its warm-up, and is left out among others."""
    records = [times for launch in launches for times in (launch.times[1:] or launch.times)]
    found = {}
    for name, label in PARTS.items():
        values = np.concatenate([np.zeros(0), *(getattr(times, name) for times in records)])
        known = values[np.isfinite(values)]
        if len(known):
            found[label] = float(np.median(known))
    return found


def slow_ranks(launches: Sequence[Launch]) -> dict[int, str]:
    """Rank -> why the run has named it, as "slow in computing: 40 ms of each step, ..."."""
    found = {}
    for launch in launches:
        for event in launch.events:
            if event.kind == "slow" and event.rank is not None:
                _, mark, why = event.text.partition(MARK)
                found[event.rank] = why.rstrip(".") if mark else event.text.rstrip(".")
    return found


def heat_map(launches: Sequence[Launch], axis: Axis) -> HeatMap | None:
    """None where the ranks' times were not recorded, or of one rank alone."""
    records = [
        (begins + times.clock, times)
        for launch, begins in zip(launches, axis.launches, strict=True)
        for times in launch.times
    ]
    ranks = _ranks([times for _, times in records], slow_ranks(launches))
    if len(ranks) < 2:
        return None
    own = np.full((len(ranks), len(records)), np.nan)
    for column, (_, times) in enumerate(records):
        shown = np.isin(times.ranks, ranks)
        own[np.searchsorted(ranks, np.array(times.ranks)[shown]), column] = times.own[shown]
    groups = np.array_split(np.arange(len(records)), min(len(records), COLUMNS))
    known, starts = np.isfinite(own), [group[0] for group in groups]
    total = np.add.reduceat(np.where(known, own, 0.0), starts, axis=1)
    count = np.add.reduceat(known.astype(int), starts, axis=1)
    at = np.array([records[group[-1]][0] for group in groups])
    slow = {ranks.index(rank): why for rank, why in slow_ranks(launches).items() if rank in ranks}
    names = {rank: launch.name_of(rank) for launch in launches for rank in ranks if launch.times}
    seconds = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return HeatMap(at, tuple(names[rank] for rank in ranks), seconds, slow)


def _ranks(records: Sequence[Times], slow: Mapping[int, str]) -> list[int]:
    """The rows: all ranks, of too many those that were named and then those that took the longest."""
    longest: dict[int, float] = {}
    for times in records:
        for rank, seconds in zip(times.ranks, np.nan_to_num(times.own).tolist(), strict=True):
            longest[rank] = max(longest.get(rank, 0.0), seconds)
    by_need = sorted(longest, key=lambda rank: (rank not in slow, -longest[rank], rank))
    return sorted(by_need[:MOST_RANKS])


@dataclass(frozen=True)
class Measured:
    """Joules in so many seconds; `nodes` None where nobody says."""

    source: str
    scope: str
    joules: float
    seconds: float
    nodes: int | None = None


def energy(launches: Sequence[Launch], epochs: float, co2_g_per_kwh: float | None) -> Energy:
    """Each job and each counter once. `epochs`: that the run has made."""
    job, why = of_jobs(launches)
    measured = [*([job] if job else []), *of_counters(launches)]
    if not measured:
        return Energy((), None, None, None, f"{why}; no counter of the nodes or GPUs could be read.")
    figure = measured[0]
    kwh = figure.joules / JOULES
    return Energy(
        rows=tuple(EnergyRow(each.source, each.joules / JOULES, each.nodes, each.scope) for each in measured),
        mean_watts=figure.joules / figure.seconds if figure.seconds else None,
        kwh_per_epoch=kwh / epochs if epochs else None,
        co2_grams=None if co2_g_per_kwh is None else kwh * co2_g_per_kwh,
        note=_note(figure, job is not None, launches),
    )


def of_jobs(launches: Sequence[Launch]) -> tuple[Measured | None, str]:
    """SLURM's figure of the run's jobs, with all their starts; or None and why."""
    jobs = list(dict.fromkeys(launch.job_id for launch in launches if JOB_ID.fullmatch(launch.job_id)))
    if not jobs:
        return None, "the run was in no job of SLURM"
    try:
        measured = of_table(slurm.accounting(jobs[:MOST_JOBS], FIELDS))
    except SlurmError as error:
        texts = {
            "missing": f"sacct, which knows job {jobs[0]}, is not installed here",
            "refused": "sacct has failed (is there no accounting?)",
        }
        return None, texts.get(error.cause, f"sacct {error}")
    return measured, "" if measured else f"SLURM has no energy of job {', '.join(jobs[:3])}"


def of_table(printed: str) -> Measured | None:
    """The sum over sacct's lines, each start of each job once; None where one of them has no figure."""
    starts = {}
    for line in printed.splitlines():
        fields = line.strip().split("|")
        if len(fields) == len(FIELDS):
            starts[fields[0], fields[1]] = fields[2:]
    joules = seconds = 0.0
    nodes = 0
    for elapsed, count, consumed in starts.values():
        took, used = _number(elapsed), _number(consumed)
        if took and not 0 < used < NOT_MEASURED:
            return None
        joules, seconds, nodes = joules + used, seconds + took, max(nodes, int(_number(count)))
    return Measured(SLURM, SLURM_SCOPE, joules, seconds, nodes or None) if joules else None


def of_counters(launches: Iterable[Launch]) -> list[Measured]:
    """The sums over launches of what each had used at last; the first is the run's, where SLURM has none."""
    found: dict[str, Measured] = {}
    for launch in launches:
        for name in SOURCES.keys() & {name for name, joules in launch.joules.items() if joules > 0}:
            before = found.get(name, Measured(*SOURCES[name], 0.0, 0.0))
            nodes = max(before.nodes or 0, launch.nodes.get(name, 0)) or None
            joules, seconds = before.joules + launch.joules[name], before.seconds + launch.joules_clock
            found[name] = replace(before, joules=joules, seconds=seconds, nodes=nodes)
    known = [found[name] for name in SOURCES if name in found]
    parts = [found[name] for name in (*DEVICES, "rapl") if name in found]
    if "pm_counters" not in found and "rapl" in found and len(parts) > 1:
        known.insert(0, _together(parts))
    return known


def _together(parts: Sequence[Measured]) -> Measured:
    """GPUs and processors: they count different things, so their sum counts none twice."""
    return Measured(
        " + ".join(each.source for each in parts),
        "GPUs and processors; no power supplies, fans or network",
        sum(each.joules for each in parts),
        max(each.seconds for each in parts),
        max(each.nodes or 0 for each in parts) or None,
    )


def _note(figure: Measured, is_of_job: bool, launches: Sequence[Launch]) -> str:
    """What a reader must know of the figure."""
    said = f"Measured by {figure.source}: {figure.scope}."
    own = sum(launch.clock for launch in launches)
    if is_of_job and own and figure.seconds > LONG_JOB * own:
        return f"{said} The job took {figure.seconds:,.0f} s, this run {own:,.0f} s: the figure is the whole job's."
    behind = [launch for launch in launches if not launch.joules]
    if not is_of_job and behind:
        return f"{said} {len(behind)} of {len(launches)} launches are not in it: killed before they had read a counter."
    return said


def _number(text: str) -> float:
    """0 where it is none, or one that no counter has."""
    try:
        return untrusted.number(float(text), 0, 2.0**65) or 0.0
    except ValueError:
        return 0.0
