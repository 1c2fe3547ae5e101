"""The last records of a JSON lines file of any length, and values of theirs that are what they should be."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain import files

BYTES, LINES = 1 << 20, 4000
"""At most so much is read of a file's end."""

Record = dict[str, Any]


def last_records(path: Path) -> list[Record]:
    """The records at the file's end, oldest first; lines that are none are left out. Raises OSError, and ValueError
    where it is no regular file."""
    with files.opened(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - BYTES))
        lines = file.read(BYTES).split(b"\n")
    whole_lines = lines[size > BYTES :][-LINES:]
    return [record for line in whole_lines if (record := _record(line)) is not None]


def last_of(path: Path, kind: str) -> Record:
    """The last record of that kind, be it far from the file's end; {} where there is none. Raises OSError, and
    ValueError where it is no regular file."""
    marks, after = [f'{{"kind":{space}"{kind}"'.encode() for space in ("", " ")], b""
    with files.opened(path) as file:
        end = file.seek(0, 2)
        while end > 0:
            begin = max(0, end - BYTES)
            file.seek(begin)
            part = file.read(end - begin) + after
            if (found := max(map(part.rfind, marks))) >= 0:
                return _record(part[found:].split(b"\n", 1)[0]) or {}
            end, after = begin, part[: len(marks[1])]
    return {}


def _record(line: bytes) -> Record | None:
    try:
        value = files.parse_json(line.decode()) if line else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def number(record: Mapping[str, Any], name: str) -> float | None:
    """That value where it is a finite number."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and abs(value) < 1e15 else None


def whole(record: Mapping[str, Any], name: str) -> int | None:
    """That value where it is a number from 0 on."""
    value = number(record, name)
    return int(value) if value is not None and value >= 0 else None


def text(record: Mapping[str, Any], name: str) -> str:
    """That value where it is a text, else ""."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def json_of(path: Path) -> Record:
    """What a small JSON file holds. Raises OSError, ValueError where that is no mapping."""
    value = files.read_json(path)
    if not isinstance(value, dict):
        raise ValueError("it holds no mapping")
    return value
