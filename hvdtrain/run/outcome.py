"""What a run leaves for `python -m hvdtrain supervise`, which decides outside of the ranks what comes next.

Each is a small file of its own with one writer, so that no rank waits for another.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hvdtrain import files

VARIABLE = "HVDTRAIN_OUTCOME"
"""The folder, which every node sees; its presence says that somebody else queues the job again."""
Name = Literal["run", "lost", "error"]


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor decides what comes next."""
    return bool(environ.get(VARIABLE))


def write(environ: Mapping[str, str], name: Name, **values: Any) -> None:
    """`NAME.json` for the supervisor, if there is one; a disk that fails must not end the run."""
    if is_supervised(environ):
        with contextlib.suppress(OSError):
            files.write_before_exit(path(Path(environ[VARIABLE]), name), json.dumps(values))


def read(folder: Path, name: Name) -> dict[str, Any]:
    """What was written; {} where nothing was, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = files.read_json(path(folder, name))
        return found if isinstance(found, dict) else {}
    return {}


def path(folder: Path, name: Name) -> Path:
    """The file of that name."""
    return folder / f"{name}.json"
