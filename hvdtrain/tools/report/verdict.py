"""The verdict on a run: its end, its result, which promises were kept, and what to do next."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain import untrusted
from hvdtrain.core.wording import counted, duration
from hvdtrain.record.history import Launch
from hvdtrain.record.reader import Run
from hvdtrain.tools.report import origin
from hvdtrain.tools.report.costs import WAITING, slow_ranks, step_parts
from hvdtrain.tools.report.model import Check, Kept, Level, Verdict, Waterfall, percent

HARMLESS = {
    *("name", "expected", "data_dir", "cache_dir", "decoder", "workers", "device", "data_on_device"),
    *("log_every_steps", "checkpoint_every_epochs", "checkpoint_every_steps", "mtbf_hours", "keep_checkpoints"),
    *("guard_every_steps", "channels_last", "fused_optimizer", "cudnn_benchmark", "compile", "xla", "profile"),
    *("fusion_threshold_mb", "cycle_time_ms", "autotune", "horovod_timeline", "train_crop", "valid_resize"),
}
"""Keys that do not change the result: a run that differs in them from the shipped recipe should
still reach what that expects."""
TWICE = 2.0
"""Accuracies are the same within so many of their standard errors."""
LEAST_TOLERANCE = 0.005
WORTH_NAMING = 0.15
"""The share of the wall time from which a part is worth an advice, where it takes WORTH_SECONDS."""
WORTH_CHECKPOINTS = 0.05
"""The same share of checkpoints and lost work."""
WORTH_SECONDS = 60.0
REMEDIES = {
    "lost work": "Checkpoint more often: --checkpoint-every-steps auto --mtbf-hours HOURS.",
    "checkpoints": "Checkpoint less often: --checkpoint-every-steps or --checkpoint-every-epochs.",
    "first step": "Keep what is compiled or warmed up for the first step: longer runs, or without --compile.",
    "import": "Put Python's packages on a disk of the node: imports from a shared file system are slow.",
    "idle": "Let the job script start the training again itself: put supervise before srun.",
    "validation": "Validate faster: more --workers, or a larger batch.",
    "start": "See what the job does before the program runs: staging, modules, or slow nodes.",
    "data": "Pack the data set: python -m hvdtrain pack makes few large files of many small ones.",
}
"""Advice on a part of the wall time, by its name."""
LIMITS = {
    "reading": "Read faster: more --workers, or packed data (python -m hvdtrain pack); bench train measures it.",
    WAITING: "See what the network gives (python -m hvdtrain bench allreduce); a larger batch a rank waits less often.",
}
"""Advice on the part of a step that takes most of it."""
NOT_KNOWN = "It is not known: nothing shows how long a rank computes, and how long it waits for others."
"""Of a run on GPUs, say."""


@dataclass(frozen=True)
class Result:
    """A metric beside the value that the recipe expects."""

    name: str
    value: float
    expected: float
    tolerance: float
    unfair: tuple[str, ...]
    """Keys that differ from the shipped recipe's, so that the run need not reach that value."""

    @property
    def is_below(self) -> bool:
        """Whether it is worse than expected by more than chance."""
        worse = self.expected - self.value if not self.name.endswith("loss") else self.value - self.expected
        return worse > self.tolerance

    @property
    def is_too_low(self) -> bool:
        """Whether it is, though the run should have reached the expected value."""
        return self.is_below and not self.unfair

    def __str__(self) -> str:
        what = f"{words(self.name)} {self.value:.4f}, expected {self.expected:.4g}"
        if self.unfair:
            return f"{what}, but this run differs from the shipped recipe in {', '.join(self.unfair)}."
        if self.is_below:
            return f"{what}: lower by more than chance ({self.tolerance:.3f})."
        return f"{what}: as it should be."


def verdict(run: Run, run_state: str, waterfall: Waterfall | None, now: float) -> Verdict:
    """The verdict, from the run's records alone."""
    results = compared(run) if run_state == "finished" else []
    promises = checks(run, run_state)
    slow = slow_ranks(run.launches)
    names = [f"{run.launch.name_of(rank)} is {why}." for rank, why in slow.items() if run.launch]
    level = _level(run_state, results, promises, slow)
    if level == "good" and not run.metrics.epochs and not run.metrics.steps:
        level = "attention"  # no record shows a result
    return Verdict(
        level=level,
        headline=headline(run, run_state, now),
        details=tuple(map(_capital, [*map(str, results), *_plain(run, results), *names, *_launches(run, waterfall)])),
        checks=promises,
        limit=limit_of(run),
        advice=advice(run, run_state, results, promises, waterfall),
    )


def headline(run: Run, run_state: str, now: float) -> str:
    """How the run ended, in a short sentence."""
    step, total = run.step, run.total_steps
    place = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    why = run.error
    ago = duration(max(1, round(now - run.last_sign)))
    match run_state:
        case "finished":
            return f"Trained to the end: {place}."
        case "failed":
            return f"Failed at {place}: {_sentence(why)}" if why else f"Failed at {place}."
        case "stopped":
            signal = re.match(r"SIG[A-Z0-9]+", why)
            by = f" by {signal[0]}" if signal else ""
            return f"Stopped in order at {place}{by}; the same command continues from there."
        case "running":
            return f"Still running: {place}; last sign of life {ago} ago."
        case "killed":
            return f"Ended without a message at {place}, {ago} ago: killed, or its node was lost."
    return f"How it ended is not known; it reached {place}." if step else "Nothing is known of its training."


