"""The promises of README.md, each against what the run's own records say."""

import re

from hvdtrain.tools.report import lines, state
from hvdtrain.tools.report.folder import Folder
from hvdtrain.tools.report.launches import Launch
from hvdtrain.tools.report.model import Check, Kept

Found = tuple[Kept, str]


def checks(folder: Folder, run_state: str) -> tuple[Check, ...]:
    """One a promise, in README.md's order."""
    found = {
        "The right world": _world(folder),
        "Replicas compared": _replicas(folder),
        "Exact metrics": _metrics(folder),
        "Exact resume": _resumes(folder, run_state),
    }
    return tuple(Check(name, kept, detail) for name, (kept, detail) in found.items())


def _world(folder: Folder) -> Found:
    """As many ranks as the launcher has started are those that trained."""
    launched = [launch.ranks for launch in folder.launches if launch.ranks]
    if not launched:
        return "unknown", "the run has not recorded its launches"
    last, planned = launched[-1], lines.whole(folder.plan.get("size"), 1)
    launcher = lines.text(folder.launches[-1].about.get("launcher"), 40)
    by = f", as {launcher} launched them" if launcher and launcher != "none" else ""
    if planned and planned != last:
        return "broken", f"{ranks(last)} were launched, the plan is for {planned:,}"
    before = sorted({count for count in launched if count != last})
    also = f"; earlier launches had {', '.join(map(str, before))}" if before else ""
    return "kept", f"{ranks(last)}{by}{also}"


def _replicas(folder: Folder) -> Found:
    """The fingerprints of the weights, and what updates them, were equal on all ranks, each time."""
    if re.search(r"ReplicaError|after step \d+ the (ranks differ in|weights of replica) ", state.error_of(folder)):
        return "broken", "the ranks' weights, or what updates them, differed, and the run stopped"
    ended = [launch.end.replica_checks for launch in folder.launches if launch.end]
    counts = [count for count in ended if count is not None]
    if folder.launch and folder.launch.ranks == 1:
        return "kept", "one rank: there is nothing to compare"
    if not sum(counts):
        return "unknown", "no launch has recorded how often they were compared"
    least = "at least " if len(counts) < len(folder.launches) else ""
    times = sum(counts)
    return "kept", f"compared {least}{times:,} time{'s' if times != 1 else ''}, and equal each time"


def _metrics(folder: Folder) -> Found:
    """Each validation has counted each example once."""
    planned, counted = lines.whole(folder.plan.get("valid_examples")), folder.metrics.valid_examples
    if not counted or planned is None:
        return "unknown", "the run has not recorded how many examples its metrics are of"
    if wrong := sorted(counted - {planned, *(launch.valid_examples for launch in folder.launches)}):
        return "broken", f"a validation has counted {wrong[0]:,} examples, the data set has {planned:,}"
    epochs = folder.metrics.counted_epochs
    of = f"{planned:,}" if counted == {planned} else " or ".join(f"{count:,}" for count in sorted(counted))
    return "kept", f"{epochs:,} validation{'s' if epochs != 1 else ''}, each of all {of} examples, once"


def _resumes(folder: Folder, run_state: str) -> Found:
    """Each launch went on where a checkpoint was, and no step is in the metrics twice."""
    if repeated := folder.metrics.repeated:
        return "broken", f"{repeated:,} step{'s have' if repeated != 1 else ' has'} more than one log line"
    total, step = state.total_steps(folder), state.step_of(folder)
    if run_state == "finished" and total and step < total:
        return "broken", f"its status is finished, at step {step:,} of {total:,}"
    return _launches(folder) if folder.launches else ("unknown", "the run has not recorded its launches")


def _launches(folder: Folder) -> Found:
    """Each launch after the first began where a checkpoint was."""
    if len(folder.launches) == 1 and not folder.launches[0].first_step:
        return "kept", "trained in one launch"
    for number, launch in enumerate(folder.launches):
        if wrong := _wrong_resume(folder.launches[:number], launch):
            return wrong
    times = len([launch for launch in folder.launches if launch.first_step])
    steps = ", ".join(f"{launch.first_step:,}" for launch in folder.launches if launch.first_step)
    if not times:
        return "kept", f"{len(folder.launches):,} launches, each from the beginning: there was no checkpoint yet"
    return "kept", f"resumed {times:,} time{'s' if times != 1 else ''}, from the checkpoints of steps {steps[:200]}"


def _wrong_resume(before: list[Launch], launch: Launch) -> Found | None:
    """Why that launch's beginning is not one of the checkpoints before it; None where it is."""
    step = launch.first_step
    if not step or any(step in earlier.checkpoints for earlier in before):
        return None
    if not before:
        return "unknown", f"its first recorded launch resumed from step {step:,}; what was before is not recorded"
    if any(not earlier.checkpoints and not earlier.end for earlier in before):
        return "unknown", f"a launch resumed from step {step:,}; the record of that checkpoint is lost"
    return "broken", f"a launch resumed from step {step:,}, where no checkpoint was recorded"


def ranks(count: int) -> str:
    """As "4 ranks"."""
    return f"{count:,} rank{'s' if count != 1 else ''}"
