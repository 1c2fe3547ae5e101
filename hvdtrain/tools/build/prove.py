"""An installed Horovod proves itself: real ranks that add real numbers; of GPUs, its build report.

`horovodrun -np 2 python -m hvdtrain.tools.build.prove torch` runs the ranks of a proof.
"""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.errors import BuildError
from hvdtrain.tools.build.plan import BuildPlan

ELEMENTS = 1000
RANKS = 2
SECONDS = 240  # two imports of TensorFlow from a cold disk on two busy cores take about 40
EXPLAINS = re.compile(r"Error|\*\*\*|gave|no end within")


def prove(
    plan: BuildPlan, environ: Mapping[str, str], report: Callable[[str], None], show: Callable[[str], None]
) -> None:
    """Raises BuildError where Horovod lacks NCCL though the plan wants it, or where an allreduce gives wrong sums."""
    horovodrun = str(Path(plan.python).parent / "horovodrun")
    environ = _rank_environment(environ)
    if plan.gpu == "nccl":  # the ranks below use no GPU
        code, built = _run([horovodrun, "--check-build"], environ)
        if "[X] NCCL" not in built:
            raise BuildError(
                f"the installed Horovod reports no NCCL (horovodrun --check-build, exit code {code}): "
                f"see {plan.own / 'build.log'}."
            )
        report("report: NCCL")
    for framework in plan.frameworks:
        for controller in plan.controllers:
            command = [horovodrun, f"--{controller}", "-np", str(RANKS), plan.python]
            command += ["-m", "hvdtrain.tools.build.prove", framework]
            show(f"proving: allreduce of {RANKS} ranks, {framework} over {controller}")
            code, output = _run(command, environ)
            check(framework, controller, code, output)
            report(f"allreduce of {RANKS} ranks: {framework} over {controller}")


def check(framework: str, controller: str, code: int, output: str) -> None:
    """Raises BuildError unless every rank has printed its proof and the launcher has ended with exit code 0."""
    if code == 0 and all(proof_line(rank, RANKS, controller) in output for rank in range(RANKS)):
        return
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if re.search("[a-z]{3}", line) and "allreduce proved" not in line]
    last = min(lines, key=lambda line: not EXPLAINS.search(line), default="no output")
    raise BuildError(
        f"Horovod does not add over {RANKS} ranks with {framework} over {controller} (exit code {code}): {last} "
        "See it whole with: "
        f"horovodrun --{controller} -np {RANKS} python -m hvdtrain.tools.build.prove {framework}"
    )


def _rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """One thread a rank, no GPU, and this package importable from wherever horovodrun starts the ranks."""
    here = str(Path(hvdtrain.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**environ, **quiet, "PYTHONPATH": path}


def _run(command: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """The exit code and output of a command; after SECONDS its whole process group is killed."""
    try:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"cannot start {command[0]}: {error.strerror}; build again to install it.") from None
    try:
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return 124, f"no end within {SECONDS} seconds"
    finally:  # also when the user interrupts: the ranks are in a session of their own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def proof_line(rank: int, size: int, controller: str) -> str:
    """What a rank prints once its sums are right."""
    return f"allreduce proved: rank {rank} of {size} over {controller}"


def rank(framework: str) -> int:
    """Sums a vector over the ranks, with Gloo once more after a second init; returns 1 where a value is wrong."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    right = _sums_are_right(framework, hvd)
    number, size, controller = hvd.rank(), hvd.size(), "mpi" if hvd.mpi_enabled() else "gloo"
    if right and controller == "gloo":  # Over MPI a shutdown finalises MPI, for good.
        hvd.shutdown()
        hvd.init()
        right = _sums_are_right(framework, hvd)
    if right:
        print(proof_line(number, size, controller), flush=True)
    return 0 if right else 1


def _sums_are_right(framework: str, hvd: Any) -> bool:
    module = importlib.import_module(framework)
    vector = module.ones([ELEMENTS]) * float(hvd.rank() + 1)
    got = set(hvd.allreduce(vector, op=hvd.Sum, name="proof").numpy().tolist())
    expected = float(sum(range(1, hvd.size() + 1)))
    if got != {expected}:
        print(f"allreduce of rank {hvd.rank()} gave {sorted(got)[:3]}, not {expected}", flush=True)
    return got == {expected}


if __name__ == "__main__":
    sys.exit(rank(sys.argv[1]))
