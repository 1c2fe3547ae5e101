"""The last records of a JSON lines file of any length, and values of theirs that are what they should be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain import files
from hvdtrain.tools.report import lines
from hvdtrain.tools.report.lines import mapping as mapping  # noqa: PLC0414 - theirs is ours

BYTES, LINES, FAR = 1 << 20, 4000, 1 << 26
"""At most so much is read of a file's end; of FAR bytes, for one record."""

Record = dict[str, Any]


def last_records(path: Path) -> list[Record]:
    """The records at the file's end, oldest first; lines that are none are left out. Raises OSError, and ValueError
    where it is no regular file."""
    with files.opened(path, follow=False) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - BYTES))
        lines = file.read(BYTES).split(b"\n")
    whole_lines = lines[size > BYTES :][-LINES:]
    return [record for line in whole_lines if (record := _record(line)) is not None]


def last_of(path: Path, kind: str) -> Record:
    """The last record of that kind, if it is within FAR of the file's end; else {}. Raises OSError, and
    ValueError where it is no regular file."""
    marks, after = [f'{{"kind":{space}"{kind}"'.encode() for space in ("", " ")], b""
    with files.opened(path, follow=False) as file:
        end = file.seek(0, 2)
        first = max(0, end - FAR)
        while end > first:
            begin = max(first, end - BYTES)
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
    return lines.number(record.get(name))


def whole(record: Mapping[str, Any], name: str) -> int | None:
    """That value where it is a whole number from 0 on."""
    return lines.whole(record.get(name))


def text(record: Mapping[str, Any], name: str) -> str:
    """That value where it is a text, else ""."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def json_of(path: Path) -> Record:
    """What a small JSON file holds. Raises OSError, ValueError where that is no mapping."""
    value = files.read_json(path, follow=False)
    if not isinstance(value, dict):
        raise ValueError("it holds no mapping")
    return value
