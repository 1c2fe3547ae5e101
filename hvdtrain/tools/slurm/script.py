"""A job script as SLURM and bash read it: its #SBATCH options, its commands, and the line of a syntax error."""

import os
import re
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node, Tree

_LETTERS = """
    -A=account -B=extra-node-info -C=constraint -D=chdir -F=nodefile -G=gpus -J=job-name -L=licenses -M=clusters
    -N=nodes -S=core-spec -T=threads -a=array -c=cpus-per-task -d=dependency -e=error -i=input -m=distribution -n=ntasks
    -o=output -p=partition -q=qos -r=relative -t=time -w=nodelist -x=exclude
"""
_NAMES = """
    ntasks-per-core ntasks-per-gpu ntasks-per-socket ntasks-per-tres threads-per-core hint
    gres gpus-per-node gpus-per-task gpus-per-socket cpus-per-gpu gpu-bind cpu-bind signal
    mem mem-per-cpu mem-per-gpu mem-bind mpi export comment reservation open-mode
    container-image container-mounts container-name container-workdir container-env container
    gres-flags jobid het-group epilog prolog task-prolog task-epilog begin
    mail-type mail-user switches network gpu-freq cpu-freq time-min tmp wckey
"""
SHORT = dict(pair.split("=") for pair in _LETTERS.split())
ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks", "cpu_bind": "cpu-bind"}
# Long options whose value may be the next word; behind any other option, the next word is the program.
VALUED = {*SHORT.values(), *ALIASES, *ALIASES.values(), *_NAMES.split()}
WORDS = re.compile(r"""(?:[^\s"'\\]+|\\.|"[^"\\]*(?:\\.[^"\\]*)*"|'[^']*')+""", re.DOTALL)
SUPERVISE = ("-m", "hvdtrain", "supervise")
SBATCH = re.compile(r"#SBATCH\s")
HETEROGENEOUS = re.compile(r"#SBATCH\s+(?:hetjob|packjob)\b")
WRAPPERS = {"time", "exec", "nohup", "env", "command"}
EXPORTED = re.compile(r"\bexport\s+-f\s+([\w \t]+)")
QUOTES = {'"', "'", "\\"}
QUOTED = re.compile(r"""\\(.)|\$?"([^"\\]*(?:\\.[^"\\]*)*)"|\$?'([^']*)'""", re.DOTALL)
PARSE_SECONDS = 0.6  # of CPU time: the longest scripts without errors take half of it, those with errors hours
BASH_SECONDS = 5
REFUSED = re.compile(
    r"^bash: (?:(?:line \d+: )?warning: (here-document) at )?line (\d{1,9}):? (?!`|warning)(.*)", re.MULTILINE
)
MOST_NESTED = 16  # commands in substitutions of one another
CHUNK = 2**16  # bytes
KINDS = {"command", "comment", "raw_string", "ansi_c_string", "heredoc_redirect", "redirected_statement"}
KINDS |= {"function_definition", "variable_assignment"}
MOST_OF_A_VALUE = 4000  # bytes that are kept of a variable's value, or of a function
SILENT = {"echo", "printf"}
DEFAULT = re.compile(r"\$\{(\w+):=([^{}]{1,200})\}")


@dataclass(frozen=True)
class Option:
    """One option of sbatch or srun, by its long name."""

    line: int
    name: str
    value: str


@dataclass(frozen=True)
class Command:
    """One simple command, wherever it stands: the words from its program on, without their quotes.

    The shell does not wait for a command `in_background`; one that `is_shell` replaces the shell, as `exec` does.
    """

    line: int
    words: tuple[str, ...]
    in_background: bool = False
    is_shell: bool = False


@dataclass(frozen=True)
class JobScript:
    """The options of a job script, and what the grammar of bash finds in it; `text` and `expanded` have a line for each
    of its lines."""

    lines: tuple[str, ...]
    options: tuple[Option, ...]  # of #SBATCH lines that count
    first: int  # the line of the first command, behind which SLURM reads no #SBATCH
    commands: tuple[Command, ...] = ()
    text: str = ""
    """The script without its comments."""
    expanded: str = ""
    """The parts of `text` in which the job's shell fills in variables: no single quotes, quoted here-documents or
    escapes, and no functions that are exported for another shell."""
    comments: tuple[int, ...] = ()
    """The lines in which a comment begins."""
    unread: int | None = None
    """The line at which the grammar gave up; then it has found nothing."""
    values: Mapping[str, str] = field(default_factory=dict)
    """What the script's variables are set to."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """The bodies of the functions that the script exports, by name."""

    @cached_property
    def by_name(self) -> dict[str, Option]:
        """The last option of each name."""
        return {option.name: option for option in self.options}


def read(text: str) -> JobScript:
    """The script, with any line ends and however damaged."""
    lines = tuple(text.replace("\r\n", "\n").split("\n"))
    first = next((n for n, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"), len(lines) + 1)
    options = [
        option
        for number, line in enumerate(lines[: first - 1], 1)
        if SBATCH.match(line)
        for option in split(words_of(line)[1:], number)[0]
    ]
    return JobScript(lines, tuple(options), first, **_read_shell(text))


def program_of(words: Sequence[str]) -> tuple[str, ...]:
    """The program that srun starts and its arguments: the words after srun's options."""
    return tuple(split(words[1:])[1])


