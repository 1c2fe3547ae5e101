"""Where a run's wall time went: all launches on one axis of time, from submit to the last sign of life.

The axis is made of what lies between two launches, and of each launch's own clock. So the parts add up to the wall time
whatever the hosts' clocks say: a launch that seems to begin before the one before it has ended begins at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.tools.report.launches import PHASES, STEPS, Launch
from hvdtrain.tools.report.model import Part, Waterfall

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


@dataclass(frozen=True)
class Axis:
    """Of the report: seconds since its beginning."""

    began: float | None
    """Seconds since 1970: submit, else the first launch."""
    launches: tuple[float, ...]
    """Where each launch begins."""
    gaps: tuple[tuple[tuple[str, float], ...], ...]
    """Before each launch: names of intervals, and their seconds."""
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
