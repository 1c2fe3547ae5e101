"""Where a class stands: `python -m labtools.progress FILE`, from lines that the checks append to a file of the class.

They do so where the environment variable HVDTRAIN_LAB_PROGRESS names that file, which the teacher makes, and nowhere
else. Nothing is sent anywhere. All learners may write into the file: what it says is not proved.
"""

import errno
import getpass
import json
import os
import stat
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain import files, untrusted
from hvdtrain.errors import LabError

VARIABLE = "HVDTRAIN_LAB_PROGRESS"
NAME, MISTAKE = 24, 160  # characters of a name, of a person or a gap, and of a mistake
LONGEST = 4096  # bytes of a line
LARGEST = 2**24  # bytes of the file
LABS, GAPS, LEARNERS = 20, 12, 200  # that are shown


class Checked(NamedTuple):
    """One check of a gap, such as "2 shard", and the mistake that it named; "" where the gap was right."""

    who: str
    lab: int
    gap: str
    mistake: str


def announce(environ: Mapping[str, str] = os.environ) -> None:
    """Prints to whom the checks report, where they do."""
    if path := environ.get(VARIABLE):
        print(f"Each check appends a line to {path}: your user name, the gap, and right or the mistake.")


def note(lab: int, gap: str, mistake: str, environ: Mapping[str, str] = os.environ) -> None:
    """Appends a line to the class's file, where there is one; prints why, where that fails."""
    path = environ.get(VARIABLE)
    if not path:
        return
    mistake = untrusted.text(mistake, MISTAKE)
    line = json.dumps({"who": _user(environ), "lab": lab, "gap": gap, "mistake": mistake})
    try:
        _append(Path(path), line.encode() + b"\n")
    except OSError as error:
        print(f"Your teacher does not see this check, as {VARIABLE} says {path}: {error.strerror}")


def _user(environ: Mapping[str, str]) -> str:
    try:
        return untrusted.text(environ.get("JUPYTERHUB_USER") or getpass.getuser(), NAME)
    except (KeyError, OSError):  # a user without a name
        return str(os.geteuid())


def _append(path: Path, line: bytes) -> None:
    """In one write, so that the lines of several learners do not mix. Creates nothing, and follows no link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EINVAL, "it is not a regular file with one name", str(path))
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Checked]:
    """The checks in the file; what is no line of a check is left out. Raises OSError, ValueError."""
    lines = files.read_bytes(path, LARGEST, follow=False).split(b"\n")
    return [checked for line in lines if (checked := _checked(line))]


def _checked(line: bytes) -> Checked | None:
    if len(line) > LONGEST:
        return None
    try:
        given = untrusted.mapping(files.parse_json(line.decode()))
    except ValueError:
        return None
    who, gap = (untrusted.text(given.get(name), NAME) for name in ("who", "gap"))
    lab = untrusted.whole(given.get("lab"))
    if not who or not gap or lab is None or "mistake" not in given:
        return None
    return Checked(who, lab, gap, untrusted.text(given["mistake"], MISTAKE))


def table(checks: Sequence[Checked]) -> str:
    """By lab: a row a learner, a column a gap, and below them which mistakes hold up how many."""
    labs = defaultdict(list)
    for each in checks:
        labs[each.lab].append(each)
    return "\n\n".join(_of_lab(lab, labs[lab]) for lab in sorted(labs)[:LABS]) or "No check has been run yet."


def _of_lab(lab: int, checks: Sequence[Checked]) -> str:
    gaps = sorted({each.gap for each in checks})[:GAPS]
    learners = sorted({each.who for each in checks})
    mistakes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in checks:
        mistakes[each.who, each.gap].append(each.mistake)
    lines = [f"{f'lab {lab}':{NAME}}" + "".join(f"  {gap:>8}" for gap in gaps)]
    for who in learners[:LEARNERS]:
        cells = [_cell(mistakes.get((who, gap), [])) for gap in gaps]
        lines.append(
            f"{who:{NAME}}" + "".join(f"  {cell:>{max(8, len(gap))}}" for cell, gap in zip(cells, gaps, strict=True))
        )
    if len(learners) > LEARNERS:
        lines.append(f"and {len(learners) - LEARNERS} others")
    return "\n".join([*lines, *(_summary(gap, [mistakes.get((who, gap), []) for who in learners]) for gap in gaps)])


def _cell(mistakes: Sequence[str]) -> str:
    """How a learner stands with a gap, from the mistakes of all checks of it."""
    if not mistakes:
        return "."
    return "right" if "" in mistakes else f"{len(mistakes)} wrong"


def _summary(gap: str, mistakes: Sequence[Sequence[str]]) -> str:
    right = sum("" in each for each in mistakes)
    now = Counter(each[-1].partition(":")[0] for each in mistakes if each and "" not in each)
    stuck = "; ".join(f"{count} x {mistake}" for mistake, count in now.most_common(3))
    return f"{gap}: {right} of {len(mistakes)} right" + (f"; {stuck}" if stuck else "")


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise LabError("usage: python -m labtools.progress FILE")
        print(table(read(Path(sys.argv[1]))))
    except (LabError, OSError, ValueError) as error:
        sys.exit(untrusted.one_line(error))
