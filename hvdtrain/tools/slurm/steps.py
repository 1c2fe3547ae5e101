"""What a job script starts that trains: by which launcher, and on how many nodes, tasks and GPUs."""

import functools
import re
from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hvdtrain.tools.slurm.bash import Command
from hvdtrain.tools.slurm.job_script import JobScript, Option, options_of, program, program_of
from hvdtrain.tools.slurm.programs import PASSES_ON, Filler, Program, kind_of, trains
from hvdtrain.tools.slurm.sites import Site
from hvdtrain.untrusted import whole_number

BY_MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "horovodrun", "jsrun", "aprun", "ibrun", "prun"}
LAUNCHERS = {"srun", *BY_MPI}
# By kind: how many ranks they start on a node.
RANKS = {
    "torchrun": re.compile(r"--nproc[-_]per[-_]node(?:=|$)(.*)"),
    "deepspeed": re.compile(r"--num_gpus(?:=|$)(.*)"),
    "accelerate": re.compile(r"--num_processes(?:=|$)(.*)"),
}
RENDEZVOUS = re.compile(r"--rdzv[-_]backend[= ]\s*(?:c10d|etcd)")
SHAPE = ("nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task")
GPUS = ("gres", "gpus-per-node", "gpus", "gpus-per-task")


PYTHON_ALONE = Program("python", ())


@dataclass(frozen=True)
class Step:
    """What trains, with its launcher (none: the job's own shell) and srun's options over the job's."""

    line: int
    call: tuple[str, ...]
    own: Mapping[str, Option]
    options: Mapping[str, Option]
    launcher: str = "srun"
    program: Program = PYTHON_ALONE
    in_background: bool = False
    is_shell: bool = False

    def text(self, name: str) -> str | None:
        """That option's value."""
        return self.options[name].value if name in self.options else None

    def number(self, name: str) -> int | None:
        """That option's value, where it is a whole number."""
        return whole_number(self.text(name) or "")

    @property
    def nodes(self) -> int | None:
        """How many nodes, 1 where no option sets it; None where that cannot be known."""
        is_known = "nodes" not in self.options or self.number("nodes") is not None
        return max(1, self.number("nodes") or 0) if is_known else None

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks of a node as SLURM counts them; None where they are not the same on each, or not known."""
        # Where both are given, --ntasks counts, and --ntasks-per-node is a maximum.
        of_step = {name for name in ("ntasks", "ntasks-per-node") if name in self.own}
        names = of_step or {name for name in ("ntasks", "ntasks-per-node") if name in self.options}
        if (
            any(name in self.options for name in ("ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core"))
            and not names
        ):
            return None
        per_node = self.number("ntasks-per-node") if "ntasks-per-node" in names else None
        if "ntasks" not in names:
            return per_node if names else 1
        return self._spread(self.number("ntasks"), per_node)

    def _spread(self, tasks: int | None, most: int | None) -> int | None:
        """So many tasks, over the nodes."""
        if not tasks or self.nodes is None:
            return None
        if "nodes" not in self.options and most:
            return min(tasks, most)
        nodes = min(tasks, self.nodes)
        return tasks // nodes if tasks % nodes == 0 else None

    @property
    def is_torchrun(self) -> bool:
        """Whether each of its tasks starts the ranks of a node itself."""
        return self.program.kind in RANKS

    @property
    def is_wrapped(self) -> bool:
        """Whether it is no MPI program: torchrun's, or one that reads TF_CONFIG."""
        return self.is_torchrun or any("TF_CONFIG" in word for word in self.call)

    @property
    def numbers_ranks(self) -> bool:
        """Whether torchrun itself numbers the ranks, and takes no number from the script."""
        return self.is_torchrun and bool(self.nodes == 1 or RENDEZVOUS.search(" ".join(self.program.words)))

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks torchrun and its like start on a node; None where that cannot be known."""
        pattern, words = RANKS[self.program.kind], self.program.words
        given = [words[i : i + 2] for i, word in enumerate(words) if pattern.match(word)]
        if not given:
            hidden = any(word.startswith("$") for word in words)
            return 1 if self.program.kind == "torchrun" and not hidden else None
        number = whole_number(pattern.sub(r"\1", given[-1][0]) or given[-1][-1])
        if self.program.kind == "accelerate":
            return number // self.nodes if number and self.nodes and number % self.nodes == 0 else None
        return number

    def gpus_per_node(self, site: Site | None) -> int | None:
        """GPUs of a node; None where that cannot be known, 0 where none are requested."""
        named = [name for name in GPUS if name in self.own] or [name for name in GPUS if name in self.options]
        counts = {self._of_a_node(name, gpus_of(name, self.text(name) or "")) for name in named} - {0}
        if counts:
            return counts.pop() if len(counts) == 1 else None
        if site is None:
            return None
        return 0 if site.gres else site.gpus

    def _of_a_node(self, name: str, gpus: int | None) -> int | None:
        if gpus and name == "gpus":
            return gpus // self.nodes if self.nodes and gpus % self.nodes == 0 else None
        if gpus and name == "gpus-per-task":
            return gpus * self.tasks_per_node if self.tasks_per_node else None
        return gpus


@functools.lru_cache(maxsize=64)  # of the job, for each of many steps
def gpus_of(name: str, value: str) -> int | None:
    """The GPUs in such an option's value, of any types: `gpu:a100:2,nvme:1`, `a100:2` or `2`; None for a variable."""
    parts = value.split(",")
    if name == "gres":
        parts = [part for part in parts if re.match(r"(?:gres[/:])?gpu(?::|$)", part)]
    counts = [_count(name, part.rpartition(":")[2]) for part in parts]
    return sum(count for count in counts if count is not None) if None not in counts else None