def compared(run: Run) -> list[Result]:
    """The final metrics of which the recipe expects a value."""
    theirs = origin.shipped(run)
    expected = untrusted.mapping(run.recipe.get("expected")) or untrusted.mapping(theirs.get("expected"))
    unfair = tuple(key for key, _, _ in origin.differences(run) if key not in HARMLESS)
    found = []
    for key, given in list(expected.items())[:10]:
        name, goal, value = untrusted.text(key, 60), untrusted.number(given), run.metrics.final(str(key))
        if goal is not None and value is not None:
            found.append(Result(name, value, goal, _tolerance(goal, run), unfair))
    return found


def limit_of(run: Run) -> str:
    """A sentence on what takes most of a step; "" where that was not measured."""
    parts = step_parts(run.launches)
    if "computing" not in parts:
        return NOT_KNOWN if any(launch.times for launch in run.launches) else ""
    whole = sum(parts.values())
    slowest = max(parts, key=parts.__getitem__)
    others = [f"{name} {duration(seconds)}" for name, seconds in parts.items() if name != slowest]
    rest = f"; {', '.join(others)}" if others else ""
    return f"{_capital(slowest)} limits the step: {duration(parts[slowest])} of {duration(whole)}{rest}."


def advice(
    run: Run,
    run_state: str,
    results: Sequence[Result],
    promises: Sequence[Check],
    waterfall: Waterfall | None,
) -> str:
    """A sentence on what to do next; "" where there is nothing."""
    broken = [check for check in promises if check.state == "broken"]
    command = origin.origin(run).command
    again = f"Run the same command again to continue{f': {command}' if command else '.'}"
    if broken:
        return f"Do not use the result before you know why: {broken[0].name} is broken ({broken[0].detail})."
    if run_state in {"failed", "killed", "stopped"}:
        return (_remedy(run.error) if run_state == "failed" else "") or again
    if run_state == "running":
        return f"Watch it: python -m hvdtrain watch {run.path}"
    if slow := slow_ranks(run.launches):
        return _of_slow(run, slow)
    if any(result.is_too_low for result in results):
        return "Repeat it with another --seed: one run may be chance, two are not."
    parts = step_parts(run.launches)
    limit = max(parts, key=parts.__getitem__) if "computing" in parts else ""
    return _of_time(waterfall) or LIMITS.get(limit, "")


def words(name: str) -> str:
    """A metric's name as people write it: "validation accuracy" for valid_acc1."""
    named = {"acc1": "accuracy", "acc5": "top-5 accuracy"}
    split, _, rest = name.partition("_")
    kind = {"valid": "validation ", "train": "training "}.get(split)
    return f"{kind}{named.get(rest, rest)}" if kind and rest else named.get(name, name)


def _level(run_state: str, results: Sequence[Result], promises: Sequence[Check], slow: Mapping[int, str]) -> Level:
    if run_state in {"failed", "killed"} or any(check.state == "broken" for check in promises):
        return "bad"
    if run_state == "running":
        return "open"
    is_too_low = any(result.is_too_low for result in results)
    return "attention" if run_state != "finished" or is_too_low or slow else "good"


def _plain(run: Run, results: Sequence[Result]) -> list[str]:
    """The final accuracy, where the recipe expects nothing of it."""
    value = run.metrics.final("valid_acc1")
    if value is None or any(result.name == "valid_acc1" for result in results):
        return []
    return [f"Validation accuracy {value:.4f} after epoch {run.metrics.last_epoch:,}."]


def _launches(run: Run, waterfall: Waterfall | None) -> list[str]:
    """The cost of several launches, if there were several."""
    if len(run.launches) < 2:
        return []
    lost = sum(part.seconds for part in waterfall.parts if part.name == "lost work") if waterfall else 0.0
    cost = f"{duration(lost)} of steps were made again" if lost else "no step was made again"
    return [f"Launched {len(run.launches):,} times; {cost}."]


def _tolerance(expected: float, run: Run) -> float:
    """How far an accuracy may be off by chance; for other metrics a twentieth."""
    examples = untrusted.whole(run.plan.get("valid_examples"), 1)
    if not 0 <= expected <= 1:
        return abs(expected) / 20
    return max(LEAST_TOLERANCE, TWICE * math.sqrt(expected * (1 - expected) / (examples or 1000)))


def _of_slow(run: Run, slow: Mapping[int, str]) -> str:
    """Advice on the first slow rank."""
    rank = next(iter(slow))
    launch = run.launch
    host = launch.name_of(rank).partition(" on ")[2] if launch else ""
    if "slow in reading" in slow[rank]:
        return f"See what {host or 'its host'} reads from: its storage or its readers are slower than the others'."
    if not host:
        return f"Find out what else runs where rank {rank} is: python -m hvdtrain doctor there."
    excluded = f"; in SLURM --exclude={host} leaves it out" if launch and launch.job_id else ""
    return f"Look at {host}: run python -m hvdtrain doctor on it{excluded}."


