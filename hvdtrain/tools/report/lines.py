"""Records of a JSON lines file that may be damaged, in bounded memory; and of what they hold, numbers and texts."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pydantic_core

from hvdtrain import files
from hvdtrain.untrusted import printable

CHUNK = 1 << 20
LONGEST_LINE = 1 << 20
MOST_BYTES = 1 << 30
LONGEST_TEXT = 500
HIGHEST = 1e15
"""Of a number; whatever a run counts or measures is far below."""

Record = dict[str, Any]


class Lines:
    """The records of a JSON lines file, some thousand at a time; then, what of it could not be read.

    Lines that are no JSON object are counted, not returned. Raises OSError, ValueError for what is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = self.damaged = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[list[Record]]:
        with files.opened(self._path, follow=False) as file:
            for lines in self._batches(file):
                records = [record for record in map(_parsed, lines) if record is not None]
                self.count += len(lines)
                self.damaged += len(lines) - len(records)
                yield records

    def complaint(self) -> str:
        """One line on what was left out; "" where that is nothing."""
        cut = f"{self._path.name} has more than {MOST_BYTES >> 30} GiB: the rest is left out" if self.is_cut else ""
        lines = f"{self.count:,} lines" if self.count != 1 else "1 line"
        damaged = f"{self._path.name}: {self.damaged:,} of {lines} cannot be read" if self.damaged else ""
        return "; ".join(text for text in (damaged, cut) if text)

    def _batches(self, file: IO[bytes]) -> Iterator[list[bytes]]:
        """Whole lines; of one that is too long, an empty one in its place."""
        rest, read = b"", 0
        while chunk := file.read(CHUNK):
            read += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield [line for line in lines if line]
            if len(rest) > LONGEST_LINE:
                rest = b"\0"  # no JSON, and short
            if read >= MOST_BYTES:
                self.is_cut = True
                return
        if rest:
            yield [rest]


def _parsed(line: bytes) -> Record | None:
    try:
        value = pydantic_core.from_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def number(value: object, low: float = -HIGHEST, high: float = HIGHEST) -> float | None:
    """The number, where it is one in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return None
    return float(value)


def whole(value: object, low: int = 0) -> int | None:
    """The whole number, where it is one from `low` on."""
    found = number(value, low)
    return None if found is None or not found.is_integer() else int(found)


def seconds(value: object) -> float | None:
    """Of a clock that began with a process, or what took so long."""
    return number(value, 0, 1e9)


def unix_time(value: object) -> float | None:
    """Seconds since 1970, of this century."""
    return number(value, 1e9, 1e10)


def text(value: object, most: int = LONGEST_TEXT) -> str:
    """One printable line; "" where it is neither text nor number."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    return printable(" ".join(str(value)[: 4 * most].split()), most) if isinstance(value, str | int | float) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """The mapping; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def items(value: object, most: int) -> list[Any]:
    """At most so many items of a list; none where it is no list."""
    return value[:most] if isinstance(value, list) else []
