"""What is wrong with a gap of lab 6, in words, from what the ranks, or sbatch, then have. None where it is right.

Each text continues "Gap 2, accuracy, ".
"""

import re
import shlex
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labtools.exercises import listed
from labtools.exercises.srun_ranks import KILLED_AT, VALID, Begun, Prepared, Trained

_CLOSE = 1e-5
_MOST_LOST = 10  # steps that a kill may lose
_LINES = 4  # of an output that are shown
_LONGEST = 160  # characters of each
Numbers = NDArray[Any]
_STARTERS = {"horovodrun": "by ssh", "mpirun": "by MPI's own means", "mpiexec": "by MPI's own means"}


def of_prepare(found: Sequence[Prepared], right: Sequence[Prepared]) -> str | None:
    running = [each.running for each in found]
    if not any(running):
        return "is still empty, or does not start Horovod: hvd.init() makes a process one of the ranks."
    if not all(running):
        return f"starts Horovod on some processes only: not on rank {running.index(False)}."
    if not all(each.returned for each in found):
        return "gives back no optimizer: a `return` is missing, or no optimizer was wrapped."
    start, after = np.array([each.start for each in found]), np.array([each.after for each in found])
    if np.ptp(start, axis=0).max() > _CLOSE:
        return (
            f"leaves each rank weights of its own: the first is {listed(start[:, 0].tolist())}. The same updates never "
            "make them equal; all have to take over rank 0's."
        )
    if np.abs(start[0] - found[0].before).max() > _CLOSE:
        return "does not give all ranks the weights of rank 0, which alone may have read a checkpoint."
    return _of_steps(start, after, right[0].after)


def _of_steps(start: Numbers, after: Numbers, expected: Numbers) -> str | None:
    """From the weights [rank, n] before and after three steps, and those [n] after steps along the mean gradients."""
    if np.ptp(after, axis=0).max() > _CLOSE:
        return (
            f"does not average the gradients: after 3 steps the first weight is {listed(after[:, 0].tolist())} on "
            "ranks 0, 1, 2, 3. The optimizer given back has to be Horovod's."
        )
    if np.abs(after[0] - expected).max() > _CLOSE:
        larger = np.abs(after[0] - start[0]).sum() > np.abs(expected - start[0]).sum()
        return (
            f"makes {'larger' if larger else 'other'} steps than the mean of the gradients does: "
            "leave the LR alone, and op at hvd.Average, which it is by itself."
        )
    return None


def of_accuracy(found: Sequence[Sequence[float | None]], parts: Sequence[Sequence[tuple[int, int]]]) -> str | None:
    """From what each rank gives back [rank][case], and the right answers and the examples of each rank [case][rank]."""
    if any(value is None for values in found for value in values):
        return "is still empty: it gives back no number."
    given = np.array(found, float).T
    right, count = np.array(parts[0], float).T
    if not count.all():
        return _of_empty_part_of(given[0], right.sum() / count.sum())
    mistaken = {
        "gives every rank the accuracy of its own part": right / count,
        "takes the mean of the ranks' accuracies, as though all had as many examples": (right / count).mean(),
        "adds up the ranks' accuracies": (right / count).sum(),
        "divides all ranks' right answers by this rank's examples alone": right.sum() / count,
        "divides this rank's right answers by all ranks' examples": right / count.sum(),
        "divides the mean of the right answers by this rank's examples": right.mean() / count,
        "divides all ranks' right answers by the mean of the examples": right.sum() / count.mean(),
        "gives back the right answers, which nothing divides": right.sum(),
    }
    expected = right.sum() / count.sum()
    if not np.allclose(given[0], expected, atol=_CLOSE):
        for what, values in mistaken.items():
            if np.allclose(given[0], values, atol=_CLOSE):
                return (
                    f"{what}: {listed(given[0].tolist())} on ranks 0, 1, 2, 3, where "
                    f"{right.sum():.0f} right of {count.sum():.0f} are {expected:.2f}."
                )
        return f"gives {listed(given[0].tolist())}, where {right.sum():.0f} of {count.sum():.0f} are {expected:.2f}."
    return None


