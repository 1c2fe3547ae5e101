"""The exercises: hints that do not solve a gap, and an exercise that differs from its solution in the gaps alone."""

import jupytext
import paths
import pytest

from labtools import LabError
from labtools.exercises import horovod

CHECKS = {"2": horovod.Check}


def cells(kind, lab):
    (source,) = paths.SOURCES.glob(f"{lab}-{kind}-*.py")
    return [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]


def gaps(lab):
    """The cells that differ: (as the exercise has it, as the solution has it)."""
    exercise, solution = cells("exercise", lab), cells("solution", lab)
    assert len(exercise) == len(solution)
    return [(ours[1], theirs[1]) for ours, theirs in zip(exercise, solution, strict=True) if ours != theirs]


@pytest.mark.parametrize("lab", CHECKS)
def test_exercise_and_solution_differ_in_the_gaps_alone(lab):
    different = gaps(lab)
    assert len(different) == len(CHECKS[lab].hints)
    for (gap, filled), name in zip(different, CHECKS[lab].hints, strict=True):
        assert gap.startswith((f"def {name}(", f"{name} = "))
        assert filled.startswith(gap.splitlines()[0].partition("=")[0])
        assert gap.rstrip(")}\n ").endswith("...")


@pytest.mark.parametrize("lab", CHECKS)
def test_the_last_hint_is_not_the_solution(lab):
    for (gap, filled), hints in zip(gaps(lab), CHECKS[lab].hints.values(), strict=True):
        assert len(set(hints)) == len(hints) >= 2
        code = [line.strip() for line in filled.splitlines() if line not in gap.splitlines() and len(line.strip()) > 4]
        assert code
        assert not all(line in hints[-1] for line in code)


def test_hints_are_shown_one_after_another(capsys):
    check = horovod.Check(ranks=None)

    def shard(batch): ...

    for gap in ("init", shard, "shard", "shard", "shard"):
        check.hint(gap)
    shown = capsys.readouterr().out.splitlines()
    assert [line[: line.index(":")] for line in shown] == [
        "Hint 1 of 2 for init", *(f"Hint {number} of 3 for shard" for number in (1, 2, 3, 3))
    ]  # fmt: skip
    assert shown[-1].endswith("(the last one; the solution is the notebook beside this one)")
    with pytest.raises(LabError, match="sharding is not a gap of this lab; they are init, shard, scale, wrap, broadc"):
        check.hint("sharding")
