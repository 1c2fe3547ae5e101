"""What a run was made with: versions, the git commit, and what SLURM says of its job."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import files
from hvdtrain.launch import slurm_job
from hvdtrain.launch.topology import Topology

FORMAT = 1
JOB_SCRIPT = "job.sh"
GIT_SECONDS = 5
SLURM_SECONDS = 20
LIBRARIES = ("hvdtrain", "torch", "tensorflow", "tensorflow-cpu", "lightning", "keras", "horovod", "numpy")


@dataclass(frozen=True)
class Launched:
    """What rank 0 knows of its launch from the beginning."""

    folder: Path
    topology: Topology
    framework: str
    engine: str
    step: int
    """That the run resumes from."""
    age: float
    """Seconds since the process began."""

    def records(self) -> Iterator[Mapping[str, Any]]:
        """The launch, then what SLURM says of its job, whose script is kept beside."""
        job = slurm_job.job_id(os.environ)
        yield {
            "kind": "launch",
            "format": FORMAT,
            "time": round(time.time() - self.age, 3),
            "launcher": self.topology.launcher,
            "engine": self.engine,
            "framework": self.framework,
            "ranks": self.topology.size,
            "step": self.step,
            "job": {"id": job, "restart": os.environ.get("SLURM_RESTART_COUNT", "0")} if job else None,
            "command": sys.orig_argv,
            "cwd": str(Path.cwd()),
            "versions": versions(),
            "git": git_commit(),
        }
        if job and (times := job_times(job)):
            yield {"kind": "job", **times}
        if job and (script := job_script(job)):
            files.write(self.folder / JOB_SCRIPT, script)


def versions() -> dict[str, str]:
    """Of Python and of the libraries that are installed; imports none."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_commit() -> dict[str, Any] | None:
    """Commit of the current folder, and whether files that git knows have changed since; None outside of git."""
    git = ["git", "--no-optional-locks"]
    try:
        commit = _output([*git, "rev-parse", "HEAD"], GIT_SECONDS).strip()
        return {"commit": commit, "dirty": bool(_output([*git, "status", "-s", "-uno"], GIT_SECONDS).strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def job_times(job_id: str) -> dict[str, float] | None:
    """When SLURM was given the job, or was given it back, and when it started it, in seconds since 1970; None where
    SLURM does not answer."""
    command = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%V|%S"]
    try:
        submit, _, start = _output(command, SLURM_SECONDS, SLURM_TIME_FORMAT="%s").strip().partition("|")
        return {"submit": float(submit), "start": float(start)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def job_script(job_id: str) -> str | None:
    """The job's script; None of a job without one, and where SLURM does not answer."""
    try:
        return _output(["scontrol", "write", "batch_script", job_id, "-"], SLURM_SECONDS)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def _output(command: Sequence[str], seconds: float, **environ: str) -> str:
    """What a command prints. Raises OSError, SubprocessError."""
    path = shutil.which(command[0])
    if path is None:
        raise FileNotFoundError(command[0])
    environment = {**os.environ, **environ}
    return subprocess.run(
        [path, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=seconds,
        check=True,
        env=environment,
    ).stdout
