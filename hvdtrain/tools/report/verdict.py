"""The verdict on a run: its end, its result, which promises were kept, and what to do next."""

import re
from collections.abc import Mapping, Sequence

from hvdtrain import untrusted
from hvdtrain.core.wording import counted, duration
from hvdtrain.launch.topology import ALONE
from hvdtrain.record.history import Launch
from hvdtrain.record.reader import RecordedRun
from hvdtrain.tools.report import origin, results
from hvdtrain.tools.report.costs import WAITING, is_busy, processor_share, slow_ranks, step_parts
from hvdtrain.tools.report.model import Check, Kept, Level, Outcome, Verdict, Waterfall, percent

WORTH_NAMING = 0.15
"""The share of the wall time from which a part is worth an advice, where it takes WORTH_SECONDS."""
WORTH = {"checkpoints": 0.05, "lost work": 0.05}
"""The same share of these parts."""
WORTH_SECONDS = 60.0
REMEDIES = {
    "lost work": "Checkpoint more often: --checkpoint-every-steps auto --mtbf-hours HOURS.",
    "checkpoints": "Checkpoint less often: --checkpoint-every-steps or --checkpoint-every-epochs.",
    "first step": "Keep what is compiled or warmed up for the first step: longer runs, or without --compile.",
    "import": "Put Python's packages on a disk of the node: imports from a shared file system are slow.",
    "idle": "Let the job script start the training again itself: put supervise before srun.",
    "validation": "Validate faster: more --workers, or a larger batch.",
    "start": "See what the program imports and reads before it trains: python -X importtime PROGRAM lists the imports.",
    "data": "Pack the data set: python -m hvdtrain pack makes few large files of many small ones.",
}
"""Advice on a part of the wall time, by its name."""
OF_JOB = {"start": "See what the job does before the program runs: staging, modules, or slow nodes."}
"""Other advice where the run was a job's."""
ON_A_HOST = (
    "A larger batch a rank waits less often; ranks wait for one another where there are fewer cores than threads."
)
"""Advice on waiting where all ranks are on one host, between which there is no network."""
LIMITS = {
    "reading": "Read faster: more --workers, or packed data (python -m hvdtrain pack); bench train measures it.",
    WAITING: "See what the network gives (python -m hvdtrain bench allreduce); a larger batch a rank waits less often.",
}
"""Advice on the part of a step that takes most of it."""
NOT_KNOWN = "It is not known: nothing shows how long a rank computes, and how long it waits for others."
"""Of a run on GPUs, say."""


def verdict(run: RecordedRun, run_state: str, waterfall: Waterfall | None, now: float) -> Verdict:
    """The verdict, from the run's records alone."""
    outcome, sentences, remedy = results.judged(run, is_finished=run_state == "finished")
    notes = [*(text for text, _ in results.lost(run, ends=False)), *results.jumped(run), *results.slowed(run)]
    noise = list(results.noise(run))
    promises, slow = checks(run, run_state), slow_ranks(run.launches)
    names = [f"{run.launch.name_of(rank)} is {why}." for rank, why in slow.items() if run.launch]
    if len(run.launches) > 1:
        again = sum(part.seconds for part in waterfall.parts if part.name == "lost work") if waterfall else 0.0
        cost = f"{duration(again)} of steps were made again" if again else "no step was made again"
        names.append(f"Launched {len(run.launches):,} times; {cost}.")
    level = _level(run_state, outcome, promises, bool(slow or notes))
    unknown = ", ".join(check.name.lower() for check in promises if check.state == "unknown")
    doubts = results.doubts(run) if level in {"good", "unjudged"} else []
    if unknown and level in {"good", "unjudged"}:
        doubts.append(f"No record shows whether these promises were kept: {unknown}.")
    return Verdict(
        level=level,
        outcome=outcome,
        headline=headline(run, run_state, now),
        details=tuple(map(_capital, [*sentences, *notes, *names, *noise])),
        doubts=tuple(map(_capital, doubts)),
        checks=promises,
        limit=limit_of(run)[0],
        advice=advice(run, run_state, remedy, promises, waterfall),
    )


def headline(run: RecordedRun, run_state: str, now: float) -> str:
    """How the run ended, in a short sentence."""
    step, total = run.step, run.total_steps
    place = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    ago = duration(max(1, round(now - run.last_sign)))
    signal = re.match(r"SIG[A-Z0-9]+", run.error)
    by = f" by {signal[0]}" if signal else ""
    of = f" of {run.epochs:,}" if run.epochs else ""
    early = f"Ended early after epoch {run.metrics.last_epoch:,}{of}: {_sentence(run.ended)}"
    texts = {
        "finished": f"Trained to the end: {place}." if not run.ended else early,
        "failed": f"Failed at {place}{f': {_sentence(run.error)}' if run.error else '.'}",
        "stopped": f"Stopped in order at {place}{by}; the same command continues from there.",
        "left": f"The program exited at {place}; the same command continues from its last checkpoint.",
        "running": f"Still running: {place}; last sign of life {ago} ago.",
        "killed": f"Ended without a message at {place}, {ago} ago: killed, or its node was lost.",
    }
    unknown = f"How it ended is not known; it reached {place}." if step else "Nothing is known of its training."
    return texts.get(run_state, unknown)


