"""What a job script starts that trains: which program, by which launcher, on how many nodes, tasks and GPUs."""

import functools
import itertools
import re
import shlex
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from hvdtrain.tools.slurm.script import (
    HETEROGENEOUS,
    WORDS,
    WRAPPERS,
    Command,
    JobScript,
    Option,
    program,
    program_of,
    split,
    start_of,
    unquoted,
)
from hvdtrain.tools.slurm.sites import Site
from hvdtrain.untrusted import whole_number

_PASSING = """
    singularity apptainer apptainer-suid shifter docker podman podman-hpc enroot sarus ch-run
    uv poetry pixi conda mamba micromamba pipenv hatch nsys ncu numactl taskset stdbuf timeout nice xvfb-run
    unbuffer eval
"""
_QUIET = """
    hostname echo printf cat cp mv rm ls ln mkdir rmdir tar unzip rsync chmod touch find sed awk grep which date sleep
    true nvidia-smi rocm-smi pip pip3 git wget curl df free ip ping nproc lscpu printenv sync test
    module ml source . cd export set ulimit sbcast scontrol kill pkill sudo
"""
SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
PASSES_ON = {*_PASSING.split(), *WRAPPERS, *SHELLS}  # programs that start the words behind them
QUIET = set(_QUIET.split())  # programs that train nothing, whatever words are behind them
PYTHON = re.compile(r"python[\d.]*|pypy3?")
KINDS = {
    "torchrun": re.compile(r"torchrun[\w-]*"),
    "accelerate": re.compile(r"accelerate(-launch)?"),
    "deepspeed": re.compile(r"deepspeed"),
    # Programs of frameworks that train in Python.
    "python": re.compile(
        r"fairseq(-hydra)?-train|llamafactory-cli|axolotl|litgpt|tune|yolo|onmt_train|nnUNet(v2)?_train|allennlp|"
        r"anemoi-training|t2t-trainer"
    ),
}
PYTHON_FLAGS = {"-", "-c", "-m", "-V", "--version"}
"""The flags of Python behind which there are no others."""
MODULES = {
    "torchrun": re.compile(r"torch\.distributed\.(run|launch)|torch\.distributed\.elastic\S*"),
    "accelerate": re.compile(r"accelerate\..*"),
    "deepspeed": re.compile(r"deepspeed\..*"),
}
"""By kind, the modules that Python runs with -m."""
TOOLS = re.compile(  # hvdtrain's commands start their steps themselves
    r"hvdtrain|(pip|venv|virtualenv|ensurepip|json|http|zipfile|compileall|site|ipykernel|pytest|ray|tensorboard)(\..*)?"
)
# Names of Python programs that prepare or show something.
NOT_TRAINING = re.compile(
    r"(?:^|[-_.])(?:pre_?process(?:ing)?|prepare|download|convert|tokeni[sz]e|upload|sync|install|setup|generate|datagen|"
    r"extract|pre_?compute|compute|build|create|make|merge|average|consolidat\w+|(?:re)?encode|serve|server|validat(?:e|or)|"
    r"visuali[sz]e|plot)(?:[-_.]|$)"
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]{0,200}))?\}|(\w+))")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
BRACES = re.compile(r"\$\{(\w+)[^{}]{0,200}\}")
COMMENT = re.compile(r"(?<!\S)#.*")
SUBSTITUTED = re.compile(r"\$\(\([^()]{0,200}\)\)|\$\([^()]{0,200}\)")
PIECES = re.compile(r"[;&|\n(){}]+|(?:^|\s)(?:then|do|else)\s")
MOST_WORDS = 400
MOST_FILLED = 8000  # characters of a command with its variables filled in
MOST_IN_ALL = 2**19
PASSES = 5  # of variables in variables
MOST_NESTED = 3  # bash -c in bash -c
BY_MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "horovodrun", "jsrun", "aprun", "ibrun", "prun"}
LAUNCHERS = {"srun", *BY_MPI}
RANKS = {
    "torchrun": re.compile(r"--nproc[-_]per[-_]node(?:=|$)(.*)"),
    "deepspeed": re.compile(r"--num_gpus(?:=|$)(.*)"),
    "accelerate": re.compile(r"--num_processes(?:=|$)(.*)"),
}
"""By kind, the option that gives the number of ranks."""
RENDEZVOUS = re.compile(r"--rdzv[-_]backend[= ]\s*(?:c10d|etcd)")
PER_PART = ("ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core")
SHAPE = ("nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task")
GPUS = ("gres", "gpus-per-node", "gpus", "gpus-per-task")


@dataclass(frozen=True)
class TrainingProgram:
    """A program that trains. Its kind is torchrun, accelerate, deepspeed or python; script, where nobody knows."""

    kind: str
    words: tuple[str, ...]


