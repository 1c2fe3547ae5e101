"""The job that a supervisor runs in: its nodes, which of them answer, and what is requested of SLURM."""

import math
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import JobError, TopologyError
from hvdtrain.launch import hostlist, slurm_job

SLURMD_PORT = 6818
CONNECT = 3.5  # seconds: Linux tries again after 1 and 3
SECONDS = 20.0  # for a command of SLURM
MOST_AT_ONCE = 256
LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # days, hours, minutes, seconds
NOT_ALLOCATED = "supervise runs in a job's script, in front of its srun; here is no job. Submit one: sbatch FILE"


@dataclass(frozen=True)
class Job:
    """This job, as its script's environment has it."""

    number: str
    """What SLURM's commands call it."""
    nodes: tuple[str, ...]
    tasks_per_node: int | None
    """None where nodes have unequal numbers."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Job":
        """Raises JobError where there is none."""
        number, listed = slurm_job.job_id(environ), environ.get("SLURM_JOB_NODELIST")
        if not number or not listed:
            raise JobError(NOT_ALLOCATED)
        try:
            groups = hostlist.tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
            nodes = tuple(hostlist.expand(listed))
        except (ValueError, TopologyError):
            raise JobError(NOT_ALLOCATED) from None
        given = environ.get("SLURM_NTASKS_PER_NODE", "")
        counts = {int(given)} if given.isdecimal() else {tasks for tasks, _ in groups}
        return cls(number, nodes, counts.pop() if len(counts) == 1 else None)

    def node_of(self, host: str) -> str:
        """The node whose hostname that is."""
        return host if host in self.nodes else host.partition(".")[0]

    def endpoints(self) -> dict[str, tuple[str, int]]:
        """By node the host and port of its slurmd."""
        port, addresses = _slurmd_port(), _addresses(self.nodes)
        return {node: (addresses.get(node) or node, port) for node in self.nodes}

    def seconds_left(self) -> float:
        """Until its time limit; infinite where SLURM says none."""
        shown = LEFT.fullmatch(_output("squeue", "--noheader", "--format=%L", f"--jobs={self.number}").strip())
        if not shown:
            return math.inf
        days, hours, minutes, seconds = (int(digits or 0) for digits in shown.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    def release(self, keep: Sequence[str], folder: Path) -> bool:
        """Gives all nodes back but these: SLURM, which misses a silent node after minutes, would then end the whole
        job. scontrol writes two files into the folder."""
        return _refused("update", f"JobId={self.number}", f"NodeList={','.join(keep)}", cwd=folder) == ""

    def requeue(self, without: Sequence[str]) -> str:
        """Requests SLURM to start this job again, elsewhere than on those nodes; a message for the user."""
        excluded = ",".join(dict.fromkeys([*_excluded(self.number), *without]))
        # SLURM ends this process as soon as the job is queued again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        message = slurm_job.requeue(self.number)
        if without and "is queued again" in message:
            refused = _refused("update", f"JobId={self.number}", f"ExcNodeList={excluded}")
            message = f"{message[:-1]}{f'; not without {excluded}: {refused}' if refused else f', without {excluded}'}."
        return message


def silent_nodes(endpoints: Mapping[str, tuple[str, int]]) -> frozenset[str]:
    """The nodes whose slurmd takes no connection."""
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        answers = pool.map(_answers, endpoints.values())
        return frozenset(node for node, answer in zip(endpoints, answers, strict=True) if not answer)


def controller_answers() -> bool:
    """Whether slurmctld does, or nobody can request that here."""
    return not shutil.which("scontrol") or " is UP" in _output("scontrol", "ping")


def kill(step: str) -> None:
    """Kills a step's tasks. scancel itself would wait for nodes that do not answer."""
    if scancel := shutil.which("scancel"):
        null = subprocess.DEVNULL
        subprocess.Popen([scancel, "--signal=KILL", step], stdin=null, stdout=null, stderr=null)


def _answers(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, CONNECT).close()
    except OSError:
        return False
    return True


def _slurmd_port() -> int:
    found = re.search(r"^SlurmdPort\s*= (\d{1,5})", _output("scontrol", "show", "config"), re.MULTILINE)
    return int(found[1]) if found else SLURMD_PORT


def _addresses(nodes: Collection[str]) -> dict[str, str]:
    shown = _output("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    found: list[tuple[str, str]] = re.findall(r"^NodeName=(\S+).*? NodeAddr=(\S+)", shown, re.MULTILINE)
    return dict(found)


def _excluded(job: str) -> list[str]:
    found = re.search(r"ExcNodeList=(\S+)", _output("scontrol", "--oneliner", "show", "job", job))
    return [found[1]] if found and found[1] != "(null)" else []


def _output(*command: str) -> str:
    """What a command of SLURM prints; "" where it is not there or does not answer."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return _done(command).stdout
    return ""


def _refused(*arguments: str, cwd: Path | None = None) -> str:
    """Why scontrol failed; "" where it did not."""
    try:
        done = _done(["scontrol", *arguments], cwd)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def _done(command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, cwd=cwd
    )
