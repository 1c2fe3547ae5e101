"""What a run leaves for `python -m hvdtrain supervise`, which decides outside of the ranks what comes next.

Each is a small file of its own with one writer, so that no rank waits for another.
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
"""The variable that names the folder, which every node sees. Where it is set, a supervisor queues the job again."""
Name = Literal["run", "lost", "error"]


@pydantic.dataclasses.dataclass(frozen=True)
class Report:
    """What a file of the folder holds. What nobody has reported is empty."""

    run: str = ""
    step: NonNegativeInt = 0
    ranks: NonNegativeInt = 0
    fewer: tuple[NonNegativeInt, ...] = ()
    rank: NonNegativeInt = 0
    host: str = ""
    why: str = ""
    step_id: str | None = None
    kind: str = ""
    code: int = 0
    named: bool = True
    near_limit: bool = False
    too_early: bool = False


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor decides what comes next."""
    return bool(environ.get(VARIABLE))


def write(environ: Mapping[str, str], name: Name, **values: Any) -> None:
    """`NAME.json` for the supervisor, if there is one; a disk that fails must not end the run."""
    if is_supervised(environ):
        with contextlib.suppress(OSError):
            files.write_before_exit(path(Path(environ[VARIABLE]), name), json.dumps(values))


def read(folder: Path, name: Name) -> Report:
    """The report that was written; an empty one where there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = files.read_json(path(folder, name), follow=False)
        return pydantic.TypeAdapter(Report).validate_python(found)
    return Report()


def path(folder: Path, name: Name) -> Path:
    """The file of that name."""
    return folder / f"{name}.json"