def limit_of(run: RecordedRun) -> tuple[str, str]:
    """A sentence on what takes most of a step, "" where that was not measured, and advice on it, "" for none."""
    parts = step_parts(run.launches)
    if "computing" not in parts:
        return NOT_KNOWN if any(launch.times for launch in run.launches) else "", ""
    whole = sum(parts.values())
    slowest = max(parts, key=parts.__getitem__)
    others = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if name != slowest]
    rest = f"; {', '.join(others)}" if others else ""
    used = processor_share(run)
    # Without processor time it is not known whether a rank computed or waited for a processor.
    limits = "limits the" if slowest != "computing" or used is not None else "takes most of a"
    text = f"{_capital(slowest)} {limits} step: {duration(parts[slowest])} of {duration(whole)}{rest}."
    if used is None or not is_busy(run):
        is_on_a_host = slowest == WAITING and run.launch is not None and len(set(run.launch.hosts)) == 1
        return text, ON_A_HOST if is_on_a_host else LIMITS.get(slowest, "")
    of = f"a rank had a processor for {duration(used * whole)} of the {duration(parts['computing'])} of computing"
    busy = f"This machine did other work, or a step slept: {of}. Its times say little of the program ({text[:-1]})."
    return busy, "Measure again on a machine that does nothing else."


def advice(
    run: RecordedRun, run_state: str, remedy: str, promises: Sequence[Check], waterfall: Waterfall | None
) -> str:
    """A sentence on what to do next; "" where there is nothing. `remedy`: of the result."""
    broken = [check for check in promises if check.state == "broken"]
    if broken:
        return f"Do not use the result before you know why: {broken[0].name} is broken ({broken[0].detail})."
    remedy = (_remedy(run.error) if run_state == "failed" else "") or remedy
    if run_state in {"failed", "killed", "stopped", "left"} and not remedy:
        command = origin.command(run, again=True)
        return f"Run the same command again to continue{f': {command}' if command else '.'}"
    if run_state == "running" and not remedy:
        return f"Watch it: python -m hvdtrain watch {run.path}"
    return remedy or _of_slow(run, slow_ranks(run.launches)) or _of_time(waterfall, run.job_id) or limit_of(run)[1]


def _level(run_state: str, outcome: Outcome, promises: Sequence[Check], is_notable: bool) -> Level:
    if run_state in {"failed", "killed"} or any(check.state == "broken" for check in promises):
        return "bad"
    if run_state in {"stopped", "left"} or outcome == "not as expected" or (is_notable and run_state != "running"):
        return "attention"
    if run_state == "running":
        return "open"
    return "good" if outcome == "as expected" else "unjudged"


def _of_slow(run: RecordedRun, slow: Mapping[int, str]) -> str:
    """Advice on the first slow rank; "" where there is none."""
    if not slow:
        return ""
    rank = next(iter(slow))
    launch = run.launch
    host = launch.name_of(rank).partition(" on ")[2] if launch else ""
    if "slow in reading" in slow[rank]:
        return f"See what {host or 'its host'} reads from: its storage or its readers are slower than the others'."
    if not host:
        return f"Find out what else runs where rank {rank} is: python -m hvdtrain doctor there."
    excluded = f"; in SLURM --exclude={host} leaves it out" if launch and launch.job_id else ""
    return f"Look at {host}: run python -m hvdtrain doctor on it{excluded}."


def _of_time(waterfall: Waterfall | None, job: str) -> str:
    """Advice on the part of the wall time that is worth it most; "" where none is."""
    if not waterfall or not waterfall.wall_seconds:
        return ""
    long = [part for part in waterfall.parts if part.name in REMEDIES and part.seconds >= WORTH_SECONDS]
    shares = {part.name: part.seconds / waterfall.wall_seconds for part in long}
    worth = {name: share for name, share in shares.items() if share >= WORTH.get(name, WORTH_NAMING)}
    if not worth:
        return ""
    name = max(worth, key=worth.__getitem__)
    return (
        f"{_capital(name)} took {percent(worth[name])} of the wall time. {(job and OF_JOB.get(name)) or REMEDIES[name]}"
    )


def _remedy(why: str) -> str:
    """The remedy of an error's message, which is what stands behind its last semicolon."""
    _, mark, remedy = why.rpartition("; ")
    return _sentence(_capital(remedy)) if mark else ""


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