def split(words: Sequence[str], line: int = 0) -> tuple[list[Option], list[str]]:
    """The options before the first word that is none, and the words from there, which for srun are its program."""
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


def program(call: Sequence[str]) -> str:
    """The program's name without its folder."""
    return call[0].rpartition("/")[2]


def words_of(line: str) -> list[str]:
    """The words of an #SBATCH line as sbatch splits them, without their quotes; split at spaces where a quote has no
    end."""
    # The time of Python's shlex would grow with the square of a word's length.
    text = re.split(r"\s#", line, maxsplit=1)[0]
    words, end = [], 0
    for found in WORDS.finditer(text):
        if text[end : found.start()].strip():
            return text.split()
        words.append(unquoted(found[0]))
        end = found.end()
    return text.split() if text[end:].strip() else words


def _read_shell(text: str) -> dict[str, Any]:
    """What bash does with the script, by the fields of a JobScript."""
    source = text.replace("\r\n", "\n").replace("\0", " ")  # at a zero byte the grammar hangs
    data = source.encode(errors="replace")
    tree, reached = _parsed(data)
    if tree is None:
        return {"unread": data.count(b"\n", 0, reached) + 1}
    exported = {name for match in EXPORTED.finditer(source) for name in match[1].split()}
    found: dict[str, list[Node]] = defaultdict(list)
    asides, inside = set[int](), set[int]()
    for node, is_aside, is_inside in _nodes(data, tree.root_node, exported):
        found[node.type].append(node)
        asides |= {node.id} if is_aside else set()
        inside |= {node.id} if is_inside else set()
    elsewhere = [node for node in found["function_definition"] if _name(data, node) in exported]
    behind: dict[int, list[Node]] = {}
    for statement in found["redirected_statement"]:
        command, late = _behind_redirections(statement)
        behind[command.id] = late
    bare = _blanked(data, found["comment"])
    bodies = _quoted_bodies(data, found["heredoc_redirect"])
    printed = [node for node in found["command"] if _name(data, node) in SILENT]
    literal = [*found["raw_string"], *found["ansi_c_string"], *bodies, *elsewhere, *printed]
    expanded = re.sub(rb"\\[^\n]", b"  ", _blanked(bare, literal))
    commands = tuple(
        Command(node.start_point.row + 1, words, node.id in asides, "exec" in wrappers)
        for node in found["command"]
        if node.id not in inside
        for wrappers, words in [_words(data, node, behind.get(node.id, []))]
        if words
    )
    lines = tuple(node.start_point.row + 1 for node in found["comment"])
    functions = {_name(data, node): _head(data, node).partition("{")[2] for node in elsewhere}
    values = _values(bare, found["variable_assignment"], source) | _read_documents(data, found["redirected_statement"])
    texts = {"text": bare.decode(errors="replace"), "expanded": expanded.decode(errors="replace")}
    return {**texts, "commands": commands, "comments": lines, "values": values, "functions": functions}


