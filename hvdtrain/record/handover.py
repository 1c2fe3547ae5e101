"""What a run reports to `python -m hvdtrain supervise`, which decides what is done once its ranks have ended.

Each report is a small file that one rank writes, so that no rank waits for another.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import NonNegativeInt

from hvdtrain import files

VARIABLE = "HVDTRAIN_OUTCOME"
"""The variable that names the folder of the reports, which every node sees. A supervisor sets it."""
Name = Literal["run", "lost", "error"]


@pydantic.dataclasses.dataclass(frozen=True)
class Report:
    """What one file of the folder holds. What was not reported is empty."""

    run: str = ""
    step: NonNegativeInt = 0
    ranks: NonNegativeInt = 0
    fewer: tuple[NonNegativeInt, ...] = ()
    rank: NonNegativeInt = 0
    host: str = ""
    why: str = ""
    step_id: str | None = None
    kind: str = ""  # the class of the error
    code: int = 0
    named: bool = True  # whether the error says what happened: another rank's end alone does not
    near_limit: bool = False  # whether a warning of the time limit stopped the run
    too_early: bool = False  # whether the warning came before the first training step


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor started this run."""
    return bool(environ.get(VARIABLE))


def write(environ: Mapping[str, str], name: Name, **values: Any) -> None:
    """Writes `NAME.json` for the supervisor, if there is one. A disk that fails does not end the run."""
    if is_supervised(environ):
        with contextlib.suppress(OSError):
            files.write_before_exit(path(Path(environ[VARIABLE]), name), json.dumps(values))


def read(folder: Path, name: Name) -> Report:
    """The report of that name; an empty one where there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = files.read_json(path(folder, name), follow=False)
        return pydantic.TypeAdapter(Report).validate_python(found)
    return Report()


def path(folder: Path, name: Name) -> Path:
    """The path of that report."""
    return folder / f"{name}.json"
