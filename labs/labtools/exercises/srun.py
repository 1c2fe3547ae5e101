"""The checks of lab 6: from a serial script to srun."""

import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hvdtrain.errors import LabError
from labtools.exercises import OnRanks, of_empty_part, print_right
from labtools.exercises import srun_mistakes as mistakes
from labtools.exercises import srun_ranks as on_rank
from labtools.launched import environment
from labtools.ranks import Ranks

LOADED = ("torch._dynamo", "hvdtrain.torch.trainer", "hvdtrain.torch.user_loop", "tensorboardX")
"""What the ranks of these checks load once: seconds in each run otherwise."""

_PROGRAM = """import os, sys
for rank, size in (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                   ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
    if rank in os.environ:
        break
print("this is rank", os.environ.get(rank, 0), "of", os.environ.get(size, 1), flush=True)
"""
"""Stands for the learner's script where its launch is checked: a framework would take seconds to load."""


class Check(OnRanks):
    """The six gaps of lab 6, which need four ranks."""

    lab = 6
    hints: ClassVar = {
        "prepare": (
            "three calls of hvd, as gaps 1, 4 and 5 of lab 2: start, take over rank 0's weights, wrap the optimizer.",
            "hvd.init() comes first: the other two communicate. hvd.broadcast_parameters takes model.state_dict().",
            "return hvd.DistributedOptimizer(...), which takes the optimizer and named_parameters.",
        ),
        "accuracy": (
            "which two numbers of all ranks together give the accuracy of the whole set?",
            "hvd.allreduce(tensor, op=hvd.Sum) gives every rank the sum. Sum first, divide once, at the end.",
            "put both numbers in one tensor of float64: one allreduce, then the first sum divided by the second.",
        ),
        "one_epoch": (
            "start from the serial loop; four places change: what the batches come from, twice; a call after the "
            "update; what is reported.",
            "run.batches(train, batch_size=BATCH) takes the global batch, whatever the number of ranks. "
            "run.each_once(valid, batch_size=BATCH) is its like for validation.",
            "run.step(loss) is the last line of the training loop, and run.report(accuracy=...) the last of the epoch; "
            "world.mean(total, count) sums both over the ranks and divides.",
        ),
        "begin": (
            "world.run takes the folder, the model and the optimizer, and gives back the run.",
            "by itself a checkpoint is written at the end of an epoch. Which argument writes more of them?",
            "checkpoint_every_steps says after how many steps; all ranks name one and the same folder.",
        ),
        "launch": (
            "horovodrun --help: which flag is the number of processes?",
            "behind the flag stands what you would type for one process, beginning with python.",
        ),
        "job": (
            "sbatch reads lines that begin with #SBATCH, without a space, before the first command.",
            "--nodes, --ntasks-per-node (one task is one rank), --time, and --signal=USR2@120: 120 seconds before the "
            "limit all ranks get the signal at which hvdtrain writes a checkpoint.",
            "the script itself runs once, on the first node; srun starts the same command on all tasks of the job.",
        ),
    }

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._right: dict[str, list[Any]] = {}

    def prepare(self, prepare: Callable[[Any, Any], Any]) -> None:
        """Gap 1: `prepare(model, optimizer)` starts Horovod, makes the weights those of rank 0, and gives back an
        optimizer that averages the gradients."""
        found = self._run("prepare", on_rank.prepared, prepare)
        self._right["prepare"] = self._right.get("prepare") or self._run("prepare", on_rank.prepared, _prepare)
        self._judge("prepare", mistakes.of_prepare(found, self._right["prepare"]))
        print_right(f"4 ranks started from rank 0's weights, and after 3 steps have the same: {found[0].after[0]:.4f}.")

    def accuracy(self, accuracy: Callable[[int, int], Any]) -> None:
        """Gap 2: `accuracy(right, count)` is that of all ranks' examples, from the numbers of this one."""
        parts = [(18, 20), (5, 10), (9, 10), (1, 4)], [(3, 4), (0, 0), (2, 4), (4, 4)]
        found = self._run("accuracy", on_rank.ratios, accuracy, parts[:1])
        self._judge("accuracy", mistakes.of_accuracy(found, parts[:1]))
        try:
            found = self._run("accuracy", on_rank.ratios, accuracy, parts[1:])
        except LabError as error:
            self._judge("accuracy", of_empty_part(str(error), "examples"))
            raise
        self._judge("accuracy", mistakes.of_accuracy(found, parts[1:]))
        print_right("33 of 44 are 0.75 on every rank, also where a rank has no example.")

    def one_epoch(self, one_epoch: Callable[..., Any]) -> None:
        """Gap 3: `one_epoch(world, run, model, optimizer, train, valid, batch_size)` trains and validates."""
        found = self._trained(one_epoch)
        self._right["one_epoch"] = self._right.get("one_epoch") or self._trained(_one_epoch)
        self._judge("one_epoch", mistakes.of_one_epoch(found, self._right["one_epoch"]))
        accuracy = next(iter(found[0].reported[-1].values()))
        print_right(f"2 ranks train what one would, and report the accuracy of all {on_rank.VALID}: {accuracy:.4f}.")

    def begin(self, begin: Callable[..., Any]) -> None:
        """Gap 4: `begin(world, folder, model, optimizer)` is a run of which a kill loses at most ten steps."""
        with tempfile.TemporaryDirectory() as temporary:
            folder, written = f"{temporary}/run", list[list[int]]()
            try:
                first = self._run_for_begin(begin, folder, True, written)
            except LabError as error:
                if not written:
                    raise
                assert "signal 9" in str(error), error
                first = []
            second = self._run_for_begin(begin, folder, False, written) if written else []
            wrote = (Path(temporary) / "run").exists()
        mistake = mistakes.of_begin(first, second, max(written, key=len, default=[]), wrote)
        self._judge("begin", mistake)
        print_right(f"killed in step {on_rank.KILLED_AT}, the next launch resumes at step {second[0].began_at}.")

    def launch(self, launch: Callable[[int], Any]) -> None:
        """Gap 5: `launch(ranks)` is the command that starts own_loop.py on so many ranks of this machine."""
        for ranks in (3, 2):
            command = self._call("launch", launch, ranks)
            if not command:
                self._judge("launch", "is still empty: it gives back no command.")
            try:
                words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
            except ValueError as error:
                raise self._wrong("launch", f"is no command that a shell can read: {error}.") from None
            if not words:
                self._judge("launch", "is still empty: it gives back no command.")
            self._judge("launch", mistakes.of_program(words[0], environment()["PATH"]))
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "own_loop.py").write_text(_PROGRAM)
                printed = _printed(words, folder)
            started = re.findall(r"this is rank (\d+) of (\d+)", printed)
            mistake = mistakes.of_launch(words, ranks, [(int(rank), int(size)) for rank, size in started], printed)
            self._judge("launch", mistake)
        print_right("it started 3 ranks, and 2.")

    def job(self, job: Callable[[int, int], Any]) -> None:
        """Gap 6: `job(nodes, ranks_per_node)` is the script for sbatch that trains on all ranks of these nodes."""
        for shape in ((2, 2), (3, 4)):
            self._judge("job", mistakes.of_job(self._call("job", job, *shape), *shape))
        print_right("sbatch reads 2 nodes with 2 ranks on each, a time limit and its warning; srun starts all ranks.")

    def _trained(self, one_epoch: Callable[..., Any]) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            return self._run("one_epoch", on_rank.trained, one_epoch, f"{folder}/run", ranks=2)

    def _run_for_begin(self, begin: Any, folder: str, kill: bool, written: list[list[int]]) -> list[Any]:
        return self._run(
            "begin", on_rank.begun, begin, folder, kill, ranks=2, watch=lambda _, steps: written.append(steps)
        )


def _prepare(model: Any, optimizer: Any) -> Any:
    """Gap 1, filled right."""
    import horovod.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _one_epoch(world: Any, run: Any, model: Any, optimizer: Any, train: Any, valid: Any, batch_size: int) -> None:
    """Gap 3, filled right."""
    import torch

    model.train()
    for x, y in run.batches(train, batch_size=batch_size):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
    model.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in run.each_once(valid, batch_size=batch_size):
            right += (model(x).argmax(1) == y).sum()
            count += len(y)
    run.report(accuracy=world.mean(right, count))


def _printed(words: list[str], folder: str) -> str:
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it had not ended after a minute"
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    return done.stdout