def _count(name: str, last: str) -> int | None:
    is_type = name == "gres" and re.fullmatch(r"[\w.-]*[A-Za-z][\w.-]*", last)
    return 1 if is_type else whole_number(last.partition("(")[0])


def training_steps(script: JobScript) -> tuple[Step, ...]:
    """All that starts Python or a script; not what copies files or looks at the machine."""
    job = job_options(script)
    filler = Filler({**script.shell.values, **_of_slurm(job)})
    return tuple(step for command in script.shell.commands if (step := _step(command, script, job, filler)))


def job_options(script: JobScript) -> dict[str, Option]:
    """The job's options by name; unknown are those of a job whose components differ."""
    job = {option.name: option for option in script.options}
    if script.is_heterogeneous:
        job |= {name: Option(job[name].line if name in job else 1, name, "?") for name in SHAPE}
    return job


def _of_slurm(job: Mapping[str, Option]) -> dict[str, str]:
    """The variables that SLURM sets to what the script requests."""
    step = Step(0, (), {}, job)
    nodes, tasks = step.nodes, step.tasks_per_node
    values = {
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS_PER_NODE": step.number("ntasks-per-node"),
        "SLURM_CPUS_PER_TASK": step.number("cpus-per-task"),
        "SLURM_GPUS_ON_NODE": step.gpus_per_node(None),
        "SLURM_GPUS_PER_NODE": step.number("gpus-per-node"),
        "SLURM_NTASKS": nodes * tasks if nodes and tasks else None,
    }
    values["SLURM_NPROCS"] = values["SLURM_NTASKS"]
    return {name: str(value) for name, value in values.items() if value}


def _step(command: Command, script: JobScript, job: MutableMapping[str, Option], filler: Filler) -> Step | None:
    """The training that a command starts, if it does."""
    words, functions = command.words, script.shell.functions
    if words[0].startswith("$") or program(words) in LAUNCHERS | PASSES_ON or kind_of(words):
        words = filler.words(words) or words
    launcher = program(words) if program(words) in LAUNCHERS else ""
    started = program_of(words) if launcher else words
    found = trains(started, functions, bool(launcher))
    if found is None:
        return None
    own = {option.name: option for option in options_of(words[1:], command.line)} if launcher == "srun" else {}
    options = ChainMap(own, job)  # no copy of the job's for each of many
    return Step(command.line, words, own, options, launcher, found, command.in_background, command.is_shell)