class VariableExpander:
    """Expands variables that the script sets, up to a limit on the total length."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values
        self.left = MOST_IN_ALL

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words that the program gets: a word that is one variable may become several."""
        filled: list[str] = []
        for word in words[:MOST_WORDS]:
            is_text = bool(filled and re.fullmatch("-[a-z]*c", filled[-1]))
            text = self._text(word)
            if text != word and not is_text and VARIABLE.fullmatch(word):
                filled += [unquoted(found) for found in WORDS.findall(text)]
            else:
                filled.append(text)
        return tuple(filled[:MOST_WORDS])

    def _text(self, text: str) -> str:
        for _ in range(PASSES):
            if "$" not in text or self.left <= 0:
                break
            before, text = text, VARIABLE.sub(self._value, text)[:MOST_FILLED]
            self.left -= len(text)
            if text == before:
                break
        return text

    def _value(self, found: re.Match[str]) -> str:
        default = found[2]
        return self.values.get(found[1] or found[3], found[0] if default is None else default)


def trains(
    words: Sequence[str], functions: Mapping[str, str], by_launcher: bool, nested: int = 0
) -> TrainingProgram | None:
    """The program among the words that trains, or None. Behind a launcher it may be any of the words."""
    words = words[:MOST_WORDS]
    if not words or program(words) in QUIET:
        return None
    if not (by_launcher or kind_of(words) or program(words) in PASSES_ON or _is_script(words[0])):
        return None
    unseen = None
    for i, word in enumerate(words):
        name = word.rpartition("/")[2]
        text = functions.get(name) or (_shell_text(words[i:]) if name in SHELLS else None)
        if text is not None:
            return _in_text(text, functions, nested)
        if kind := kind_of(words[i:]):
            return TrainingProgram(kind, tuple(words[i:])) if kind != "tool" else None
        if not unseen and (_is_script(word) if i == 0 else name.endswith(SCRIPTS)):
            unseen = TrainingProgram(
                "script", tuple(words[i - 1 : i + 1] if i and words[i - 1] in SHELLS else words[i:])
            )
    return unseen


def _in_text(text: str, functions: Mapping[str, str], nested: int) -> TrainingProgram | None:
    """The training in the text that `bash -c` runs; a program whose kind is known comes before a script."""
    found = []
    text = SUBSTITUTED.sub("$_", COMMENT.sub("", BRACES.sub(r"$\1", text.replace("\\\n", " "))))
    for piece in PIECES.split(text)[:MOST_WORDS] if nested < MOST_NESTED else []:
        words = [unquoted(word) for word in WORDS.findall(piece)]
        if started := trains(words[start_of(words) :], functions, True, nested + 1):
            found.append(started)
    return min(found, key=lambda started: started.kind == "script", default=None)


def _shell_text(words: Sequence[str]) -> str | None:
    """The text that `bash -c` runs, with the words behind it in place of "$@"; None without -c."""
    for i, word in enumerate(words[1:], 1):
        if re.fullmatch("-[a-z]*c", word):
            arguments = " ".join(shlex.quote(argument) for argument in words[i + 3 :])
            return words[i + 1].replace('"$@"', arguments)[:MOST_FILLED] if i + 1 < len(words) else None
        if not word.startswith("-"):
            return None
    return None


def _is_script(word: str) -> bool:
    return word.endswith(SCRIPTS) or word.startswith(("./", "$"))


def kind_of(words: Sequence[str]) -> str | None:
    """The kind of program at the start of the words; `tool` for Python that trains nothing; None for any other."""
    name = program(words)
    if PYTHON.fullmatch(name):
        return _kind_of_python(words)
    if name == "accelerate" and tuple(words[1:2]) != ("launch",):
        return "tool"
    if name.endswith(".py"):
        return "tool" if NOT_TRAINING.search(name) else "python"
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)


def _kind_of_python(words: Sequence[str]) -> str:
    """The kind of the module or the file that Python runs."""
    rest = list(itertools.dropwhile(lambda word: word.startswith("-") and word not in PYTHON_FLAGS, words[1:]))
    if not rest or rest[0] in PYTHON_FLAGS - {"-m"}:
        return "tool"
    name = rest[1] if rest[0] == "-m" and len(rest) > 1 else ""
    if kind := next((kind for kind, pattern in MODULES.items() if pattern.fullmatch(name)), None):
        return kind
    is_tool = TOOLS.fullmatch(name) or NOT_TRAINING.search(name or rest[0].rpartition("/")[2])
    return "tool" if is_tool else "python"


