"""What an edit is, and how a table of them is applied to a source tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import BuildError


@dataclass(frozen=True)
class Edit:
    """One replacement of plain text in one file of the source tree; with an empty pattern, a new file."""

    name: str
    file: str
    pattern: str
    replacement: str
    reason: str
    upstream: str = ""
    count: int = 1


def apply(root: Path, edits: Sequence[Edit]) -> None:
    """Makes every edit under root, in order.

    Raises BuildError, naming the edit, where its pattern does not occur as often as it says; files of the
    edits before it have then been written, so the tree is to be thrown away.
    """
    for edit in edits:
        path = root / edit.file
        text = path.read_text() if path.is_file() else ""
        found = text.count(edit.pattern)
        if found != edit.count:
            raise BuildError(
                f"edit {edit.name!r} expects its pattern {edit.count} time(s) in {edit.file}, found {found}: "
                "this is not the source the edits were written for; build the pinned version."
            )
        path.write_text(text.replace(edit.pattern, edit.replacement))
