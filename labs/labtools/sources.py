"""Both notebooks of each lab, made from its one source: `python -m labtools.sources`.

A source is a Python file in jupytext's percent format with two kinds of marks, which no notebook shows:

    # exercise: ...
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

The exercise has what stands behind `# exercise:`, the solution what stands between the other marks, and both have the
rest. nbgrader's marks are the same two.
"""

import re
import sys
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs

from hvdtrain.errors import LabError

LABS = Path(__file__).resolve().parents[1]
SOURCES = sorted((LABS / "sources").glob("*.py"), key=lambda source: int(source.stem.partition("-")[0]))
VERSIONS = ("exercise", "solution")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
INSTEAD = re.compile("^( *)# exercise: ?", re.IGNORECASE)


def text(source: Path, version: str) -> str:
    """The source as the exercise or the solution has it.

    Raises LabError, with file and line, where a mark is misspelt, or has no other one.
    """
    lines, begun = [], 0
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("###"):
            begun = _begun(source, number, line.strip(), begun)
        elif INSTEAD.match(line):
            lines += [INSTEAD.sub(r"\1", line).rstrip()] * (version == "exercise")
        elif not begun or version == "solution":
            lines.append(line)
    if begun:
        raise LabError(f"{source}:{begun}: {BEGIN} has no {END}")
    return "\n".join(lines) + "\n"


def _begun(source: Path, number: int, mark: str, begun: int) -> int:
    """The line in which the solution has begun behind this mark, or 0. `begun` is that before it."""
    if mark != (END if begun else BEGIN):
        expected = f"{END}, for the mark in line {begun}" if begun else BEGIN
        raise LabError(f"{source}:{number}: expected {expected}; got {mark}")
    return 0 if begun else number


def notebook(source: Path, version: str) -> nbformat.NotebookNode:
    """The exercise or the solution, without outputs. Raises LabError."""
    return jupytext.reads(text(source, version), "py:percent")


def path(source: Path, version: str) -> Path:
    """Where that notebook is: labs/1-exercise-NAME.ipynb of labs/sources/1-NAME.py."""
    number, _, name = source.stem.partition("-")
    return LABS / f"{number}-{version}-{name}.ipynb"


def make(source: Path) -> None:
    """Writes both notebooks. Cells that were there keep their ids. Raises LabError."""
    for version in VERSIONS:
        made, there = notebook(source, version), path(source, version)
        if there.exists():
            made = combine_inputs_with_outputs(made, jupytext.read(there))
        jupytext.write(made, there)


if __name__ == "__main__":
    try:
        for each in SOURCES:
            make(each)
    except LabError as error:
        sys.exit(str(error))
