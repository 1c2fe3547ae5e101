"""Requests of a run to SLURM for its own job: to end this step, to queue the job again."""

import shutil
import subprocess
from collections.abc import Mapping

from hvdtrain.launch import mpi

REQUEUE_SECONDS = 30


def job_id(environ: Mapping[str, str]) -> str | None:
    """What SLURM's commands call this job. The SLURM_JOB_ID of one element of an array is that of the whole array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def step_id(environ: Mapping[str, str]) -> str | None:
    """What they call this srun step, if it is one."""
    job, step = job_id(environ), environ.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step and mpi.plugin_of(environ) else None


def cancel_step(environ: Mapping[str, str]) -> None:
    """Ends this srun step, if it is one: srun itself waits minutes for a dead node before it ends the others' tasks."""
    scancel, step = shutil.which("scancel"), step_id(environ)
    if scancel and step:
        subprocess.Popen([scancel, step])


def requeue(job_id: str) -> str:
    """Requests SLURM to start the job again; a message for the user."""
    scontrol = shutil.which("scontrol")
    if not scontrol:
        return "submit the job again to continue."
    try:
        done = subprocess.run(
            [scontrol, "requeue", job_id], capture_output=True, text=True, timeout=REQUEUE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"scontrol requeue {job_id} did not answer; submit the job again to continue."
    if done.returncode <= 0:  # SLURM ends the step at once, and this child with it
        return f"job {job_id} is queued again."
    return f"scontrol requeue {job_id}: {done.stderr.strip() or done.returncode}; submit the job again to continue."
