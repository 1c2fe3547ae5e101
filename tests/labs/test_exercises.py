"""The exercises of one process: every gap filled right and wrong; hints that do not solve a gap; and an exercise that
differs from its solution in the gaps alone. (Lab 2's, on real ranks: test_exercise.py.)"""

import re

import jupytext
import numpy as np
import paths
import pytest

from labtools import LabError
from labtools.exercises import horovod, sgd

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
CHECKS = {"1": sgd.Check, "2": horovod.Check}
mse = torch.nn.functional.mse_loss


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
        assert "..." in gap


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


def e(x, y, m, n):
    return m * x + n - y


def gradient(x, y, m, n):
    return 2 * (e(x, y, m, n) * x).mean(), 2 * e(x, y, m, n).mean()


def cut(order, size):
    return [order[start : start + size] for start in range(0, len(order), size)]


def step(*parts):
    """A step of PyTorch made of these parts, in this order: z (zero_grad), b (backward), s (step), or a loss."""

    def one_step(model, optimizer, x, y):
        loss = next((part for part in parts if callable(part)), mse)(model(x), y)
        for part in parts:
            {"z": optimizer.zero_grad, "b": loss.backward, "s": optimizer.step}.get(part, str)()

    return one_step


def nothing(*given): ...


RIGHT = {
    "gradient": (sgd, "gradient", gradient),
    "gradient, an array": (sgd, "gradient", lambda *given: np.array(gradient(*given))),
    "gradient, arrays of one": (
        sgd,
        "gradient",
        lambda x, y, m, n: [2 * e(x, y, m, n).T @ x / len(x), 2 * np.mean(e(x, y, m, n), 0)],
    ),
    "update": (sgd, "update", lambda m, n, g, lr: (m - lr * g[0], n - lr * g[1])),
    "update, an array": (sgd, "update", lambda m, n, g, lr: np.array([m, n]) - lr * np.array(g)),
    "batches": (sgd, "batches", cut),
    "batches, yielded": (sgd, "batches", lambda order, size: (each for each in cut(order, size))),
    "batches, split": (
        sgd,
        "batches",
        lambda order, size: np.split(order, range(size, len(order), size)),
    ),
    "step": (sgd, "step", step("z", "b", "s")),
    "step, cleared at the end": (sgd, "step", step("b", "s", "z")),
    "step, an own loss": (sgd, "step", step("z", "b", "s", lambda a, b: (a - b).square().mean())),
}