Found = tuple[Kept, str]


def checks(run: RecordedRun, run_state: str) -> tuple[Check, ...]:
    """Whether each promise of README.md was kept, in its order."""
    found = {
        "The right world": _world(run),
        "Replicas compared": _replicas(run),
        "Exact metrics": _metrics(run),
        "Exact resume": _resumes(run, run_state),
    }
    return tuple(Check(name, kept, detail) for name, (kept, detail) in found.items())


def _world(run: RecordedRun) -> Found:
    """Whether as many ranks trained as the launcher started."""
    launched = [launch.ranks for launch in run.launches if launch.ranks]
    if not launched:
        return "unknown", "the run has not recorded its launches"
    last, planned = launched[-1], untrusted.whole(run.plan.get("size"), 1)
    launcher = untrusted.text(run.launches[-1].about.get("launcher"), 40)
    by = f", as {launcher} launched {'it' if last == 1 else 'them'}" if launcher not in {"", ALONE.name} else ""
    if planned and planned != last:
        return "broken", f"{counted(last, 'rank')} were launched, the plan is for {planned:,}"
    if not by and last == max(launched) == 1:
        return "not applicable", "one rank, without a launcher"
    before = sorted({count for count in launched if count != last})
    also = f"; earlier launches had {', '.join(map(str, before))}" if before else ""
    return "kept", f"{counted(last, 'rank')}{by}{also}"


def _replicas(run: RecordedRun) -> Found:
    """Whether weights, and what updates them, were equal on all ranks at each comparison."""
    if re.search(r"ReplicaError|after step \d+ the (ranks differ in|weights of replica) ", run.error):
        return "broken", "the ranks' weights, or what updates them, differed, and the run stopped"
    ended = [launch.end.replica_checks for launch in run.launches if launch.end]
    counts = [count for count in ended if count is not None]
    if run.launch and run.launch.ranks == 1:
        return "not applicable", "one rank"
    if not sum(counts):
        return "unknown", "no launch has recorded how often they were compared"
    least = "at least " if len(counts) < len(run.launches) else ""
    return "kept", f"compared {least}{counted(sum(counts), 'time')}, and equal each time"


def _metrics(run: RecordedRun) -> Found:
    """Whether each validation counted each example once."""
    planned, sizes = untrusted.whole(run.plan.get("valid_examples")), run.metrics.valid_examples
    if sizes == {0} or planned == 0:
        return "not applicable", "no validation"
    if not sizes or planned is None:
        return "unknown", "the run has not recorded how many examples its metrics are of"
    if wrong := sorted(sizes - {planned, *(launch.valid_examples for launch in run.launches)}):
        return "broken", f"a validation has counted {wrong[0]:,} examples, the data set has {planned:,}"
    of = " or ".join(f"{size:,}" for size in sorted(sizes))
    return "kept", f"{counted(run.metrics.counted_epochs, 'validation')}, each of all {of} examples, once"


def _resumes(run: RecordedRun, run_state: str) -> Found:
    """Whether each launch resumed from a checkpoint, and no step is in the metrics twice."""
    if repeated := run.metrics.repeated:
        return "broken", f"{repeated:,} step{'s have' if repeated != 1 else ' has'} more than one log line"
    total, step = run.total_steps, run.step
    if run_state == "finished" and total and step < total and not run.ended:
        return "broken", f"its status is finished, at step {step:,} of {total:,}"
    if not run.launches:
        return "unknown", "the run has not recorded its launches"
    if len(run.launches) == 1 and not run.launches[0].first_step:
        return "not applicable", "one launch, no resume"
    for number, launch in enumerate(run.launches):
        if wrong := _wrong_resume(run.launches[:number], launch):
            return wrong
    steps = [f"{launch.first_step:,}" for launch in run.launches if launch.first_step]
    s = "s" * (len(steps) > 1)
    resumed = f"resumed {counted(len(steps), 'time')}, from the checkpoint{s} of step{s} {', '.join(steps)[:200]}"
    begun = f"{counted(len(run.launches), 'launch')}, each from the beginning: there was no checkpoint yet"
    return "kept", resumed if steps else begun


def _wrong_resume(before: list[Launch], launch: Launch) -> Found | None:
    """Why the launch did not resume from a checkpoint of those before; None where it did."""
    step = launch.first_step
    if not step or any(step in earlier.checkpoints for earlier in before):
        return None
    if not before:
        return "unknown", f"its first recorded launch resumed from step {step:,}; what was before is not recorded"
    if any(not earlier.checkpoints and not earlier.end for earlier in before):
        return "unknown", f"a launch resumed from step {step:,}; the record of that checkpoint is lost"
    return "broken", f"a launch resumed from step {step:,}, where no checkpoint was recorded"
