"""SLURM's commands, the names by which they know this job and this step, its short forms of hosts and tasks, and the
plugins by which srun connects a step's tasks to their MPI (PMI).

What a command prints may hold text of other users. So it is decoded whatever its bytes are, and callers either parse it
or print it as one printable line.
"""

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from hvdtrain.errors import JobError, TopologyError
from hvdtrain.untrusted import one_line, printable, quoted

SECONDS = 20.0
"""The seconds that a command may take, except those in LIMITS."""
LIMITS: dict[str, float | None] = {
    "sacct": 8.0,  # the report of a run that has failed is waited for 10 s
    "sbatch": None,  # a request that is interrupted may have been granted
}
SLURMD_PORT = 6818
CONNECT_SECONDS = 3.5  # Linux tries again after 1 and 3
MOST_CONNECTIONS = 256
STEP = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}
"""Variables of a task of srun's. The shell of a batch job does not have all of them."""
MOST_HOSTS = 100_000
LONGEST_HOST = 255  # characters of a name
HOST = re.compile(r"\w[\w.-]*", re.ASCII)
TASKS = re.compile(r"(\d{1,6}(\(x\d{1,6}\))?(,(?=\d)|$))+", re.ASCII)
PLUGIN_NAMES = re.compile(r"\b(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|pspmix?|openmpi)\b")  # that srun --mpi= may have
PLUGINS = {  # Cray's are from SLURM's plugin mpi/cray_shasta
    "pmix": ("PMIX_NAMESPACE", "slurm.pmix.{}", "PMIX_RANK", ""),
    "cray_shasta": ("PALS_APID", "{}", "PMI_RANK", "PMI_SIZE"),
    "pmi2": ("PMI_JOBID", "{}", "PMI_RANK", "PMI_SIZE"),
}
"""The variables that a plugin of srun's sets: the label of the step, and what that holds for a step; the rank; the
number of ranks, "" where there is none."""
Cause = Literal["missing", "cannot run", "no answer", "refused", "killed", "gone"]


class SlurmError(Exception):
    """A command of SLURM that gave no answer. The text continues the command: "did not answer within 20 s"."""

    def __init__(self, why: str, cause: Cause, message: str = "") -> None:
        """`message`: what the command itself has printed."""
        super().__init__(why)
        self.cause, self.message = cause, message


def job_id(environ: Mapping[str, str]) -> str | None:
    """This job's name for SLURM's commands. (The SLURM_JOB_ID of an array's element is that of the whole array.)"""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of an srun step."""
    return environ.keys() >= STEP


def step_id(environ: Mapping[str, str]) -> str | None:
    """This step's name for SLURM's commands; None outside of a step."""
    return f"{job_id(environ)}.{environ['SLURM_STEP_ID']}" if is_step(environ) else None


def plugins_of(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The plugins of this step, each with its variables of the rank and of the number of ranks. The label of another
    step is that of an outer launcher's daemon."""
    step = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    rows = PLUGINS.items()
    return {name: (rank, size) for name, (label, at, rank, size) in rows if environ.get(label) == at.format(step)}


def check_plugin(name: str | None) -> None:
    """Raises JobError where srun --mpi= cannot have that name."""
    if name is not None and not PLUGIN_NAMES.fullmatch(name):
        raise JobError(
            f"--mpi must be pmix, pmi2, cray_shasta, pspmi or none, got {quoted(name)}; see: srun --mpi=list"
        )


def hosts(text: str) -> list[str]:
    """The names in the short form: `nid[001-002,7],login1` -> nid001, nid002, nid7, login1.

    Raises TopologyError where it is not that, or names more than `MOST_HOSTS`.
    """
    with contextlib.suppress(ValueError):
        if len(names := list(itertools.islice(_hosts(text), MOST_HOSTS + 1))) <= MOST_HOSTS:
            return names
    raise TopologyError(f"a list of nodes must name at most {MOST_HOSTS} hosts, as nid[001-004], got {quoted(text)}.")


def first_host(nodes: str) -> str:
    """The first host of a step's list. Raises TopologyError where there is none."""
    with contextlib.suppress(ValueError, StopIteration):
        return next(_hosts(nodes))
    raise TopologyError(f"SLURM_STEP_NODELIST must name hosts, as node[01-04], got {quoted(nodes)}.")


def _hosts(text: str) -> Iterator[str]:
    """The names, one by one, as there may be more than fit into memory. Raises ValueError."""
    for group in re.finditer(r"(?:[^][,]|\[[^][]*\])+|[][]", text):
        if text[group.end() : group.end() + 1] not in {"", ","}:
            raise ValueError(text)
        yield from _hosts_of("", group[0])


def _hosts_of(begin: str, group: str) -> Iterator[str]:
    """The names of `nid[001-002,7]i` behind the characters that they begin with. Raises ValueError."""
    head, bracket, rest = group.partition("[")
    begin += head
    if len(begin) > LONGEST_HOST or not (bracket or HOST.fullmatch(begin)):
        raise ValueError(group)
    if not bracket:
        yield begin
        return
    spans, _, rest = rest.partition("]")
    for span in spans.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", span, re.ASCII)
        if not ends or not (numbers := range(int(ends[1]), int(ends[2] or ends[1]) + 1)):
            raise ValueError(span)
        for number in numbers:
            yield from _hosts_of(f"{begin}{number:0{len(ends[1])}}", rest)


def tasks_per_node(text: str) -> list[tuple[int, int]]:
    """The tasks of a node, and how many neighbouring nodes have as many: `2(x3),1` -> (2, 3), (1, 1). Raises
    ValueError."""
    # Not expanded: a short text, as 1(x999999) three hundred times, may name more hosts than fit into memory.
    if not TASKS.fullmatch(text):
        raise ValueError(text)
    return [(int(tasks), int(nodes or 1)) for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)]


