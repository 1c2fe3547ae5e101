"""Values that others wrote, such as arguments and files: read within bounds, printed without control characters."""

import math
import re
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 80  # characters of a value in a message
LONGEST_MESSAGE = 2000
HIGHEST = 1e15
"""The highest number that a file may hold. All that a run counts or measures is far below it."""

SECRET = r"(?:token(?!i[sz]|[_-]dtype|s[\s\0=:]+\d+(?![^\s\0]))|key|passw|secret|credential)[\w.-]{0,40}"  # noqa: S105 - names, not of how many tokens
_SECRET = re.compile(
    rf"(?i)({SECRET}[\"']?\s*[=:]\s*|(?<![^\s\0])-[\w.-]{{0,40}}?{SECRET}[\s\0]+(?!--?[a-z])"
    r"|://[^/\s:@\0]{0,99}:(?=[^/\s\0]{1,999}@))[^\0]+"
)


class _Short(reprlib.Repr):
    """Represents any value within one line, also a nested or endless list and a very long number."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = LONGEST
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 4 * 64 else f"a number of some {int(x.bit_length() * 0.30103) + 1} digits"


_SHORT = _Short()


def quoted(value: object) -> str:
    """The value as a message quotes it: like `repr(value)`, but printable and of about LONGEST characters at most."""
    text = printable(_SHORT.repr(value), LONGEST_MESSAGE)
    return text if len(text) <= LONGEST + 20 else _cut(text, LONGEST)


def printable(text: str, most: int = LONGEST) -> str:
    """The text with control characters as escapes (`\\x1b`), and without its middle if it is longer than `most`."""
    text = _cut(text, most)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(value: object, most: int = LONGEST_MESSAGE) -> str:
    """The message of an error, or the content of a file, as one printable line."""
    return printable(" ".join(str(value).split()), most)


def redacted(text: str) -> str:
    """The text with *** in place of each secret, which is known by the name before it.

    The text is a line, or the words of a command with NUL between them: then a secret ends with its word.
    """
    return _SECRET.sub(r"\1***", text)


def without_secrets(value: Any, name: str = "") -> Any:
    """The value with *** in place of secrets, to any depth. A name tells what is secret; a number `key` is not."""
    kind = r"passw|secret|credential" if isinstance(value, int | float) else SECRET
    if name and value is not None and re.search(kind, name):
        return "***"
    if isinstance(value, Mapping):
        return {key: without_secrets(each, str(key).lower()) for key, each in value.items()}
    return [without_secrets(each) for each in value] if isinstance(value, list | tuple) else value


def program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module like `python -m`, but never imports from the current folder."""
    path = f"import sys; sys.path[:] = [*filter(None, sys.path), {str(Path(__file__).parents[1])!r}]"
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"{path}; {run}", *arguments]


def whole_number(text: str) -> int | None:
    """The number that a text of up to 18 digits stands for; None for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def number(value: object, low: float = -HIGHEST, high: float = HIGHEST) -> float | None:
    """The value if it is a number in [low, high], else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return None
    return float(value)


def whole(value: object, low: int = 0) -> int | None:
    """The value if it is a whole number of at least `low`, else None."""
    found = number(value, low)
    return None if found is None or not found.is_integer() else int(found)


def seconds(value: object) -> float | None:
    """The value if it may be a duration in seconds, else None."""
    return number(value, 0, 1e9)


def unix_time(value: object) -> float | None:
    """The value if it may be a time of this century, in seconds since 1970, else None."""
    return number(value, 1e9, 1e10)


def text(value: object, most: int = 500) -> str:
    """The value as one printable line of at most `most` characters; "" if it is neither text nor number."""
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return printable(" ".join(str(value)[: 4 * most].split()), most)


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: object, most: int) -> list[Any]:
    """The first items of the value if it is a list, else none."""
    return value[:most] if isinstance(value, list) else []


def _cut(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
