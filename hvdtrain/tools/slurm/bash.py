"""A script as bash reads it: its commands, its text without comments, and the line of a syntax error."""

import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
KINDS |= {"function_definition"}


@dataclass(frozen=True)
class Command:
    """One simple command, wherever it stands: the words from its program on, without their quotes."""

    line: int
    words: tuple[str, ...]


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


def read(text: str) -> Script:
    """The script, whatever its line ends and however damaged."""
    source = text.replace("\r\n", "\n").replace("\0", " ")  # at a zero byte the grammar hangs
    data = source.encode(errors="replace")
    tree, reached = _parsed(data)
    if tree is None:
        return Script(unread=data.count(b"\n", 0, reached) + 1)
    found: dict[str, list[Node]] = defaultdict(list)
    for node in _nodes(tree.root_node):
        found[node.type].append(node)
    exported = {name for match in EXPORTED.finditer(source) for name in match[1].split()}
    elsewhere = [node for node in found["function_definition"] if _name(data, node) in exported]
    behind: dict[int, list[Node]] = {}
    for statement in found["redirected_statement"]:
        command, late = _behind_redirections(statement)
        behind[command.id] = late
    bare = _blanked(data, found["comment"])
    bodies = _quoted_bodies(data, found["heredoc_redirect"])
    literal = [*found["raw_string"], *found["ansi_c_string"], *bodies, *elsewhere]
    expanded = re.sub(rb"\\[^\n]", b"  ", _blanked(bare, literal))
    commands = (
        Command(node.start_point.row + 1, words)
        for node in found["command"]
        if not any(it.start_byte <= node.start_byte < it.end_byte for it in elsewhere)
        and (words := _words(data, node, behind.get(node.id, [])))
    )
    lines = tuple(node.start_point.row + 1 for node in found["comment"])
    return Script(tuple(commands), bare.decode(errors="replace"), expanded.decode(errors="replace"), lines)


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


def _nodes(root: "Node") -> "Iterator[Node]":
    """Those of KINDS, in the order of the script."""
    # No query: its time grows with the square of the depth.
    stack = [(root, 0)]
    while stack:
        node, nested = stack.pop()
        if node.type in KINDS:
            yield node
            nested += node.type == "command"
        if nested <= MOST_NESTED:
            stack += [(child, nested) for child in reversed(node.children)]


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


def _words(data: bytes, command: "Node", behind: "list[Node]") -> tuple[str, ...]:
    """The words of the command, without variables and programs that only start another."""
    nodes = [*command.children_by_field_name("name"), *command.children_by_field_name("argument"), *behind]
    words = [unquoted(_text(data, node).replace("\\\n", "")) for node in nodes]
    starts = (i for i, word in enumerate(words) if not (word in WRAPPERS or re.match(r"[A-Za-z_]\w*=", word)))
    return tuple(words[next(starts, len(words)) :])


def _text(data: bytes, node: "Node") -> str:
    return data[node.start_byte : node.end_byte].decode(errors="replace")


def _blanked(data: bytes, nodes: "Iterable[Node]") -> bytes:
    """The bytes with spaces in place of these nodes, but for their line ends."""
    out = bytearray(data)
    for node in nodes:
        part = slice(node.start_byte, node.end_byte)
        out[part] = re.sub(rb"[^\n]", b" ", data[part])
    return bytes(out)