def query(job: str, *fields: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The values of the job's fields, as `%T`, by squeue. Raises SlurmError, of the cause "gone" where the
    job is over."""
    command = ["squeue", "--noheader", f"--jobs={job}", f"--format={'|'.join(fields)}"]
    try:
        line = _output(command, environ=environ).strip().partition("\n")[0]
    except SlurmError as error:
        if "Invalid job id" not in error.message:
            raise
        line = ""
    if not line:  # after its end a job is first not listed, and later an invalid job id
        raise SlurmError("knows the job no longer", "gone")
    values = [value.strip() for value in line.split("|")]
    if len(values) != len(fields):
        raise SlurmError("has printed something else", "refused", one_line(line))
    return values


def batch_script(job: str) -> str:
    """The job's script. Raises SlurmError, also where the job has none."""
    return _output(["scontrol", "write", "batch_script", job, "-"])


def submit(script: str) -> str:
    """Gives the script to sbatch, and returns the job's number. Raises SlurmError."""
    printed = _output(["sbatch", "--parsable"], script=script)
    return printable(printed.strip().partition(";")[0])  # JOB;CLUSTER where there are several clusters


def requeue(job: str, without: Collection[str] = ()) -> str:
    """Makes SLURM queue the job again, `without` those nodes. Returns a message for the user."""
    again, excluded = "submit the job again to continue.", ",".join(without)
    before = re.search(r"ExcNodeList=(\S+)", _shown("--oneliner", "show", "job", job)) if without else None
    if before and before[1] != "(null)":
        excluded = f"{before[1]},{excluded}"
    try:
        _output(["scontrol", "requeue", job])
    except SlurmError as error:
        if error.cause == "missing":
            return again
        if error.cause != "killed":  # SLURM ends the step at once, and this child with it
            return f"scontrol requeue {job} {error}; {again}"
    if not excluded:
        return f"job {job} is queued again."
    try:
        _output(["scontrol", "update", f"JobId={job}", f"ExcNodeList={excluded}"])
    except SlurmError as error:
        return f"job {job} is queued again; not without {excluded}: scontrol update {error}."
    return f"job {job} is queued again, without {excluded}."


def release(job: str, keep: Sequence[str], folder: Path) -> bool:
    """Gives back all nodes of the job but these; whether SLURM has done so. scontrol writes two files into
    the folder."""
    try:
        _output(["scontrol", "update", f"JobId={job}", f"NodeList={','.join(keep)}"], cwd=folder)
    except SlurmError:
        return False
    return True


def cancel(step: str, *options: str) -> None:
    """Ends a step's tasks, and does not wait: scancel itself would wait for nodes that do not answer."""
    if scancel := shutil.which("scancel"):
        null = subprocess.DEVNULL
        subprocess.Popen([scancel, *options, step], stdin=null, stdout=null, stderr=null)


def accounting(jobs: Sequence[str], fields: Sequence[str]) -> str:
    """A line of sacct's for each start of the jobs, its fields separated by |. Raises SlurmError."""
    return _output(["sacct", "-X", "-D", "-P", "-n", "-o", ",".join(fields), "-j", ",".join(jobs)])


def endpoints(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The host and port of each node's slurmd; the usual ones where SLURM does not answer."""
    port = re.search(r"^SlurmdPort\s*= (\d{1,5})", _shown("show", "config"), re.MULTILINE)
    shown = _shown("--oneliner", "show", "node", ",".join(nodes))
    found: list[tuple[str, str]] = re.findall(r"^NodeName=(\S+).*? NodeAddr=(\S+)", shown, re.MULTILINE)
    addresses = dict(found)
    return {node: (addresses.get(node, node), int(port[1]) if port else SLURMD_PORT) for node in nodes}


def silent_nodes(endpoints: Mapping[str, tuple[str, int]]) -> frozenset[str]:
    """The nodes whose slurmd takes no connection."""
    from concurrent.futures import ThreadPoolExecutor  # every rank imports this module

    with ThreadPoolExecutor(MOST_CONNECTIONS) as pool:
        answers = pool.map(_answers, endpoints.values())
        return frozenset(node for node, answer in zip(endpoints, answers, strict=True) if not answer)


def controller_answers() -> bool:
    """Whether slurmctld answers. True too where scontrol is not installed."""
    try:
        return " is UP" in _output(["scontrol", "ping"])
    except SlurmError as error:
        return error.cause == "missing"


def _answers(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _shown(*arguments: str) -> str:
    """What scontrol prints; "" where it does not answer."""
    try:
        return _output(["scontrol", *arguments])
    except SlurmError:
        return ""


def _output(
    command: Sequence[str], script: str = "", cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """The command's output, with the script as its input and additional variables. Raises SlurmError."""
    tool, seconds = shutil.which(command[0]), LIMITS.get(command[0], SECONDS)
    if tool is None:
        raise SlurmError("is not installed here", "missing")
    try:
        done = subprocess.run(
            [tool, *command[1:]],
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            cwd=cwd,
            env={**os.environ, **(environ or {})},
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"did not answer within {seconds:g} s", "no answer") from None
    except OSError as error:
        raise SlurmError(f"cannot be run ({error.strerror})", "cannot run") from None
    if done.returncode:
        message = one_line("; ".join(line.removeprefix(f"{command[0]}: ") for line in done.stderr.splitlines()))
        why = f"has failed: {message}" if message else f"has failed with exit code {done.returncode}"
        raise SlurmError(why, "killed" if done.returncode < 0 else "refused", message)
    return done.stdout