def _of_empty_part_of(given: Numbers, expected: float) -> str | None:
    if np.allclose(given, expected, atol=_CLOSE):
        return None
    return (
        f"is right, but not where a rank has no example: there it gives {listed(given.tolist())}, not {expected:.2f}."
    )


def of_one_epoch(found: Sequence[Trained], right: Sequence[Trained]) -> str | None:
    if error := _error(found):
        if "without a step" in error and not any(each.read for each in found):
            return "is still empty: no rank has trained on an example."
        return f"stopped: {error}"
    if not found[0].reported[-1]:
        return "reports nothing: the last line is run.report(accuracy=...)."
    if found[0].steps != right[0].steps:
        return (
            f"makes {found[0].steps // 2} steps an epoch, where {right[0].steps // 2} are right: "
            "batch_size is that of all ranks together, whatever their number, and each batch is one step."
        )
    if any(len(set(each.validated)) == VALID for each in found):
        return f"validates all {VALID} examples on every rank: run.each_once gives each example to one rank."
    return _of_result(found[0], right[0], len(set().union(*(each.validated for each in found))))


def _of_result(found: Trained, right: Trained, validated: int) -> str | None:
    if validated < VALID:
        return f"validates only {validated} of the {VALID} examples."
    if np.abs(found.weights - right.weights).max() > _CLOSE:
        return (
            "trains, but not to the weights that one process gets from the same batches. Each batch needs "
            "optimizer.zero_grad(), backward() and optimizer.step(), once each."
        )
    (value, *_), expected = found.reported[-1].values(), right.reported[-1]["accuracy"]
    if abs(value - expected) > _CLOSE:
        return (
            f"reports {value:.4f}, where the accuracy of all {VALID} examples is {expected:.4f}: give world.mean the "
            "sum of the right answers and their number, not a mean that a rank or a batch has divided already."
        )
    return None


def of_begin(first: Sequence[Begun], second: Sequence[Begun], checkpoints: Sequence[int], wrote: bool) -> str | None:
    """From a launch that was killed, or ended by itself (`first`), the next one, and the steps of its checkpoints."""
    if error := _error([*first, *second]):
        return f"stopped: {error}"
    if not all(each.returned for each in first):
        return "is still empty: it gives back no run (if it makes one, a `return` is missing)."
    if not wrote:
        return "writes into a folder of its own choice: name `folder`, or the next launch finds nothing to resume."
    return _of_checkpoints(checkpoints, second[0].began_at)


def _of_checkpoints(checkpoints: Sequence[int], began_at: int) -> str | None:
    longest = max(np.diff([0, *checkpoints, KILLED_AT]))
    if not checkpoints:
        return (
            f"writes no checkpoint inside an epoch: killed in step {KILLED_AT} of 30, it loses all {KILLED_AT} steps. "
            f"world.run has an argument for one every {_MOST_LOST} steps."
        )
    if longest > _MOST_LOST:
        return f"loses up to {longest} steps: its checkpoints are of the steps {listed(checkpoints)}."
    if began_at < checkpoints[-1]:  # the checkpoint of the last step may have come after the last look
        return f"begins at step {began_at} after a kill, although there is a checkpoint of {checkpoints[-1]}."
    return None


def of_program(name: str, path: str) -> str | None:
    if name == "srun" or shutil.which(name, path=path):
        return None
    return (
        f"starts no rank: there is no program {name} in the folders of the PATH. horovodrun came with Horovod, "
        "and is in one of them."
    )


def of_launch(words: Sequence[str], ranks: int, started: Sequence[tuple[int, int]], printed: str) -> str | None:
    """From the ranks that the command started, each with its number and how many it knows of."""
    shown = shlex.join(words)
    if sorted(started) == [(rank, ranks) for rank in range(ranks)]:
        return None
    if not started:
        why = ""
        if words[0] == "srun":
            why = "srun is for the nodes of a cluster with SLURM, which gap 6 is about. "
        elif not any("python" in word for word in words):
            why = "Python has to run the script: write python before its name. "
        lines = printed.strip().splitlines()
        telling = [line for line in lines if re.search(r"can't open|error:|No such file", line)]
        last = "\n".join(line[:_LONGEST] for line in (telling or lines)[-_LINES:])
        return f"starts no rank. {why}{shown} printed:\n{last}"
    if all(size == 1 for _, size in started):
        many = len(started) > 1
        return (
            f"starts {len(started)} processes that do not know of one another: {shown}"
            if many
            else f"starts one process alone, without a launcher: {shown}"
        )
    return f"starts {len(started)} ranks where {ranks} are asked for: {shown}. Use `ranks`."