WRONG = {
    "gradient, empty": (sgd, "gradient", nothing, "is still empty"),
    "gradient, no factor": (sgd, "gradient", lambda *given: np.array(gradient(*given)) / 2, "the factor 2 is missing"),
    "gradient, sign": (sgd, "gradient", lambda *given: -np.array(gradient(*given)), "the sign is wrong"),
    "gradient, sum": (sgd, "gradient", lambda *given: 40 * np.array(gradient(*given)), "the sum over the batch"),
    "gradient, swapped": (sgd, "gradient", lambda *given: gradient(*given)[::-1], "the two are swapped"),
    "gradient, no x": (sgd, "gradient", lambda *given: 2 * (gradient(*given)[1],), "lacks the factor x"),
    "gradient, no mean": (
        sgd,
        "gradient",
        lambda *given: (2 * e(*given) * given[0], 2 * e(*given)),
        "40 numbers for m, one for every point: the mean over the batch is missing",
    ),
    "gradient, no n": (
        sgd,
        "gradient",
        lambda x, y, m, n: gradient(x, y, m, 0),
        "n is missing in it",
    ),
    "gradient, absolute": (
        sgd,
        "gradient",
        lambda x, y, m, n: ((np.sign(e(x, y, m, n)) * x).mean(), np.sign(e(x, y, m, n)).mean()),
        r"the derivative of \|e\|",
    ),
    "gradient, x outside": (
        sgd,
        "gradient",
        lambda x, y, m, n: (2 * e(x, y, m, n).mean() * x.mean(), 2 * e(x, y, m, n).mean()),
        "outside the mean",
    ),
    "gradient, one": (sgd, "gradient", lambda *given: gradient(*given)[0], "and not two numbers, the derivatives"),
    "gradient, fails": (
        sgd,
        "gradient",
        lambda x, y, m, n: (m * x + c - y).mean(),  # noqa: F821
        r"stopped in <lambda>\(\), line \d+:\n +lambda x, y, m, n: .*\nNameError: name 'c' is not defined",
    ),
    "update, empty": (sgd, "update", nothing, "is still empty"),
    "update, uphill": (sgd, "update", lambda m, n, g, lr: (m + lr * g[0], n + lr * g[1]), "it moves uphill"),
    "update, no lr": (sgd, "update", lambda m, n, g, lr: (m - g[0], n - g[1]), "the learning rate is missing"),
    "update, divided": (sgd, "update", lambda m, n, g, lr: (m - g[0] / lr, n - g[1] / lr), "divides by the learning"),
    "update, the change": (sgd, "update", lambda m, n, g, lr: (-lr * g[0], -lr * g[1]), "by how much they change"),
    "update, m alone": (sgd, "update", lambda m, n, g, lr: (m - lr * g[0], n), "n has not been updated"),
    "update, swapped": (sgd, "update", lambda m, n, g, lr: (m - lr * g[1], n - lr * g[0]), "the two are swapped"),
    "update, one gradient": (sgd, "update", lambda m, n, g, lr: (m - lr * g[0], n - lr * g[0]), "n moves along the gr"),
    "update, by lists": (sgd, "update", lambda m, n, g, lr: (m - lr * g, n), "stopped in .*TypeError"),
    "batches, empty": (sgd, "batches", nothing, "it is still empty"),
    "batches, the rest lost": (
        sgd,
        "batches",
        lambda order, size: [order[k * size : (k + 1) * size] for k in range(len(order) // size)],
        "for 1000 points and a batch size of 300, 100 of 1000 points are in no batch: the last batch, of 100",
    ),
    "batches, positions": (
        sgd,
        "batches",
        lambda order, size: cut(np.arange(len(order)), size),
        "gives back positions",
    ),
    "batches, their number": (
        sgd,
        "batches",
        np.array_split,
        "there are 100 batches, as though batch_size were their number",
    ),
    "batches, one": (
        sgd,
        "batches",
        lambda order, size: [order[:size]],
        "there is one batch only, of 100; 10 are right",
    ),
    "batches, overlapping": (
        sgd,
        "batches",
        lambda order, size: [order[at : at + size + 1] for at in range(0, len(order), size)],
        "9 points come twice",
    ),
    "batches, the first": (
        sgd,
        "batches",
        lambda order, size: [order[:size]] * 10,
        "900 of 1000 points are in no batch",
    ),
    "batches, sorted": (sgd, "batches", lambda order, size: cut(np.sort(order), size), "in another order"),
    "batches, too small": (
        sgd,
        "batches",
        lambda order, size: cut(order, size // 2),
        "have 50, 50, 50, 50, 50 ... poi",
    ),
    "step, empty": (sgd, "step", nothing, "is still empty"),
    "step, no backward": (sgd, "step", step("z", "s"), r"loss.backward\(\) is missing"),
    "step, no step": (sgd, "step", step("z", "b"), r"optimizer.step\(\) is missing"),
    "step, never cleared": (sgd, "step", step("b", "s"), r"never cleared, .*optimizer.zero_grad\(\) clears them"),
    "step, cleared too late": (sgd, "step", step("b", "z", "s"), "clears the gradients between backward and step"),
    "step, too early": (sgd, "step", step("s", "b"), "updates before the gradient is there"),
    "step, twice": (sgd, "step", step("z", "b", "s", "s"), "makes 2 updates of 1 gradients"),
    "step, sum": (sgd, "step", step("z", "b", "s", lambda a, b: (a - b).square().sum()), "the sum over the 20 points"),
    "step, uphill": (sgd, "step", step("z", "b", "s", lambda a, b: -mse(a, b)), "it goes uphill"),
    "step, another loss": (
        sgd,
        "step",
        step("z", "b", "s", torch.nn.functional.l1_loss),
        "the loss is the mean squared",
    ),
    "step, arguments": (sgd, "step", lambda model, optimizer, x: None, "stopped.*TypeError"),
}


def checked(lab, gap, filling):
    getattr(lab.Check(), gap)(filling)


@pytest.mark.parametrize(("lab", "gap", "filling"), RIGHT.values(), ids=RIGHT)
def test_right_fillings(capsys, lab, gap, filling):
    checked(lab, gap, filling)
    assert "Right: " in capsys.readouterr().out


@pytest.mark.parametrize(("lab", "gap", "filling", "message"), WRONG.values(), ids=WRONG)
def test_wrong_fillings_are_recognised(lab, gap, filling, message):
    with pytest.raises(LabError) as caught:
        checked(lab, gap, filling)
    text = str(caught.value)
    assert text.startswith(f"Gap {list(lab.Check.hints).index(gap) + 1}, {gap}, ")
    assert re.search(message, text, re.DOTALL), text
    assert text.endswith(f'A hint: check.hint("{gap}")')


@pytest.mark.parametrize("lab", [lab for lab in CHECKS if lab != "2"])
def test_every_gap_is_tried_in_five_wrong_ways(lab):
    module = next(each for each in (sgd,) if each.Check is CHECKS[lab])
    for gap in CHECKS[lab].hints:
        assert sum(row[:2] == (module, gap) for row in WRONG.values()) >= 5
