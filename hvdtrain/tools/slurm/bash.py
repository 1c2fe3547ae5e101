"""A script as bash reads it: its commands, its text without comments, and the line of a syntax error."""

import bisect
import itertools
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Tree

WRAPPERS = {"time", "exec", "nohup", "env", "command"}
EXPORTED = re.compile(r"\bexport\s+-f\s+([\w \t]+)")
QUOTES = {'"', "'", "\\"}
QUOTED = re.compile(r"""\\(.)|\$?"([^"\\]*(?:\\.[^"\\]*)*)"|\$?'([^']*)'""", re.DOTALL)
PARSE_SECONDS = 0.6  # of the CPU: the longest sound scripts take half of it, recovery from errors may take hours
BASH_SECONDS = 5
REFUSED = re.compile(
    r"^bash: (?:(?:line \d+: )?warning: (here-document) at )?line (\d{1,9}):? (?!`|warning)(.*)", re.MULTILINE
)
MOST_NESTED = 16  # commands in substitutions of one another
CHUNK = 2**16  # bytes
KINDS = {"command", "comment", "raw_string", "ansi_c_string", "heredoc_redirect", "redirected_statement"}
KINDS |= {"function_definition", "variable_assignment"}
MOST_OF_A_VALUE = 4000  # bytes of what a variable is set to, or of a function, that are kept
SILENT = {"echo", "printf"}
DEFAULT = re.compile(r"\$\{(\w+):=([^{}]{1,200})\}")


@dataclass(frozen=True)
class Command:
    """One simple command, wherever it stands: the words from its program on, without their quotes.

    The shell goes on while a command `in_background` runs, and one that `is_shell` takes its place.
    """

    line: int
    words: tuple[str, ...]
    in_background: bool = False
    is_shell: bool = False


@dataclass(frozen=True)
class Script:
    """What the grammar finds; `text` and `expanded` have a line for each line of the script.

    `text` has no comments; `expanded` lacks what the job's own shell fills nothing into, too: single quotes, quoted
    here-documents, escapes, and functions exported for another shell. `unread` is the line at which the grammar gave
    up; then there is nothing else.
    """

    commands: tuple[Command, ...] = ()
    text: str = ""
    expanded: str = ""
    comments: tuple[int, ...] = ()  # the lines in which one begins
    unread: int | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)


def read(text: str) -> Script:
    """The script, whatever its line ends and however damaged."""
    source = text.replace("\r\n", "\n").replace("\0", " ")  # at a zero byte the grammar hangs
    data = source.encode(errors="replace")
    tree, reached = _parsed(data)
    if tree is None:
        return Script(unread=data.count(b"\n", 0, reached) + 1)
    found: dict[str, list[Node]] = defaultdict(list)
    asides: set[int] = set()
    for node, is_aside in _nodes(tree.root_node):
        found[node.type].append(node)
        asides |= {node.id} if is_aside else set()
    exported = {name for match in EXPORTED.finditer(source) for name in match[1].split()}
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
    starts = [node.start_byte for node in elsewhere]
    ends = list(itertools.accumulate((node.end_byte for node in elsewhere), max))
    commands = (
        Command(node.start_point.row + 1, words, node.id in asides, "exec" in wrappers)
        for node in found["command"]
        if not _is_within(node.start_byte, starts, ends)
        for wrappers, words in [_words(data, node, behind.get(node.id, []))]
        if words
    )
    lines = tuple(node.start_point.row + 1 for node in found["comment"])
    functions = {_name(data, node): _head(data, node).partition("{")[2] for node in elsewhere}
    values = _values(bare, found["variable_assignment"], source) | _read_documents(data, found["redirected_statement"])
    text_of_job, filled_in = bare.decode(errors="replace"), expanded.decode(errors="replace")
    return Script(tuple(commands), text_of_job, filled_in, lines, values=values, functions=functions)


def syntax_errors(text: str) -> list[tuple[int, str]]:
    """The lines that bash itself refuses, and its messages; none where there is no bash. It runs nothing."""
    # The grammar does not know all that bash takes, so it does not decide.
    environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}  # and no BASH_ENV, which it would run
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
    """The tree, or None and how far the grammar came in its time."""
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
    except ValueError:  # that it was stopped
        return None, reached


def _nodes(root: "Node") -> "Iterator[tuple[Node, bool]]":
    """Those of KINDS, in the order of the script, and whether & puts them into the background."""
    # No query: its time grows with the square of the depth.
    stack = [(root, 0, False)]
    while stack:
        node, nested, is_aside = stack.pop()
        if node.type in KINDS:
            yield node, is_aside
            nested += node.type == "command"
        if nested <= MOST_NESTED:
            below = zip(node.children, (*node.children[1:], None), strict=False)
            stack += reversed([(it, nested, is_aside or bool(after and after.type == "&")) for it, after in below])


def _is_within(position: int, starts: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether it lies in one of these nodes, which are in order; `ends` is the furthest end up to each."""
    before = bisect.bisect_right(starts, position)
    return before > 0 and position < ends[before - 1]


def _values(data: bytes, assignments: "Iterable[Node]", source: str) -> dict[str, str]:
    """What variables are set to; none where a number has several values."""
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
    """What `read NAME` takes from a here-document."""
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
    """The command that is redirected, and its words behind the redirection: the grammar takes them for files of it."""
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
    """The variables and programs that only start another, and the words of the command behind them."""
    nodes = [*command.children_by_field_name("name"), *command.children_by_field_name("argument"), *behind]
    words = [unquoted(_text(data, node).replace("\\\n", "")) for node in nodes]
    starts = (i for i, word in enumerate(words) if not (word in WRAPPERS or re.match(r"[A-Za-z_]\w*=", word)))
    start = next(starts, len(words))
    return words[:start], tuple(words[start:])


def _text(data: bytes, node: "Node") -> str:
    return data[node.start_byte : node.end_byte].decode(errors="replace")


def _blanked(data: bytes, nodes: "Iterable[Node]") -> bytes:
    """The bytes with spaces in place of these nodes, but for their line ends."""
    out = bytearray(data)
    for node in nodes:
        part = slice(node.start_byte, node.end_byte)
        out[part] = re.sub(rb"[^\n]", b" ", data[part])
    return bytes(out)
