"""A job script as SLURM and bash read it: its #SBATCH options and its commands, with their line numbers."""

import bisect
import functools
import itertools
import re
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.sites import Site
from hvdtrain.untrusted import whole_number

SHORT = {
    "-A": "account",
    "-C": "constraint",
    "-G": "gpus",
    "-J": "job-name",
    "-N": "nodes",
    "-c": "cpus-per-task",
    "-e": "error",
    "-m": "distribution",
    "-n": "ntasks",
    "-o": "output",
    "-p": "partition",
    "-q": "qos",
    "-t": "time",
    "-w": "nodelist",
}
# Long options whose value may be a word of its own; of any other the next word is the program.
VALUED = {*SHORT.values(), "ntasks-per-node", "gres", "mem", "mpi", "gpus-per-node", "gpus-per-task", "cpu-bind"}
KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "time", "exec", "nohup", "env", "command", "{"}
TRAINS = re.compile(r"\b(?:python|torchrun|hvdtrain)|\.(?:py|sh)\b|\$@")
# In this order: an escape, a here-document's opening, both kinds of quotes, a comment.
TOKEN = re.compile(
    r"""(?P<escape>\\.)|(?P<here>(?<!<)<<-?[ \t]*(?P<q>["']?)(?P<end>[A-Za-z_]\w*)(?P=q))
    |(?P<double>"[^"\\]*(?:\\.[^"\\]*)*")|(?P<single>'[^']*')|(?P<comment>(?<!\S)\#[^\n]*)""",
    re.DOTALL | re.VERBOSE,
)
# The same, and where a statement ends: at the end of a line outside of all these, or, in a quote that is never closed,
# with the script. Read once from the first character to the last, so that it takes as long as the script.
STOP = re.compile(rf"{TOKEN.pattern}|(?P<stop>\n)|(?P<open>[\"'])", TOKEN.flags)
OPERATORS = ";&|()<>"
PART = re.compile(r"""\\.|"[^"\\]*(?:\\.[^"\\]*)*"|'[^']*'""", re.DOTALL)
WORD = r"""(?:[^\s"'\\%s]+|\\.|"[^"\\]*(?:\\.[^"\\]*)*"|'[^']*')+"""
WORDS = re.compile(WORD % "", re.DOTALL)
WORDS_AND_OPERATORS = re.compile(f"[{OPERATORS}]+|{WORD % OPERATORS}", re.DOTALL)
QUOTES = {'"', "'", "\\"}


@dataclass(frozen=True)
class Option:
    """One option of sbatch or srun, by its long name."""

    line: int
    name: str
    value: str


@dataclass(frozen=True)
class Statement:
    """A command line with what it goes on to: `text` without comments, `calls` the words of each program it starts."""

    line: int
    text: str
    calls: tuple[tuple[str, ...], ...]

    @functools.cached_property
    def expanded(self) -> str:
        """The text with what the job's own shell fills nothing into blanked: single quotes and escapes."""
        return TOKEN.sub(_blanked, self.text)

    def line_of(self, position: int) -> int:
        """The line of the script in which that character of the text stands."""
        return self.line + bisect.bisect_left(self._line_ends, position)

    @functools.cached_property
    def _line_ends(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.text)]


@dataclass(frozen=True)
class JobScript:
    """What a job script says."""

    lines: tuple[str, ...]
    options: tuple[Option, ...]  # of #SBATCH lines that count
    late: tuple[int, ...]  # lines of #SBATCH after the first command, which do not
    statements: tuple[Statement, ...]

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
        """What that option says."""
        return self.options[name].value if name in self.options else None

    def number(self, name: str) -> int | None:
        """What that option says, where it is a whole number."""
        return whole_number(self.text(name) or "")

    @property
    def nodes(self) -> int:
        """How many nodes, 1 where nothing is said."""
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
        """GPUs of a node; None where that cannot be known, 0 where none are asked for."""
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
    lines = tuple(text.splitlines())
    statements = tuple(_statements(lines))
    first = statements[0].line if statements else len(lines) + 1
    numbers = [number for number, line in enumerate(lines, 1) if re.match(r"#SBATCH\s", line)]
    options = [option for n in numbers if n < first for option in options_of(_words(lines[n - 1])[1:], n)]
    return JobScript(lines, tuple(options), tuple(n for n in numbers if n > first), statements)


