"""Marks on single cases of a table, for `pytest.mark.parametrize`."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def rows(table: Mapping[str, Any]) -> list[Any]:
    """The values of a table as cases; their names are the ids. A tuple is one case of several arguments."""
    return [pytest.param(*_arguments(value), id=name) for name, value in table.items()]


def marked(
    cases: Iterable[Any], *, slow: Iterable[Any] = (), only_ci: Iterable[Any] = (), fast: Iterable[Any] = ()
) -> list[Any]:
    """The cases, some with marks. Where `fast` is given, all others than those of `fast` and `only_ci` are slow. A name
    is the id of cases, or an argument of theirs; a tuple names the cases that have all these arguments. A name that no
    case has is an error."""
    cases, fast = list(cases), list(fast)
    for name in (*slow, *only_ci, *fast):
        if not any(_has(case, name) for case in cases):
            raise ValueError(f"no case is named {name!r}")

    def mark(case: Any) -> Any:
        if any(_has(case, name) for name in slow):
            return _with(pytest.mark.slow, case)
        if any(_has(case, name) for name in only_ci):
            return _with(pytest.mark.only_ci, case)
        return _with(pytest.mark.slow, case) if fast and not any(_has(case, name) for name in fast) else case

    return list(map(mark, cases))


def _with(mark: Any, case: Any) -> Any:
    return pytest.param(*_arguments(case), id=getattr(case, "id", None), marks=(*getattr(case, "marks", ()), mark))


def _has(case: Any, name: Any) -> bool:
    if name == getattr(case, "id", None):
        return True
    return all(any(type(part) is type(it) and part == it for it in _arguments(case)) for part in _arguments(name))


def _arguments(case: Any) -> tuple[Any, ...]:
    if isinstance(case, type(pytest.param())):
        return tuple(case.values)
    return case if isinstance(case, tuple) else (case,)