def _of_time(waterfall: Waterfall | None) -> str:
    """Advice on the part of the wall time that is worth it most; "" where none is."""
    if not waterfall or not waterfall.wall_seconds:
        return ""
    worth = dict[str, float]()
    for part in waterfall.parts:
        share = part.seconds / waterfall.wall_seconds
        least = WORTH_CHECKPOINTS if part.name in {"checkpoints", "lost work"} else WORTH_NAMING
        if part.name in REMEDIES and part.seconds >= WORTH_SECONDS and share >= least:
            worth[part.name] = share
    if not worth:
        return ""
    name = max(worth, key=worth.__getitem__)
    return f"{_capital(name)} took {percent(worth[name])} of the wall time. {REMEDIES[name]}"


def _remedy(why: str) -> str:
    """The remedy of an error's message, which is what stands behind its last semicolon."""
    _, mark, remedy = why.rpartition("; ")
    return _sentence(_capital(remedy)) if mark else ""


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


Found = tuple[Kept, str]


def checks(run: Run, run_state: str) -> tuple[Check, ...]:
    """Whether each promise of README.md was kept, in its order."""
    found = {
        "The right world": _world(run),
        "Replicas compared": _replicas(run),
        "Exact metrics": _metrics(run),
        "Exact resume": _resumes(run, run_state),
    }
    return tuple(Check(name, kept, detail) for name, (kept, detail) in found.items())


def _world(run: Run) -> Found:
    """Whether as many ranks trained as the launcher started."""
    launched = [launch.ranks for launch in run.launches if launch.ranks]
    if not launched:
        return "unknown", "the run has not recorded its launches"
    last, planned = launched[-1], untrusted.whole(run.plan.get("size"), 1)
    launcher = untrusted.text(run.launches[-1].about.get("launcher"), 40)
    by = f", as {launcher} launched them" if launcher not in {"", "none", "alone"} else ""
    if planned and planned != last:
        return "broken", f"{counted(last, 'rank')} were launched, the plan is for {planned:,}"
    before = sorted({count for count in launched if count != last})
    also = f"; earlier launches had {', '.join(map(str, before))}" if before else ""
    return "kept", f"{counted(last, 'rank')}{by}{also}"


def _replicas(run: Run) -> Found:
    """Whether weights, and what updates them, were equal on all ranks at each comparison."""
    if re.search(r"ReplicaError|after step \d+ the (ranks differ in|weights of replica) ", run.error):
        return "broken", "the ranks' weights, or what updates them, differed, and the run stopped"
    ended = [launch.end.replica_checks for launch in run.launches if launch.end]
    counts = [count for count in ended if count is not None]
    if run.launch and run.launch.ranks == 1:
        return "kept", "one rank: there is nothing to compare"
    if not sum(counts):
        return "unknown", "no launch has recorded how often they were compared"
    least = "at least " if len(counts) < len(run.launches) else ""
    return "kept", f"compared {least}{counted(sum(counts), 'time')}, and equal each time"


def _metrics(run: Run) -> Found:
    """Whether each validation counted each example once."""
    planned, sizes = untrusted.whole(run.plan.get("valid_examples")), run.metrics.valid_examples
    if not sizes or planned is None:
        return "unknown", "the run has not recorded how many examples its metrics are of"
    if wrong := sorted(sizes - {planned, *(launch.valid_examples for launch in run.launches)}):
        return "broken", f"a validation has counted {wrong[0]:,} examples, the data set has {planned:,}"
    of = " or ".join(f"{size:,}" for size in sorted(sizes))
    return "kept", f"{counted(run.metrics.counted_epochs, 'validation')}, each of all {of} examples, once"


def _resumes(run: Run, run_state: str) -> Found:
    """Whether each launch resumed from a checkpoint, and no step is in the metrics twice."""
    if repeated := run.metrics.repeated:
        return "broken", f"{repeated:,} step{'s have' if repeated != 1 else ' has'} more than one log line"
    total, step = run.total_steps, run.step
    if run_state == "finished" and total and step < total:
        return "broken", f"its status is finished, at step {step:,} of {total:,}"
    return _resumed(run) if run.launches else ("unknown", "the run has not recorded its launches")


def _resumed(run: Run) -> Found:
    """Whether each launch after the first resumed from a checkpoint."""
    if len(run.launches) == 1 and not run.launches[0].first_step:
        return "kept", "trained in one launch"
    for number, launch in enumerate(run.launches):
        if wrong := _wrong_resume(run.launches[:number], launch):
            return wrong
    steps = [f"{launch.first_step:,}" for launch in run.launches if launch.first_step]
    if not steps:
        return "kept", f"{counted(len(run.launches), 'launch')}, each from the beginning: there was no checkpoint yet"
    s = "s" * (len(steps) > 1)
    return "kept", f"resumed {counted(len(steps), 'time')}, from the checkpoint{s} of step{s} {', '.join(steps)[:200]}"


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