def training_steps(script: JobScript) -> tuple[Step, ...]:
    """The steps that start Python or a script; not those that copy files or look at the machine."""
    job = {option.name: option for option in script.options}
    steps = []
    for statement in script.statements:
        for call in statement.calls:
            if program(call) == "srun" and TRAINS.search(" ".join(program_of(call))):
                own = {option.name: option for option in options_of(call[1:], statement.line)}
                steps.append(Step(statement.line, call, own, ChainMap(own, job)))  # not copied for each of many steps
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


def _statements(lines: Sequence[str]) -> Iterator[Statement]:
    text = "\n".join(lines)
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    number = 0
    while number < len(lines):
        if lines[number].lstrip()[:1] in {"", "#"}:
            number += 1
            continue
        end = _end(text, starts[number])
        bare = text[starts[number] : end]
        if "#" in bare:
            bare = TOKEN.sub(lambda token: "" if token["comment"] else token[0], bare)
        yield Statement(number + 1, bare, tuple(_calls(bare)))
        number = bisect.bisect(starts, end)
        for token in TOKEN.finditer(bare) if "<<" in bare else ():
            if token["here"]:
                number = _after(token["end"], lines, number)


def _end(text: str, start: int) -> int:
    """Where the statement ends that starts there: a quote or a backslash joins the next line."""
    for token in STOP.finditer(text, start):
        if token["stop"]:
            return token.start()
        if token["open"]:
            break
    return len(text)


def _after(end: str, lines: Sequence[str], number: int) -> int:
    """The line after the here-document's end."""
    while number < len(lines) and lines[number].strip() != end:
        number += 1
    return number + 1


def _calls(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each simple command, from its program on."""
    call: list[str] = []
    to_file = False
    for word in [*_split_words(text.replace("\\\n", " "), WORDS_AND_OPERATORS), ";"]:
        if to_file:
            to_file = False
        elif word.strip("<>&|") == "" and set(word) & set("<>"):
            to_file = True
        elif word and not word.strip(OPERATORS):
            if call:
                yield tuple(call)
            call = []
        elif call or not (word in KEYWORDS or re.match(r"[A-Za-z_]\w*=", word)):
            call.append(word)


def program(call: Sequence[str]) -> str:
    """The program's name without its folder."""
    return Path(call[0]).name


def _words(line: str) -> list[str]:
    return _split_words(line.partition(" #")[0])


def _split_words(text: str, pattern: re.Pattern[str] = WORDS) -> list[str]:
    """The words as a shell would split them, without their quotes; by spaces alone where a quote never ends."""
    # Python's shlex does the same, in a time that grows with the square of a word's length.
    words, end = [], 0
    for found in pattern.finditer(text):
        if text[end : found.start()].strip():
            return text.split()
        words.append(PART.sub(_unquoted, found[0]) if QUOTES & set(found[0]) else found[0])
        end = found.end()
    return text.split() if text[end:].strip() else words


def _unquoted(part: re.Match[str]) -> str:
    if part[0].startswith('"'):
        return re.sub(r'\\(["\\])', r"\1", part[0][1:-1])
    return part[0][1:-1] if part[0].startswith("'") else part[0][1:]


def _blanked(token: re.Match[str]) -> str:
    if token["double"]:
        return re.sub(r"\\[^\n]", "  ", token[0])
    return re.sub(r"[^\n]", " ", token[0]) if token["single"] or token["escape"] else token[0]
