"""The checks as text a person reads: grouped, coloured on a terminal, and the fixes whole below."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from hvdtrain.tools.doctor.findings import Check, Status

MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "skip": ("-", "dim"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}
PLURALS: dict[Status, str] = {"ok": "ok", "warn": "to look at", "fail": "to fix", "skip": "left out"}


def show(checks: Sequence[Check], title: str, console: Console) -> None:
    """Prints the table, then every fix on lines of its own that are never folded, then how many there are of each."""
    _print(console, Text(title, style="bold"))
    rows = list(_rows(checks))
    name_width = max(len(names) for _, names, _ in rows)
    for group, members in groupby(rows, key=lambda row: row[0]):
        _print(console, Text(f"\n{group}", style="bold cyan"))
        for _, names, check in members:
            _print(console, _line(names.ljust(name_width), check, console.width))
    worst_first = sorted((check for check in checks if check.fix), key=lambda check: check.status != "fail")
    for fix in dict.fromkeys(check.fix for check in worst_first):
        fixed = [check for check in worst_first if check.fix == fix]
        mark, style = MARKS[fixed[0].status]
        _print(console, Text(f"\n{mark} {', '.join(check.name for check in fixed)}", style=style))
        _print(console, Text(f"    {fix}"))
    counts = [
        f"{sum(check.status == status for check in checks)} {plural}"
        for status, plural in PLURALS.items()
        if any(check.status == status for check in checks)
    ]
    _print(console, Text(f"\n{', '.join(counts)}", style="bold"))


def _rows(checks: Sequence[Check]) -> Iterator[tuple[str, str, Check]]:
    """Group, names and check of each line: neighbours that are left out for the same reason share one."""
    for _, group in groupby(checks, key=lambda check: (check.group, check.status, check.found)):
        members = list(group)
        if members[0].status == "skip":
            members, names = members[:1], ", ".join(check.name for check in members)
            yield members[0].group, names, members[0]
        else:
            yield from ((check.group, check.name, check) for check in members)


def _line(name: str, check: Check, width: int) -> Text:
    """One check, its text folded to the width of the terminal."""
    mark, style = MARKS[check.status]
    room = max(20, width - len(name) - 4)
    dim = "dim" if check.status == "skip" else ""
    lines = [(line, dim) for line in textwrap.wrap(check.found, room)]
    if check.status in {"warn", "fail"} and check.expected:
        lines += [(line, "dim") for line in textwrap.wrap(f"expected: {check.expected}", room)]
    text = Text.assemble(" ", (mark, style), " ", (name, dim))
    for number, (line, line_style) in enumerate(lines):
        text.append("\n" + " " * (len(name) + 4) if number else " ").append(line, style=line_style)
    return text


def _print(console: Console, text: Text) -> None:
    # A folded command could not be copied; and what rich takes for a name or number it would colour.
    console.print(text, soft_wrap=True, highlight=False)
