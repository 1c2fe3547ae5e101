"""Starts jobs under `python -m hvdtrain supervise` on a minicluster, and kills their ranks and nodes."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import COMMAND, ENVIRONMENTS, LOOK_SECONDS, UNDER_WAY, Minicluster, losses
from paths import SUPPORT
from ranks import clean_environ

from hvdtrain.launch import slurm
from hvdtrain.tools.slurm import Options, render
from hvdtrain.tools.slurm.sites import SITES

PACED = SUPPORT / "paced.py"
# 400 steps of 50 ms; a checkpoint in between, so that some steps are made again.
LINEAR = ("linear", "--batch-size", 100, "--epochs", 40, "--checkpoint-every-steps", 30, "--log-every-steps", 1)
LIMIT = 800


def trains(
    build: str = "openmpi", framework: str = "torch", recipe: tuple[object, ...] = LINEAR, pause: float = 0.05
) -> list[str]:
    """The command of a training whose ranks find no command of SLURM, as in a container. `pause`: seconds in each
    step."""
    folder = ENVIRONMENTS[build] / "bin"
    environ = ["env", f"PATH={folder}", f"HVDTRAIN_TEST_PAUSE={pause}"]
    return [*environ, str(folder / "python"), str(PACED), f"hvdtrain.{framework}", *map(str, recipe)]


@dataclass
class Job:
    """One job in a folder of its own."""

    cluster: Minicluster
    folder: Path
    number: str = ""
    limit: float = LIMIT
    """Seconds after which waiting for an event fails the test."""
    times: dict[str, float] = field(default_factory=dict)
    """When each event came."""
    state: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.out")))

    @property
    def supervised(self) -> list[str]:
        """The lines that the supervisor has logged."""
        return [line.removeprefix("supervise: ") for line in self.log.splitlines() if line.startswith("supervise: ")]

    @property
    def run(self) -> Path:
        (run,) = self.folder.glob("runs/linear/*")
        return run

    def losses(self) -> dict[int, float]:
        """The loss of every step; where a step was made twice, the second one."""
        return dict(losses(self.run))

    def steps(self) -> int:
        """The number of recorded steps; after a restart some steps count twice."""
        return sum(path.read_text().count('"kind": "step"') for path in self.folder.glob("runs/linear/*/metrics.jsonl"))

    def submit(self, script: str, *flags: str) -> "Job":
        self.folder.mkdir(exist_ok=True)
        (self.folder / "job.sh").write_text(script)
        # Not by cluster.run, which at its end kills all that has its tag: a job that began meanwhile has it too.
        sbatch = [COMMAND, "--state", self.cluster.state, "sbatch", "--parsable", *flags, "job.sh"]
        environ = clean_environ()
        environ["PATH"] = f"{ENVIRONMENTS['openmpi'] / 'bin'}{os.pathsep}{environ['PATH']}"
        done = subprocess.run(sbatch, cwd=self.folder, env=environ, capture_output=True, text=True, check=True)
        self.number = done.stdout.strip()
        return self

    def nodes(self) -> list[str]:
        """The names of the job's nodes, in the order of the first launch's ranks."""
        return slurm.hosts(self.cluster.job(self.number)["NodeList"])

    def until(self, true: Callable[[], object], what: str, pause: float = 0.1) -> None:
        deadline = time.monotonic() + self.limit
        while not true():
            assert time.monotonic() < deadline and "Traceback" not in self.log, f"{what}: {self.log[-3000:]}"
            time.sleep(pause)
        self.times[what] = time.monotonic()

    def trains(self, steps: int = 45) -> "Job":
        self.until(lambda: self.steps() > steps, "trains")
        return self

    def trains_again(self, before: int, times: int = 1) -> None:
        self.until(lambda: self.log.count("resuming from step") >= times and self.steps() > before, "trains again")

    def cut(self, node: str) -> int:
        """Cuts the node's power. Returns how many steps were recorded by then."""
        self.cluster("cut", "--power", node)
        self.times["cut"] = time.monotonic()
        time.sleep(1)
        return self.steps()

    def kill_rank(self, rank: int) -> int:
        """Kills a rank's process. Returns how many steps were recorded by then."""
        self.until(lambda: [os.kill(pid, signal.SIGKILL) or pid for pid in self._processes(rank)], "killed")
        self.times["cut"] = time.monotonic()
        time.sleep(1)
        return self.steps()

    def hosts(self) -> dict[int, str]:
        """By rank, the node on which it trains now."""
        return {int(variables["SLURM_PROCID"]): variables["SLURMD_NODENAME"] for _, variables in self._ranks()}

    def _processes(self, rank: int) -> list[int]:
        return [number for number, variables in self._ranks() if variables["SLURM_PROCID"] == str(rank)]

    def _ranks(self) -> list[tuple[int, dict[str, str]]]:
        """The processes that train, with their environment."""
        found = []
        for process in self.processes():
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_text(errors="replace").split("\0")
                words = (process / "cmdline").read_text(errors="replace").split("\0")
                # The supervisor and srun have these variables and words too.
                if words[1:2] == [str(PACED)]:
                    environ = dict(each.split("=", 1) for each in variables if "=" in each)
                    found.append((int(process.name), environ))
        return [(number, environ) for number, environ in found if "SLURM_PROCID" in environ]

    def processes(self) -> list[Path]:
        """The processes of all nodes whose working directory is this job's folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "cwd").readlink() == self.folder:
                    found.append(process)
        return found

    def ended(self, *but: str) -> "Job":
        """Once it is over, or `but` in that state: SLURM waits longer for a silent node that was not given back."""

        def is_over() -> bool:
            self.state = self.cluster.job(self.number)
            return self.state["JobState"] not in UNDER_WAY - set(but)

        self.until(is_over, "ended", LOOK_SECONDS)
        return self

    @property
    def seconds(self) -> float:
        """Seconds from the loss of a rank or node until the next step."""
        return self.times["trains again"] - self.times["cut"]


def script(command: list[str], *, nodes: int, spare: int = 0, launcher: str = "srun", mpi: str | None = None) -> str:
    """The job script that `python -m hvdtrain slurm` prints, for one rank a node."""
    options = Options(nodes=nodes, spare=spare, launcher=launcher, mpi=mpi, gpus_per_node=1, cpus_per_task=8)
    return render(SITES["generic"], options, command)
