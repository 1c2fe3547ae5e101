"""`python -m hvdtrain doctor`: what was found, what was expected, and the commands that fix what is wrong."""

import dataclasses
import json
import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated

import pydantic
from rich.console import Console
from rich.text import Text

from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import counted
from hvdtrain.launch.display import shown
from hvdtrain.launch.topology import discover
from hvdtrain.tools.doctor import checks as _checks  # noqa: F401  the import adds the checks to those of `judge`
from hvdtrain.tools.doctor.findings import Check, Status, judge
from hvdtrain.tools.doctor.gather import Checking, gather_findings

MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "green", "ok"),
    "warn": ("!", "yellow", "to look at"),
    "fail": ("✗", "bold red", "to fix"),
    "skip": ("-", "dim", "left out"),
}
"""By status: the mark before a check, the mark's style, and the words behind the number of such checks."""


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Checks this machine, and inside a job step the step; exit code 1 where something is to be fixed."""

    json: Annotated[bool, Flag("the checks as JSON")] = False


def main(argv: Sequence[str]) -> int:
    """Prints the report on rank 0; returns 1 where a check fails. Raises TopologyError for a contradictory launcher."""
    from hvdtrain.core import flags

    options = flags.parse(Options, "python -m hvdtrain doctor", argv)
    started = time.monotonic()
    with shown(discover(os.environ), "looking at this machine") as show:
        findings = gather_findings(os.environ, Checking(show))
    if findings is None:
        return 0
    checks = judge(findings)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        at = findings.step.topology
        where = at.host if at.is_alone else f"{counted(at.size, 'rank')} of {at.launcher}, seen from {at.host}"
        # Open MPI gives its ranks terminals, even where their output is written to a file.
        console = Console(force_terminal=False if at.row.mpi == "openmpi" else None)
        report(checks, f"hvdtrain doctor: {where}, {time.monotonic() - started:.0f} s", console)
    return 1 if any(check.status == "fail" for check in checks) else 0


def report(checks: Sequence[Check], title: str, console: Console) -> None:
    """Prints the table, then every fix on a line that is never folded, then the number of checks of each status."""

    def show(text: Text) -> None:
        # A folded command cannot be copied, and rich would colour names and numbers.
        console.print(text, soft_wrap=True, highlight=False)

    show(Text(title, style="bold"))
    rows = list(_rows(checks))
    name_width = max(len(names) for _, names, _ in rows)
    for group, members in groupby(rows, key=lambda row: row[0]):
        show(Text(f"\n{group}", style="bold cyan"))
        for _, names, check in members:
            show(_line(names.ljust(name_width), check, console.width))
    worst_first = sorted((check for check in checks if check.fix), key=lambda check: check.status != "fail")
    for fix in dict.fromkeys(check.fix for check in worst_first):
        fixed = [check for check in worst_first if check.fix == fix]
        mark, style, _ = MARKS[fixed[0].status]
        show(Text(f"\n{mark} {', '.join(check.name for check in fixed)}", style=style))
        show(Text(f"    {fix}"))
    counts = [
        f"{sum(check.status == status for check in checks)} {words}"
        for status, (_, _, words) in MARKS.items()
        if any(check.status == status for check in checks)
    ]
    show(Text(f"\n{', '.join(counts)}", style="bold"))


def _rows(checks: Sequence[Check]) -> Iterator[tuple[str, str, Check]]:
    """The group, names and check of each line. Neighbours that are left out for the same reason share a line."""
    for _, group in groupby(checks, key=lambda check: (check.group, check.status, check.found)):
        members = list(group)
        if members[0].status == "skip":
            members, names = members[:1], ", ".join(check.name for check in members)
            yield members[0].group, names, members[0]
        else:
            yield from ((check.group, check.name, check) for check in members)


def _line(name: str, check: Check, width: int) -> Text:
    """One check, its text folded to the width of the terminal."""
    mark, style, _ = MARKS[check.status]
    room = max(20, width - len(name) - 4)
    dim = "dim" if check.status == "skip" else ""
    lines = [(line, dim) for line in textwrap.wrap(check.found, room)]
    if check.status in {"warn", "fail"} and check.expected:
        lines += [(line, "dim") for line in textwrap.wrap(f"expected: {check.expected}", room)]
    text = Text.assemble(" ", (mark, style), " ", (name, dim))
    for number, (line, line_style) in enumerate(lines):
        text.append("\n" + " " * (len(name) + 4) if number else " ").append(line, style=line_style)
    return text
