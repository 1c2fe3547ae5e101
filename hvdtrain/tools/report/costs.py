"""Where a run's time and energy went: the parts of its wall time, each rank's step time, joules.

All launches are on one axis of time, from submit to the last sign of life. A launch is as long on
it as its own clock says, and one that seems to begin before the one before it has ended begins at
that end. So the parts add up to the wall time, however the clocks of hosts differ.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain import untrusted
from hvdtrain.core.sharing import MOST_RANKS
from hvdtrain.core.wording import counted
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.record.history import PHASES, STEPS, Launch
from hvdtrain.record.reader import RecordedRun
from hvdtrain.tools.report.model import Energy, EnergyRow, HeatMap, Part, Waterfall, percent

NAMES = {"first_step": "first step", "checkpoint": "checkpoints"}
"""What a report calls phases whose names in the records differ."""
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
    "end": "the last checkpoint, the run's files, leaving the other ranks",
    "idle": "between two launches, but in no queue",
}
"""What a part of the wall time is, by its name."""
COLUMNS = 300
WAITING = "waiting for other ranks"
PARTS = {"reading": "reading", "computing": "computing", "waiting": WAITING}
"""The parts of a step, by their names in the records."""
STARVED = 0.5
"""A rank that had a processor for less than this part of its computing shared it with other work."""
JOULES = 3.6e6
"""Joules of a kWh."""
JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,8})?")
MOST_JOBS = 100
FIELDS = ("JobIDRaw", "Start", "ElapsedRaw", "NNodes", "ConsumedEnergyRaw")
LONG_JOB = 1.25
"""A job that took more than so many times as long as the run did something else, too."""
SLURM, SLURM_SCOPE = "SLURM ConsumedEnergy", "whole nodes of the job, from its start to its end"
SOURCES = {
    "pm_counters": ("Cray pm_counters", "whole nodes"),
    "nvml": ("NVML", "GPUs of the job only"),
    "amdsmi": ("amdsmi", "GPUs of the job only"),
    "rapl": ("RAPL", "processors and memory of the nodes, whoever used them"),
}
"""The name and scope of a counter, by its key in the records; the first that was read gives the run's energy."""


@dataclass(frozen=True)
class Axis:
    """The report's axis of time, in seconds since its beginning."""

    began: float | None
    """When it begins, in seconds since 1970: at submit, or else at the first launch."""
    launches: tuple[float, ...]
    """Where each launch begins."""
    gaps: tuple[tuple[tuple[str, float], ...], ...]
    """The names and seconds of the intervals before each launch."""


def axis_of(launches: Sequence[Launch]) -> Axis:
    """Places all launches, one after another."""
    if not launches:
        return Axis(None, (), ())
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
    return Axis(began if candidates else None, tuple(starts), tuple(gaps))


def _gap(launch: Launch, before: Launch | None, since: float, until: float) -> list[tuple[str, float]]:
    """The intervals between the end of a launch and the beginning of this one."""
    if launch.start is None or (before and before.job == launch.job and launch.start < since):
        return [("idle", until - since)]  # no job was started in between
    start = min(max(launch.start, since), until)
    submit = start if launch.submit is None else min(max(launch.submit, since), start)
    return [("idle", submit - since), ("queue", start - submit), ("start", until - start)]


def waterfall(launches: Sequence[Launch], axis: Axis) -> Waterfall | None:
    """The parts of the wall time; None where no launch has recorded its time."""
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
    of_step = step_parts(launches)
    waiting = of_step.get(WAITING, 0.0) / (sum(of_step.values()) or 1.0)
    caution = f"{percent(waiting)} of a step waits" if waiting else ""
    named = tuple(Part(name, seconds, NOTES.get(name, "")) for name, seconds in parts.items())
    return Waterfall(wall, named, goodput, caution)


