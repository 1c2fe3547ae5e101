"""A job script as SLURM and bash read it: its #SBATCH options and its commands, with their line numbers."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hvdtrain.tools.slurm import bash

SHORT = {
    "-A": "account",
    "-B": "extra-node-info",
    "-C": "constraint",
    "-D": "chdir",
    "-F": "nodefile",
    "-G": "gpus",
    "-J": "job-name",
    "-L": "licenses",
    "-M": "clusters",
    "-N": "nodes",
    "-S": "core-spec",
    "-T": "threads",
    "-a": "array",
    "-c": "cpus-per-task",
    "-d": "dependency",
    "-e": "error",
    "-i": "input",
    "-m": "distribution",
    "-n": "ntasks",
    "-o": "output",
    "-p": "partition",
    "-q": "qos",
    "-r": "relative",
    "-t": "time",
    "-w": "nodelist",
    "-x": "exclude",
}
ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks", "cpu_bind": "cpu-bind"}
# Long options whose value may be a word of its own; of any other the next word is the program.
VALUED = {*SHORT.values(), *ALIASES, *ALIASES.values()}
VALUED |= {"ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-tres", "threads-per-core", "hint"}
VALUED |= {
    "gres",
    "gpus-per-node",
    "gpus-per-task",
    "gpus-per-socket",
    "cpus-per-gpu",
    "gpu-bind",
    "cpu-bind",
    "signal",
}
VALUED |= {"mem", "mem-per-cpu", "mem-per-gpu", "mem-bind", "mpi", "export", "comment", "reservation", "open-mode"}
VALUED |= {"container-image", "container-mounts", "container-name", "container-workdir", "container-env", "container"}
VALUED |= {"gres-flags", "jobid", "het-group", "epilog", "prolog", "task-prolog", "task-epilog", "begin"}
VALUED |= {"mail-type", "mail-user", "switches", "network", "gpu-freq", "cpu-freq", "time-min", "tmp", "wckey"}
WORDS = re.compile(r"""(?:[^\s"'\\]+|\\.|"[^"\\]*(?:\\.[^"\\]*)*"|'[^']*')+""", re.DOTALL)
SUPERVISE = ("-m", "hvdtrain", "supervise")
SBATCH = re.compile(r"#SBATCH\s")
HETEROGENEOUS = re.compile(r"#SBATCH\s+(?:hetjob|packjob)\b")


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
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Option]:
        return {option.name: option for option in self.options}

    @property
    def is_heterogeneous(self) -> bool:
        """Whether the job has components, each of its own nodes and tasks."""
        return any(HETEROGENEOUS.match(line) for line in self.lines[: self.first - 1])


def read(text: str) -> JobScript:
    """The script, whatever its line ends."""
    lines = tuple(text.replace("\r\n", "\n").split("\n"))
    first = next((n for n, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"), len(lines) + 1)
    options = [
        option
        for number, line in enumerate(lines[: first - 1], 1)
        if SBATCH.match(line)
        for option in options_of(words_of(line)[1:], number)
    ]
    shell = bash.read(text)
    commands = tuple(replace(command, words=_supervised(command.words)) for command in shell.commands)
    return JobScript(lines, tuple(options), first, replace(shell, commands=commands))


def options_of(words: Sequence[str], line: int) -> list[Option]:
    """The options that come before the first word that is none (for srun: its program)."""
    return _split(words, line)[0]


def left_over(line: str) -> tuple[Option, list[str]] | None:
    """The last option of an #SBATCH line that has words behind its value, with these."""
    options, rest = _split(words_of(line)[1:], 0)
    return (options[-1], rest) if rest and options and options[-1].value else None


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """srun's program and its arguments: the words after srun's own options."""
    return tuple(_split(words[1:], 0)[1])


def _split(words: Sequence[str], line: int) -> tuple[list[Option], list[str]]:
    rest, options = deque(words), []
    while rest and rest[0].startswith("-"):
        word = rest.popleft()
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = ALIASES.get(name, name)
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
    return call[0].rpartition("/")[2]


def words_of(line: str) -> list[str]:
    """The words of an #SBATCH line as sbatch splits them, without their quotes; by spaces where a quote never ends."""
    # Python's shlex does the same, in a time that grows with the square of a word's length.
    text = re.split(r"\s#", line, maxsplit=1)[0]
    words, end = [], 0
    for found in WORDS.finditer(text):
        if text[end : found.start()].strip():
            return text.split()
        words.append(bash.unquoted(found[0]))
        end = found.end()
    return text.split() if text[end:].strip() else words
