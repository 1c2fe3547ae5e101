"""Figures and texts from files as a reader wants them: durations, numbers, dates, nothing that is not printable."""

import math
import unicodedata
from datetime import datetime, timezone

from hvdtrain.untrusted import printable

MINUTE, HOUR, DAY = 60, 3600, 86400
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BLANKS = {"\n", "\t"}


def duration(seconds: float) -> str:
    """As `85 ms`, `12.3 s`, `4 min 5 s`, `1 h 23 min`, `3 d 4 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    return f"-{_duration(-seconds)}" if seconds < 0 else _duration(seconds)


def step_time(seconds: float) -> str:
    """Four digits of it, as `1.043 s`, `318.2 ms`: steps differ by little."""
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1000 * seconds)} ms"


def number(value: float) -> str:
    """Four digits of it, as `0.9778`, `1e-05`, `12,346`."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def tick(value: float) -> str:
    """A mark on an axis, in few characters: `0.05`, `25k`, `1e-5`."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    for unit, letter in UNITS:
        if size >= unit and size >= 1e4:
            return f"{value / unit:.5g}{letter}"
    return f"{value:.5g}"


def percent(share: float) -> str:
    """As `71 %`; a tenth where it is small."""
    if not math.isfinite(share):
        return "unknown"
    return f"{share:.1%}".replace("%", " %") if abs(share) < 0.1 else f"{share:.0%}".replace("%", " %")


def date(seconds: float) -> str:
    """As `2026-11-25 14:05 UTC`; `unknown` where no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def shown(text: str) -> str:
    """The text with control and hidden characters as escapes; its lines and blanks stay."""
    if text.isprintable():
        return text
    return "".join(map(_shown, text.replace("\r\n", "\n")))


def short(text: str, most: int = 60) -> str:
    """One line of at most `most` characters; its middle is left out where it is longer."""
    return printable(" ".join(text.split()), most)


def cut(text: str, most: int = 30_000) -> str:
    """The beginning and the end of a text that is too long to show."""
    left = len(text) - most
    return text if left <= 0 else f"{text[: most // 2]}\n... {left:,} characters left out ...\n{text[-most // 2 :]}"


def _shown(character: str) -> str:
    plain = character.isprintable() or character in BLANKS or unicodedata.category(character) == "Zs"
    return character if plain else repr(character)[1:-1]


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < MINUTE - 0.05:
        return f"{seconds:.1f} s"
    if round(seconds) < HOUR:
        return "{} min {} s".format(*divmod(round(seconds), MINUTE))
    if round(seconds / MINUTE) < 2 * DAY / MINUTE:
        return "{} h {} min".format(*divmod(round(seconds / MINUTE), 60))
    return "{} d {} h".format(*divmod(round(seconds / HOUR), 24))