def syntax_errors(text: str) -> list[tuple[int, str]]:
    """The lines that bash refuses, and its messages; none where there is no bash. Nothing of the script is run."""
    # Bash decides, as the grammar does not know all of its syntax.
    environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}  # no BASH_ENV: bash would run that file
    source = text.replace("\r\n", "\n").encode(errors="replace")
    try:
        done = subprocess.run(
            ["bash", "-n"], input=source, env=environ, capture_output=True, timeout=BASH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    refused = REFUSED.findall(done.stderr.decode(errors="replace"))
    return [(int(line), f"{document} {message}".lstrip()) for document, line, message in refused]


def unquoted(word: str) -> str:
    """The word without its quotes and escapes."""
    return QUOTED.sub(_inside, word) if QUOTES & set(word) else word


def _inside(quoted: re.Match[str]) -> str:
    escaped, double, single = quoted.groups()
    if double is not None:
        return re.sub(r'\\(["\\])', r"\1", double)
    return escaped or single


def _parsed(data: bytes) -> "tuple[Tree | None, int]":
    """The syntax tree; None, and the byte that the grammar reached, where it takes too long."""
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    reached, stop = 0, time.thread_time() + PARSE_SECONDS

    def is_late(offset: int, _: bool) -> bool:
        nonlocal reached
        reached = offset
        return time.thread_time() > stop

    parser = Parser(Language(tree_sitter_bash.language()))
    try:
        return parser.parse(lambda offset, _: data[offset : offset + CHUNK], progress_callback=is_late), 0
    except ValueError:  # it was stopped
        return None, reached


def _nodes(data: bytes, root: "Node", exported: Container[str]) -> "Iterator[tuple[Node, bool, bool]]":
    """The nodes of KINDS, in the order of the script. For each, whether & puts it into the background, and whether it
    is in an exported function."""
    # No query: its time grows with the square of the depth.
    stack = [(root, 0, False, False)]
    while stack:
        node, nested, is_aside, is_inside = stack.pop()
        if node.type in KINDS:
            yield node, is_aside, is_inside
            nested += node.type == "command"
            is_inside |= node.type == "function_definition" and _name(data, node) in exported
        if nested <= MOST_NESTED:
            below = zip(node.children, (*node.children[1:], None), strict=False)
            stack += reversed(
                [(it, nested, is_aside or bool(after and after.type == "&"), is_inside) for it, after in below]
            )


def _values(data: bytes, assignments: "Iterable[Node]", source: str) -> dict[str, str]:
    """The values of variables; none for a number that is set more than once."""
    values = {found[1]: unquoted(found[2]) for found in DEFAULT.finditer(source)}
    changed = set()
    for node in assignments:
        name, value = _name(data, node), node.child_by_field_name("value")
        text = _head(data, value).replace("\\\n", " ") if value else ""
        text = text.strip("()") if value and value.type == "array" else unquoted(text)
        if any(child.type == "+=" for child in node.children):
            text = f"{values.get(name, '')} {text}"[:MOST_OF_A_VALUE]
        elif name in values and text != values[name] and text.isdecimal():
            changed.add(name)
        values[name] = text
    return {name: value for name, value in values.items() if name not in changed}


def _read_documents(data: bytes, statements: "Iterable[Node]") -> dict[str, str]:
    """The values that `read NAME` takes from here-documents."""
    values = {}
    for statement in statements:
        command = statement.children[0]
        parts = {node.type: node for redirect in statement.children[1:2] for node in redirect.children}
        arguments = command.children_by_field_name("argument")
        if _name(data, command) == "read" and arguments and "heredoc_body" in parts:
            values[_text(data, arguments[-1])] = _head(data, parts["heredoc_body"])
    return values


def _head(data: bytes, node: "Node") -> str:
    return data[node.start_byte : min(node.end_byte, node.start_byte + MOST_OF_A_VALUE)].decode(errors="replace")


def _name(data: bytes, function: "Node") -> str:
    name = function.child_by_field_name("name")
    return _text(data, name) if name else ""


def _behind_redirections(statement: "Node") -> "tuple[Node, list[Node]]":
    """The redirected command, and its words behind the redirection, which the grammar takes for files."""
    command = statement.children[0]
    while command.type in {"pipeline", "list", "negated_command"}:
        command = command.children[-1]
    redirects = statement.children_by_field_name("redirect")
    words = [node for redirect in redirects for node in redirect.children_by_field_name("destination")[1:]]
    return command, words + [node for redirect in redirects for node in redirect.children_by_field_name("argument")]


def _quoted_bodies(data: bytes, documents: "Iterable[Node]") -> "Iterator[Node]":
    for document in documents:
        parts = {node.type: node for node in document.children}
        if {"heredoc_start", "heredoc_body"} <= parts.keys() and re.search(
            r"[\\'\"]", _text(data, parts["heredoc_start"])
        ):
            yield parts["heredoc_body"]


def _words(data: bytes, command: "Node", behind: "list[Node]") -> tuple[list[str], tuple[str, ...]]:
    """A command's variables and the programs that only start another one, and the words behind them; of
    `python -m hvdtrain supervise -- srun ...` the `srun ...`."""
    nodes = [*command.children_by_field_name("name"), *command.children_by_field_name("argument"), *behind]
    words = [unquoted(_text(data, node).replace("\\\n", "")) for node in nodes]
    start = start_of(words)
    if tuple(words[start + 1 : start + 4]) == SUPERVISE and "--" in words[start:-1]:
        return words[:start], tuple(words[words.index("--", start) + 1 :])
    return words[:start], tuple(words[start:])


def start_of(words: Sequence[str]) -> int:
    """The index of the program, behind variables and programs that only start another one."""
    starts = (i for i, word in enumerate(words) if not (word in WRAPPERS or re.match(r"[A-Za-z_]\w*=", word)))
    return next(starts, len(words))


def _text(data: bytes, node: "Node") -> str:
    return data[node.start_byte : node.end_byte].decode(errors="replace")


def _blanked(data: bytes, nodes: "Iterable[Node]") -> bytes:
    """The bytes with spaces in place of these nodes; line ends stay."""
    out = bytearray(data)
    for node in nodes:
        part = slice(node.start_byte, node.end_byte)
        out[part] = re.sub(rb"[^\n]", b" ", data[part])
    return bytes(out)
