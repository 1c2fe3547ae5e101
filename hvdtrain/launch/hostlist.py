"""SLURM's short forms of hosts, as `nid[001-004,7],login1`, and of the tasks of each node, as `2(x3),1`."""

import re

from hvdtrain.errors import TopologyError
from hvdtrain.untrusted import quoted

MOST_HOSTS = 100_000
LONGEST_HOST = 255  # characters of a name
HOST = re.compile(r"\w[\w.-]*", re.ASCII)
TASKS = re.compile(r"(\d{1,6}(\(x\d{1,6}\))?(,(?=\d)|$))+", re.ASCII)


def expand(text: str) -> list[str]:
    """The names in the short form: `nid[001-002,7],login1` -> nid001, nid002, nid7, login1.

    Raises TopologyError where it is not that, or names more than `MOST_HOSTS`.
    """
    names: list[str] = []
    try:
        for group in re.findall(r"(?:[^][,]|\[[^][]*\])+|[][]", text):
            names += _names(group, MOST_HOSTS - len(names))
    except ValueError:
        raise TopologyError(
            f"a list of nodes must name at most {MOST_HOSTS} hosts, as nid[001-004], got {quoted(text)}."
        ) from None
    return names


def first(nodes: str) -> str:
    """The first host of a step's list. Raises TopologyError where there is none."""
    # Each pattern stops at the next bracket, so that a long list takes no more than its length in time.
    group = re.match(r"((?:[^][,]|\[[^][]*\])*)(?:,|\Z)", nodes)
    host = re.sub(r"\[([^][,-]*)(?:[,-][^][]*)?\]", r"\1", group[1] if group else "")
    if len(host) > LONGEST_HOST or not HOST.fullmatch(host):
        raise TopologyError(f"SLURM_STEP_NODELIST must name hosts, as node[01-04], got {quoted(nodes)}.")
    return host


def tasks_per_node(text: str) -> list[tuple[int, int]]:
    """The tasks of a node, and how many neighbouring nodes have as many: `2(x3),1` -> (2, 3), (1, 1). Raises
    ValueError."""
    # Not expanded: a short text, as 1(x999999) three hundred times, may name more hosts than fit into memory.
    if not TASKS.fullmatch(text):
        raise ValueError(text)
    return [(int(tasks), int(nodes or 1)) for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)]


def _names(group: str, most: int) -> list[str]:
    """The names of `nid[001-002,7]`. Raises ValueError where there are none, or more than `most`."""
    names = [""]
    for part in re.split(r"(\[[^][]*\])", group):
        choices = _numbers(part, most // len(names)) if part.startswith("[") else [part]
        names = [f"{name}{choice}" for name in names for choice in choices]
        if len(names[0]) > LONGEST_HOST:
            raise ValueError(group)
    if most < 1 or not HOST.fullmatch(names[0]):
        raise ValueError(group)
    return names


def _numbers(part: str, most: int) -> list[str]:
    """The numbers of `[001-004,7]`. Raises ValueError for anything else, or more than `most` numbers."""
    found: list[str] = []
    for span in part[1:-1].split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", span, re.ASCII)
        numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
        if not ends or not 0 < len(numbers) <= most - len(found):
            raise ValueError(part)
        found += [f"{number:0{len(ends[1])}}" for number in numbers]
    return found
