"""What the tests of the labs' checks share. Their tables name each filling "GAP, WHAT IT DOES"."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from labtools import LabError
from labtools.exercises import Exercise


def by_gap(table: Mapping[str, Any]) -> list[Any]:
    """Cases (gap, filling), or (gap, filling, message) of a table that says what is wrong."""
    rows = ((name, each if isinstance(each, tuple) else (each,)) for name, each in table.items())
    return [pytest.param(name.partition(",")[0], *row, id=name) for name, row in rows]


def check_right(check: Exercise, capsys: Any, gap: str, *filling: Any) -> None:
    getattr(check, gap)(*filling)
    assert "Right: " in capsys.readouterr().out


def check_wrong(check: Exercise, message: str, gap: str, *filling: Any) -> None:
    """That a message names the gap, and what is wrong."""
    with pytest.raises(LabError) as caught:
        getattr(check, gap)(*filling)
    text = str(caught.value)
    assert text.startswith(f"Gap {list(check.hints).index(gap) + 1}, {gap}, ")
    assert re.search(message, text, re.DOTALL), text
    assert text.endswith(f'A hint: check.hint("{gap}")')
    assert "Traceback" not in text


def check_tried(check: type[Exercise], wrong: Mapping[str, Any]) -> None:
    """That every gap is tried in five wrong ways."""
    for gap in check.hints:
        assert sum(name.startswith(f"{gap}, ") for name in wrong) >= 5