@dataclass(frozen=True)
class TrainingStep:
    """A training, its launcher, "" for the job's shell, and its options."""

    line: int
    call: tuple[str, ...]
    of_srun: Mapping[str, Option]
    """The options of the srun that starts it."""
    options: Mapping[str, Option]
    """The job's options, replaced by those of srun."""
    launcher: str = "srun"
    program: TrainingProgram = TrainingProgram("python", ())
    in_background: bool = False
    is_shell: bool = False

    def number(self, name: str) -> int | None:
        """The value of that option, where it is a whole number."""
        return whole_number(self.options[name].value) if name in self.options else None

    @property
    def nodes(self) -> int | None:
        """The number of nodes, 1 where no option sets it; None where it cannot be known."""
        is_known = "nodes" not in self.options or self.number("nodes") is not None
        return max(1, self.number("nodes") or 0) if is_known else None

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks per node as SLURM counts them; None where the nodes have different numbers, or they are not known."""
        # Where both are given, --ntasks counts, and --ntasks-per-node is a maximum.
        either = ("ntasks", "ntasks-per-node")
        names = {name for name in either if name in self.of_srun} or {name for name in either if name in self.options}
        if not names:
            return 1 if self.options.keys().isdisjoint(PER_PART) else None
        per_node = self.number("ntasks-per-node") if "ntasks-per-node" in names else None
        if "ntasks" not in names:
            return per_node
        tasks = self.number("ntasks")
        if not tasks or self.nodes is None:
            return None
        if "nodes" not in self.options and per_node:
            return min(tasks, per_node)
        nodes = min(tasks, self.nodes)
        return tasks // nodes if tasks % nodes == 0 else None

    @property
    def is_torchrun(self) -> bool:
        """Whether each of its tasks starts the ranks of a node, as torchrun does."""
        return self.program.kind in RANKS

    @property
    def numbers_ranks(self) -> bool:
        """Whether torchrun numbers the ranks itself, whatever numbers the script gives it."""
        return self.is_torchrun and bool(self.nodes == 1 or RENDEZVOUS.search(" ".join(self.program.words)))

    @property
    def ranks_per_node(self) -> int | None:
        """The ranks that torchrun and its like start on a node; None where their number cannot be known."""
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
        """The GPUs of a node; 0 where none are requested, None where their number cannot be known."""
        named = [name for name in GPUS if name in self.of_srun] or [name for name in GPUS if name in self.options]
        counts = {self._of_a_node(name, gpus_of(name, self.options[name].value)) for name in named} - {0}
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


@functools.lru_cache(maxsize=64)  # many steps have the job's options
def gpus_of(name: str, value: str) -> int | None:
    """The GPUs in such an option's value, of any types: `gpu:a100:2,nvme:1`, `a100:2` or `2`; None for a variable."""
    total = 0
    for part in value.split(","):
        if name == "gres" and not re.match(r"(?:gres[/:])?gpu(?::|$)", part):
            continue
        last = part.rpartition(":")[2]
        is_type = name == "gres" and re.fullmatch(r"[\w.-]*[A-Za-z][\w.-]*", last)
        count = 1 if is_type else whole_number(last.partition("(")[0])
        if count is None:
            return None
        total += count
    return total


def training_steps(script: JobScript) -> tuple[TrainingStep, ...]:
    """The steps that start a training or a script; not those that copy files or show something of the machine."""
    job = job_options(script)
    expander = VariableExpander({**script.values, **_of_slurm(job)})
    return tuple(step for command in script.commands if (step := _step(command, script, job, expander)))


def job_options(script: JobScript) -> dict[str, Option]:
    """The job's options by name; their values are unknown where the job has components, which may differ."""
    job = {option.name: option for option in script.options}
    if any(HETEROGENEOUS.match(line) for line in script.lines[: script.first - 1]):
        job |= {name: Option(job[name].line if name in job else 1, name, "?") for name in SHAPE}
    return job


def _of_slurm(job: Mapping[str, Option]) -> dict[str, str]:
    """The variables that SLURM sets, with the values that the script requests."""
    step = TrainingStep(0, (), {}, job)
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


def _step(
    command: Command, script: JobScript, job: MutableMapping[str, Option], expander: VariableExpander
) -> TrainingStep | None:
    """The training that a command starts; None where it starts none."""
    words, functions = command.words, script.functions
    if words[0].startswith("$") or program(words) in LAUNCHERS | PASSES_ON or kind_of(words):
        words = expander.words(words) or words
    launcher = program(words) if program(words) in LAUNCHERS else ""
    started = program_of(words) if launcher else words
    found = trains(started, functions, bool(launcher))
    if found is None:
        return None
    of_srun = {option.name: option for option in split(words[1:], command.line)[0]} if launcher == "srun" else {}
    options = ChainMap(of_srun, job)  # a copy of the job's for each of many steps would take long
    return TrainingStep(command.line, words, of_srun, options, launcher, found, command.in_background, command.is_shell)
