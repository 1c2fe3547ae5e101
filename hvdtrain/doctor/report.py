"""The checks as text a person reads: grouped, coloured on a terminal, and the cures whole below."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hvdtrain.doctor.facts import Check, Status

MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "skip": ("-", "dim"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}
PLURALS: dict[Status, str] = {"ok": "ok", "warn": "to look at", "fail": "to mend", "skip": "left out"}


def show(checks: Sequence[Check], title: str, console: Console) -> None:
    """Prints the table, then every cure on lines of its own that are never folded."""
    console.print(Text(title, style="bold"))
    name_width = max(len(check.name) for check in checks)
    for group, members in groupby(checks, key=lambda check: check.group):
        console.print()
        console.print(Text(group, style="bold cyan"))
        console.print(Padding(_table(list(members), name_width), (0, 0, 0, 1), expand=False))
    console.print()
    for check in sorted(checks, key=lambda check: check.status != "fail"):
        if check.cure:
            mark, style = MARKS[check.status]
            console.print(Text(f"{mark} {check.name}", style=style))
            # A folded command could not be copied.
            console.print(Text(f"    {check.cure}"), soft_wrap=True)
    counts = [
        f"{sum(check.status == status for check in checks)} {word}"
        for status, word in PLURALS.items()
        if any(check.status == status for check in checks)
    ]
    console.print(Text(", ".join(counts), style="bold"))


def _table(checks: Sequence[Check], name_width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=1)
    table.add_column(width=name_width, no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for check in checks:
        mark, style = MARKS[check.status]
        found = Text(check.found, style="dim" if check.status == "skip" else "")
        if check.status in {"warn", "fail"} and check.expected:
            found = Text.assemble(found, "\n", ("expected: " + check.expected, "dim"))
        table.add_row(Text(mark, style=style), Text(check.name, style="dim" if check.status == "skip" else ""), found)
    return table
