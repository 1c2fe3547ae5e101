"""What a run was made with: versions, the git commit, and what SLURM says of its job."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import files
from hvdtrain.launch import slurm_job
from hvdtrain.launch.topology import Topology
from hvdtrain.untrusted import redacted

FORMAT = 1
JOB_SCRIPT = "job.sh"
GIT_SECONDS = 5
SLURM_SECONDS = 20
LIBRARIES = "hvdtrain", "torch", "torchvision", "tensorflow", "tensorflow-cpu", "lightning", "keras", "horovod", "numpy"


@dataclass(frozen=True)
class Launched:
    """What rank 0 knows of its launch from the beginning."""

    topology: Topology
    framework: str
    engine: str
    step: int
    """That the run resumes from."""
    valid_examples: int | None = None
    """That each validation counts; None where the run does not validate."""

    def record(self, age: float) -> Mapping[str, Any]:
        """The launch's first record; it began `age` seconds ago."""
        job = slurm_job.job_id(os.environ)
        return {
            "kind": "launch",
            "format": FORMAT,
            "time": round(time.time() - age, 3),
            "launcher": self.topology.launcher,
            "engine": self.engine,
            "framework": self.framework,
            "ranks": self.topology.size,
            "step": self.step,
            "valid_examples": self.valid_examples,
            "job": {"id": job, "restart": os.environ.get("SLURM_RESTART_COUNT", "0")} if job else None,
            "command": redacted("\0".join(sys.orig_argv)).split("\0"),
            "cwd": _current_folder(),
            "versions": versions(),
            "git": git_commit(),
        }


def record_job(folder: Path, record: Callable[..., None]) -> None:
    """Records what SLURM says of this run's job, whose script is kept in the folder, for its owner alone."""
    if not (job := slurm_job.job_id(os.environ)):
        return
    if times := job_times(job):
        record("job", **times)
    if script := job_script(job):
        with contextlib.suppress(OSError):
            files.create_private(folder / JOB_SCRIPT, script.encode())


def _current_folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # removed meanwhile
        return None


def versions() -> dict[str, str]:
    """Of Python and of the libraries that are installed; imports none."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_commit() -> dict[str, Any] | None:
    """Commit of the current folder, and whether files that git knows have changed since; None outside of git.

    A repository's own settings name programs for git to run, so git sees its files without them.
    """
    git = ["git", "--no-optional-locks"]
    asked = ["HEAD", "--show-toplevel", "--git-path", "index", "--git-path", "objects"]
    try:
        commit, tree, *paths = _output([*git, "rev-parse", *asked], GIT_SECONDS).splitlines()
        index, objects = map(os.path.abspath, paths)
        with tempfile.TemporaryDirectory() as own:
            (Path(own) / "refs").mkdir()
            (Path(own) / "HEAD").write_text(commit)
            environ = {"GIT_DIR": own, "GIT_WORK_TREE": tree, "GIT_INDEX_FILE": index, "GIT_OBJECT_DIRECTORY": objects}
            changed = _output([*git, "status", "-s", "-uno", "--ignore-submodules=all"], GIT_SECONDS, **environ)
        return {"commit": commit, "dirty": bool(changed.strip())}
    except (OSError, subprocess.SubprocessError, ValueError):
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