def of_job(text: object, nodes: int, per_node: int) -> str | None:
    """From the script for sbatch."""
    if not text:
        return "is still empty: it gives back no script."
    if not str(text).startswith("#!"):
        return "does not begin with #!/bin/bash: sbatch refuses a script whose first line does not name its shell."
    lines = [line.strip() for line in str(text).splitlines()[1:]]
    first = next((number for number, line in enumerate(lines) if line and not line.startswith("#")), len(lines))
    if any(re.match(r"#\s+SBATCH|#sbatch|##SBATCH", line) for line in lines):
        return "has lines that sbatch takes for comments: they begin with #SBATCH, in capitals and without a space."
    if any(line.startswith("#SBATCH") for line in lines[first:]):
        return "has #SBATCH lines behind the first command: sbatch ignores them there."
    options = dict(re.findall(r"#SBATCH\s+--([a-z-]+)[= ](\S+)", "\n".join(lines[:first])))
    return _of_options(options, nodes, per_node) or _of_command(lines[first:])


def _of_options(options: dict[str, str], nodes: int, per_node: int) -> str | None:
    if options.get("nodes") != str(nodes):
        return f"requests {options.get('nodes', 'no number of')} nodes where {nodes} are wanted: --nodes."
    each = options.get("ntasks-per-node") or (f"{options['ntasks']} in all" if "ntasks" in options else None)
    if each == f"{nodes * per_node} in all":
        each = str(per_node)  # SLURM spreads them alike
    if each != str(per_node):
        given = each or "1"
        kind = ("task" if given == "1" else "tasks") + ("" if "all" in given else " a node")
        wanted = f"{per_node} ranks a node are wanted: --ntasks-per-node, one task is one rank."
        return f"requests {given} {kind} where {wanted}"
    if "time" not in options:
        return "has no time limit: with --time the job is planned sooner, and a hanging one ends."
    warning = re.fullmatch(r"(?:(B):)?(?:SIG)?(USR1|USR2|TERM|10|12|15)@(\d+)", options.get("signal", ""))
    if not warning:
        return "has no warning before the time limit: with --signal=USR2@120 hvdtrain still writes a checkpoint."
    if warning[1]:
        return "warns the script's shell alone: without B: the signal goes to the ranks, which write the checkpoint."
    return None


def _of_command(lines: Sequence[str]) -> str | None:
    commands = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ").splitlines()
    commands = [command for command in commands if "own_loop.py" in command]
    if not commands:
        return "never starts own_loop.py."
    words = shlex.split(commands[-1])
    for starter, how in _STARTERS.items():
        if starter in words:
            return f"starts the ranks with {starter}, {how}: in a job of SLURM's srun starts them on all its nodes."
    if "srun" not in words:
        return "runs own_loop.py once, on the first node: the other tasks of the job stay idle. srun starts it on all."
    of_srun = words[words.index("srun") + 1 :]
    if "python" not in " ".join(of_srun):
        return "starts own_loop.py itself: Python has to run it, srun python own_loop.py."
    if number := next((word for word in of_srun if re.match(r"-[nN]\d*$|--n(tasks|odes)\b", word)), None):
        return f"gives srun {number}: it takes the job's nodes and tasks by itself; another number leaves some idle."
    return None


def _error(found: Sequence[Trained | Begun]) -> str:
    """The first line by which a rank named a mistake, and not that another rank has ended."""
    errors = [re.sub(r" \(rank \d+ on [^)]*\)", "", each.error) for each in found if each.error]
    return next((each for each in errors if ":" in each and not each.startswith("Aborted")), next(iter(errors), ""))