def _inside(launch: Launch, later: Sequence[Launch]) -> dict[str, float]:
    """The launch's phases by their names in the report; they add up to its clock."""
    phases = dict(launch.phases)
    was_killed = bool(later) and launch.end is None
    after = "training" if was_killed else launch.grew or PHASES[0]  # the phase since the last record of phases
    phases[after] = phases.get(after, 0.0) + launch.clock - sum(launch.phases.values())
    lost = left = _lost(launch, phases, later)
    for name in ("training", "first_step"):
        taken = min(left, phases.get(name, 0.0))
        phases[name] = phases.get(name, 0.0) - taken
        left -= taken
    return {NAMES.get(name, name): seconds for name, seconds in phases.items()} | {"lost work": lost}


def _lost(launch: Launch, phases: Mapping[str, float], later: Sequence[Launch]) -> float:
    """Seconds of the launch's steps that a later one made again."""
    if not later:
        return 0.0
    kept = min(following.first_step for following in later)
    if launch.end and launch.end.state in {"finished", "stopped", "left"} and kept >= launch.last_step:
        return 0.0
    steps = sum(phases.get(name, 0.0) for name in STEPS)
    return max(0.0, steps - launch.step_seconds_until(kept))


def step_parts(launches: Sequence[Launch]) -> dict[str, float]:
    """The median seconds of each known part of a step. First records hold the warm-up."""
    records = [times for launch in launches for times in (launch.times[1:] or launch.times)]
    found = {}
    for name, label in PARTS.items():
        values = np.concatenate([np.zeros(0), *(getattr(times, name) for times in records)])
        known = values[np.isfinite(values)]
        if len(known):
            found[label] = float(np.median(known))
    return found


def processor_share(run: RecordedRun) -> float | None:
    """For how much of a second a rank of a run on CPUs had a processor, in the median of ranks; more than 1 with
    several threads, None where it is not known."""
    for launch in reversed(run.launches):
        first, last = launch.times[:1], launch.times[-1:]
        if launch.gpus == 0 and first and last[0].clock > first[0].clock and first[0].ranks == last[0].ranks:
            used = (last[0].processor - first[0].processor) / (last[0].clock - first[0].clock)
            used = used[np.isfinite(used)]
            return float(np.median(used)) if len(used) else None
    return None


def is_busy(run: RecordedRun) -> bool:
    """Whether the run's machine did other work: a rank computed for much longer than it had a processor."""
    used, parts = processor_share(run), step_parts(run.launches)
    return used is not None and used * sum(parts.values()) < STARVED * parts.get("computing", 0.0)


def slow_ranks(launches: Sequence[Launch]) -> dict[int, str]:
    """Why the run named a rank as slow, by rank: "slow in computing: 40 ms of each step, ..."."""
    found = {}
    for launch in launches:
        for event in launch.events:
            if event.kind == "slow" and event.rank is not None:
                _, _, why = event.text.partition(" is ")
                found[event.rank] = (why or event.text).rstrip(".")
    return found


def heat_map(launches: Sequence[Launch], axis: Axis) -> HeatMap | None:
    """The step time of each rank; None where it was not recorded, or of one rank alone."""
    records = [
        (begins + times.clock, times)
        for launch, begins in zip(launches, axis.launches, strict=True)
        for times in launch.times
    ]
    longest, named = dict[int, float](), slow_ranks(launches)
    for _, times in records:
        for rank, taken in zip(times.ranks, np.nan_to_num(times.own).tolist(), strict=True):
            longest[rank] = max(longest.get(rank, 0.0), taken)
    # Of too many, those named as slow and then those that took the longest.
    ranks = sorted(sorted(longest, key=lambda rank: (rank not in named, -longest[rank], rank))[:MOST_RANKS])
    if len(ranks) < 2:
        return None
    step_seconds = np.full((len(ranks), len(records)), np.nan)
    for column, (_, times) in enumerate(records):
        shown = np.isin(times.ranks, ranks)
        step_seconds[np.searchsorted(ranks, np.array(times.ranks)[shown]), column] = times.own[shown]
    groups = np.array_split(np.arange(len(records)), min(len(records), COLUMNS))
    known = np.ma.masked_invalid(step_seconds)
    seconds = np.stack([known[:, group].mean(axis=1).filled(np.nan) for group in groups], axis=1)
    at = np.array([records[group[-1]][0] for group in groups])
    slow = {ranks.index(rank): why for rank, why in named.items() if rank in ranks}
    names = {rank: launch.name_of(rank) for launch in launches for rank in ranks if launch.times}
    return HeatMap(at, tuple(names[rank] for rank in ranks), seconds, slow)


