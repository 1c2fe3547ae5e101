"""A job script as SLURM and bash read it: its #SBATCH options and its commands, with their line numbers."""

import re
from collections import ChainMap, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.tools.slurm import bash
from hvdtrain.tools.slurm.sites import Site
from hvdtrain.untrusted import whole_number

SHORT = {
    "-A": "account",
    "-C": "constraint",
    "-G": "gpus",
    "-J": "job-name",
    "-N": "nodes",
    "-D": "chdir",
    "-c": "cpus-per-task",
    "-e": "error",
    "-i": "input",
    "-m": "distribution",
    "-n": "ntasks",
    "-o": "output",
    "-p": "partition",
    "-q": "qos",
    "-t": "time",
    "-w": "nodelist",
    "-x": "exclude",
}
# Long options whose value may be a word of its own; of any other the next word is the program.
VALUED = {*SHORT.values(), "ntasks-per-node", "gres", "mem", "mpi", "gpus-per-node", "gpus-per-task", "cpu-bind"}
TRAINS = re.compile(r"\b(?:python|torchrun|hvdtrain)|\.(?:py|sh)\b|\$@")
WORDS = re.compile(r"""(?:[^\s"'\\]+|\\.|"[^"\\]*(?:\\.[^"\\]*)*"|'[^']*')+""", re.DOTALL)
SUPERVISE = ("-m", "hvdtrain", "supervise")
SBATCH = re.compile(r"#SBATCH\s")


@dataclass(frozen=True)
class Option:
    """One option of sbatch or srun, by its long name."""

    line: int
    name: str
    value: str


@dataclass(frozen=True)
class JobScript:
    """The options and the commands of a job script."""

    lines: tuple[str, ...]
    options: tuple[Option, ...]  # of #SBATCH lines that count
    first: int  # the line of the first command, behind which SLURM reads no #SBATCH
    shell: bash.Script

    def option(self, name: str) -> Option | None:
        """The last one of that name."""
        return next((option for option in reversed(self.options) if option.name == name), None)


@dataclass(frozen=True)
class Step:
    """One srun that trains, with its options over the job's."""

    line: int
    call: tuple[str, ...]
    own: Mapping[str, Option]
    options: Mapping[str, Option]

    def text(self, name: str) -> str | None:
        """That option's value."""
        return self.options[name].value if name in self.options else None

    def number(self, name: str) -> int | None:
        """That option's value, where it is a whole number."""
        return whole_number(self.text(name) or "")

    @property
    def nodes(self) -> int:
        """How many nodes, 1 where no option sets it."""
        return max(1, self.number("nodes") or 1)

    @property
    def tasks_per_node(self) -> int | None:
        """Tasks of a node; None where they are not the same on each."""
        if "ntasks" in self.options and ("ntasks" in self.own or "ntasks-per-node" not in self.options):
            tasks = self.number("ntasks")
            return tasks // self.nodes if tasks and tasks % self.nodes == 0 else None
        return self.number("ntasks-per-node") if "ntasks-per-node" in self.options else 1

    @property
    def is_torchrun(self) -> bool:
        """Whether each of its tasks starts the ranks of a node itself."""
        return any(re.search(r"torchrun|torch\.distributed\.(run|launch)", word) for word in self.call)

    @property
    def is_wrapped(self) -> bool:
        """Whether it is no MPI program: torchrun's, or one that reads TF_CONFIG."""
        return self.is_torchrun or any("TF_CONFIG" in word for word in self.call)

    def gpus_per_node(self, site: Site | None) -> int | None:
        """GPUs of a node; None where that cannot be known, 0 where none are requested."""
        if gres := self.text("gres"):
            counts = [re.fullmatch(r"(?:gres/)?gpu(?::[a-z]\w*)?(?::(\d{1,9}))?", part) for part in gres.split(",")]
            return sum(int(found[1] or 1) for found in counts if found)
        for name in ("gpus-per-node", "gpus", "gpus-per-task"):
            if found := re.fullmatch(r"(?:\w+:)?(\d{1,9})", self.text(name) or ""):
                times = (self.tasks_per_node or 0) if name == "gpus-per-task" else 1
                return int(found[1]) * times // (self.nodes if name == "gpus" else 1) or None
        if site is None:
            return None
        return 0 if site.gres else site.gpus


def read(text: str) -> JobScript:
    """The script, whatever its line ends."""
    lines = tuple(text.replace("\r\n", "\n").split("\n"))
    first = next((n for n, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"), len(lines) + 1)
    options = [
        option
        for number, line in enumerate(lines[: first - 1], 1)
        if SBATCH.match(line)
        for option in options_of(_words(line)[1:], number)
    ]
    shell = bash.read(text)
    commands = tuple(replace(command, words=_supervised(command.words)) for command in shell.commands)
    return JobScript(lines, tuple(options), first, replace(shell, commands=commands))


def training_steps(script: JobScript) -> tuple[Step, ...]:
    """The steps that start Python or a script; not those that copy files or look at the machine."""
    job = {option.name: option for option in script.options}
    steps = []
    for command in script.shell.commands:
        if program(command.words) == "srun" and TRAINS.search(" ".join(program_of(command.words))):
            own = {option.name: option for option in options_of(command.words[1:], command.line)}
            steps.append(
                Step(command.line, command.words, own, ChainMap(own, job))
            )  # not copied for each of many steps
    return tuple(steps)


def options_of(words: Sequence[str], line: int) -> list[Option]:
    """The options that come before the first word that is none (for srun: its program)."""
    return _split(words, line)[0]


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """srun's program and its arguments: the words after srun's own options."""
    return tuple(_split(words[1:], 0)[1])


def _split(words: Sequence[str], line: int) -> tuple[list[Option], list[str]]:
    rest, options = deque(words), []
    while rest and rest[0].startswith("-"):
        word = rest.popleft()
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = SHORT.get(word[:2], word[1:]), word[2:], word[2:]
        if not equals and name in VALUED and rest:
            value = rest.popleft()
        options.append(Option(line, name, value))
    return options, list(rest)


def _supervised(words: tuple[str, ...]) -> tuple[str, ...]:
    """The srun of `python -m hvdtrain supervise -- srun ...`; any other command as it is."""
    if words[1:4] == SUPERVISE and "--" in words[:-1]:
        return words[words.index("--") + 1 :]
    return words


def program(call: Sequence[str]) -> str:
    """The program's name without its folder."""
    return Path(call[0]).name


def _words(line: str) -> list[str]:
    """The words of an #SBATCH line as sbatch splits them, without their quotes; by spaces where a quote never ends."""
    # Python's shlex does the same, in a time that grows with the square of a word's length.
    text = line.partition(" #")[0]
    words, end = [], 0
    for found in WORDS.finditer(text):
        if text[end : found.start()].strip():
            return text.split()
        words.append(bash.unquoted(found[0]))
        end = found.end()
    return text.split() if text[end:].strip() else words
