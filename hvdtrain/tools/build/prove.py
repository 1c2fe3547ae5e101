"""An installed Horovod proves itself: real ranks that add real numbers, on the CPU and on the GPUs that are visible.

`horovodrun -np 2 python -m hvdtrain.tools.build.prove torch` runs the ranks of a proof; with `cuda` behind it, on GPUs.
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
from hvdtrain.core.wording import counted
from hvdtrain.errors import BuildError
from hvdtrain.launch.devices import visible_gpus
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
    gpus = visible_gpus(environ) if plan.gpu != "none" else 0
    here = str(Path(hvdtrain.__file__).parent.parent)  # importable from wherever horovodrun starts the ranks
    path = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    environ = {**environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": path}
    if plan.gpu != "none":
        code, built = _run([horovodrun, "--check-build"], {**environ, "CUDA_VISIBLE_DEVICES": ""})
        if "[X] NCCL" not in built:
            raise BuildError(
                f"the installed Horovod reports no NCCL (horovodrun --check-build, exit code {code}): "
                f"see {plan.own / 'build.log'}."
            )
        report("report: NCCL" + ("" if gpus else "; its allreduce is not proved: no GPU is visible here"))
    proofs = [(framework, "cpu", RANKS) for framework in plan.frameworks]
    proofs += [(framework, "cuda", min(RANKS, gpus)) for framework in plan.on_gpus if gpus]
    for framework, device, ranks in proofs:
        for controller in plan.controllers:
            command = [horovodrun, f"--{controller}", "-np", str(ranks), plan.python]
            command += ["-m", "hvdtrain.tools.build.prove", framework, *([device] if device == "cuda" else [])]
            what = f"{framework} over {controller}" + (" and NCCL" if device == "cuda" else "")
            show(f"proving: allreduce of {counted(ranks, 'rank')}, {what}")
            visible = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
            code, output = _run(command, {**environ, **visible})
            check_proofs(framework, controller, code, output, ranks, device)
            report(f"allreduce of {counted(ranks, 'rank')}: {what}")


def check_proofs(
    framework: str, controller: str, code: int, output: str, ranks: int = RANKS, device: str = "cpu"
) -> None:
    """Raises BuildError unless every rank has printed its proof and the launcher has ended with exit code 0."""
    if code == 0 and all(proof_line(rank, ranks, controller, device) in output for rank in range(ranks)):
        return
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if re.search("[a-z]{3}", line) and "allreduce proved" not in line]
    last = min(lines, key=lambda line: not EXPLAINS.search(line), default="no output")
    on, again = (" on GPUs", " cuda") if device == "cuda" else ("", "")
    who = f"{counted(ranks, 'rank')}{on} with {framework} over {controller}"
    raise BuildError(
        f"Horovod does not add over {who} (exit code {code}): {last} See it whole with: "
        f"horovodrun --{controller} -np {ranks} python -m hvdtrain.tools.build.prove {framework}{again}"
    )


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


def proof_line(rank: int, size: int, controller: str, device: str = "cpu") -> str:
    """What a rank prints once its sums are right."""
    return f"allreduce proved: rank {rank} of {size} over {controller} on {device}"


def rank(framework: str, device: str) -> int:
    """Sums a vector over the ranks, with Gloo once more after a second init; returns 1 where a value is wrong."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    ones = _ones_on_gpu(framework, hvd.local_rank()) if device == "cuda" else importlib.import_module(framework).ones
    right = _sums_are_right(ones, hvd)
    number, size, controller = hvd.rank(), hvd.size(), "mpi" if hvd.mpi_enabled() else "gloo"
    if right and controller == "gloo":  # Over MPI a shutdown finalises MPI, for good.
        hvd.shutdown()
        hvd.init()
        right = _sums_are_right(ones, hvd)
    if right:
        print(proof_line(number, size, controller, device), flush=True)
    return 0 if right else 1


def _ones_on_gpu(framework: str, index: int) -> Callable[[list[int]], Any]:
    """What makes a vector on this rank's GPU."""
    if framework == "torch":
        import torch

        torch.cuda.set_device(index)
        return lambda shape: torch.ones(shape, device="cuda")
    import tensorflow as tf

    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[index], "GPU")

    def ones(shape: list[int]) -> Any:
        with tf.device("GPU:0"):
            return tf.ones(shape)

    return ones


def _sums_are_right(ones: Callable[[list[int]], Any], hvd: Any) -> bool:
    vector = ones([ELEMENTS]) * float(hvd.rank() + 1)
    summed = hvd.allreduce(vector, op=hvd.Sum, name="proof")
    got = set((summed.cpu() if hasattr(summed, "cpu") else summed).numpy().tolist())
    expected = float(sum(range(1, hvd.size() + 1)))
    if got != {expected}:
        print(f"allreduce of rank {hvd.rank()} gave {sorted(got)[:3]}, not {expected}", flush=True)
    return got == {expected}


if __name__ == "__main__":
    sys.exit(rank(sys.argv[1], "cuda" if sys.argv[2:] == ["cuda"] else "cpu"))