def energy(launches: Sequence[Launch], epochs: float, co2_g_per_kwh: float | None) -> Energy:
    """The energy of a run of so many epochs, each job and each counter counted once."""
    job, why = of_jobs(launches)
    rows = (*([job] if job else []), *of_counters(launches))
    if not rows:
        return Energy((), None, None, None, f"{why}; no counter of the nodes or GPUs could be read.")
    figure, took = rows[0], sum(launch.clock for launch in launches)
    lacks = 0 if job else sum(not launch.joules for launch in launches)
    note = f"Measured by {figure.source}: {figure.scope}."
    if job and took and figure.seconds > LONG_JOB * took:
        note += f" The job took {figure.seconds:,.0f} s, this run {took:,.0f} s: the figure is the whole job's."
    if lacks:
        note += f" {lacks} of {counted(len(launches), 'launch')} not in it: killed before a reading."
    return Energy(
        rows=rows,
        mean_watts=figure.kwh * JOULES / figure.seconds if figure.seconds else None,
        kwh_per_epoch=figure.kwh / epochs if epochs else None,
        co2_grams=None if co2_g_per_kwh is None else figure.kwh * co2_g_per_kwh,
        note=note,
    )


def of_jobs(launches: Sequence[Launch]) -> tuple[EnergyRow | None, str]:
    """SLURM's figure of the run's jobs, with all their starts; or None, and why there is none."""
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


def of_table(printed: str) -> EnergyRow | None:
    """The sum over the starts of jobs that sacct printed; None where one of them has no figure."""
    starts = {}
    for line in printed.splitlines():
        fields = line.strip().split("|")
        if len(fields) == len(FIELDS):
            starts[fields[0], fields[1]] = fields[2:]
    joules = seconds = 0.0
    nodes = 0
    for elapsed, count, consumed in starts.values():
        took, used, on = (untrusted.whole_number(each) or 0 for each in (elapsed, consumed, count))
        if took and not used:  # SLURM prints 2^64 - 2, too many digits, for what it has not measured
            return None
        joules, seconds, nodes = joules + used, seconds + took, max(nodes, on)
    return EnergyRow(SLURM, joules / JOULES, nodes or None, SLURM_SCOPE, seconds) if joules else None


def of_counters(launches: Sequence[Launch]) -> list[EnergyRow]:
    """Each counter's sum over launches; the first is the run's energy, where SLURM has none."""
    found = {}
    for name, (source, scope) in SOURCES.items():
        if of := [launch for launch in launches if launch.joules.get(name, 0) > 0]:
            kwh = sum(launch.joules[name] for launch in of) / JOULES
            nodes = max(launch.nodes.get(name, 0) for launch in of) or None
            found[name] = EnergyRow(source, kwh, nodes, scope, sum(launch.joules_clock for launch in of))
    known = list(found.values())
    if "pm_counters" in found or "rapl" not in found or len(known) < 2:
        return known
    together = EnergyRow(  # counters of GPUs and of processors, so that nothing is counted twice
        " + ".join(each.source for each in known),
        sum(each.kwh for each in known),
        max(each.nodes or 0 for each in known) or None,
        "GPUs and processors; no power supplies, fans or network",
        max(each.seconds for each in known),
    )
    return [together, *known]
