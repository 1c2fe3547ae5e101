"""The exercises of one process: every gap filled right and wrong; hints that do not solve a gap; and an exercise that
differs from its solution in the gaps alone. (Those of labs 2 and 6 to 10, on real ranks: test_exercise*.py.)"""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import jupytext
import numpy as np
import paths
import pytest
from fillings import by_gap, check_right, check_tried, check_wrong

from labtools import LabError
from labtools.batches import History, Setting
from labtools.exercises import frameworks, horovod, hunt, language, large_batches, profiling, ring, sgd, sharding, srun

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
CHECKS = {"1": sgd.Check, "2": horovod.Check, "3": ring.Check, "4": large_batches.Check, "5": profiling.Check}
CHECKS |= {"6": srun.Check, "7": frameworks.Check, "8": language.Check, "9": sharding.Check, "10": hunt.Check}
mse = torch.nn.functional.mse_loss


def cells(kind, lab):
    (notebook,) = paths.LABS.glob(f"{lab}-{kind}-*.ipynb")
    return [(cell.cell_type, cell.source) for cell in jupytext.read(notebook).cells]


def gaps(lab):
    """The cells that differ: (as the exercise has it, as the solution has it)."""
    exercise, solution = cells("exercise", lab), cells("solution", lab)
    assert len(exercise) == len(solution)
    return [(ours[1], theirs[1]) for ours, theirs in zip(exercise, solution, strict=True) if ours != theirs]


def test_a_check_knows_its_lab():
    assert {lab: str(check.lab) for lab, check in CHECKS.items()} == {lab: lab for lab in CHECKS}


@pytest.mark.parametrize("lab", CHECKS)
def test_exercise_and_solution_differ_in_the_gaps_alone(lab):
    different = gaps(lab)
    assert len(different) == len(CHECKS[lab].hints)
    for (gap, filled), name in zip(different, CHECKS[lab].hints, strict=True):
        assert gap.startswith((f"def {name}(", f"{name} = "))
        assert filled.startswith(gap.splitlines()[0].partition("=")[0])
        assert "..." in gap or lab == "10"  # whose gaps are filled, with a mistake


@pytest.mark.parametrize("lab", CHECKS)
def test_the_last_hint_is_not_the_solution(lab):
    for (gap, filled), (name, hints) in zip(gaps(lab), CHECKS[lab].hints.items(), strict=True):
        assert len(set(hints)) == len(hints) >= 2
        code = [line.strip() for line in filled.splitlines() if line not in gap.splitlines() and len(line.strip()) > 4]
        assert code or name == "program_4"  # which has its lines in another order
        assert not code or not all(line in hints[-1] for line in code)


def test_the_teachers_page_has_every_gap_and_the_checks_own_words():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", (paths.LABS / "TEACHING.md").read_text(), re.MULTILINE)
    assert [row[:2] for row in rows] == [(lab, gap) for lab in CHECKS for gap in CHECKS[lab].hints]
    folder = paths.LABS / "labtools" / "exercises"
    code = re.sub(r'"\s*f?"', "", "".join(source.read_text() for source in folder.glob("*.py")))
    quoted = [words for _, _, mistakes in rows for words in re.findall(r'"([^"]+)"', mistakes)]
    assert len(quoted) > 50
    assert [words for words in quoted if words not in code] == []


def test_hints_are_shown_one_after_another(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(paths.LABS)
    check = horovod.Check(ranks=None)

    def shard(batch): ...

    for gap in ("init", shard, "shard", "shard", "shard"):
        check.hint(gap)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    shown = [" ".join(hint.split()) for hint in re.split(r"\n(?=Hint)", printed)]
    assert [line[: line.index(":")] for line in shown] == [
        "Hint 1 of 2 for init", *(f"Hint {number} of 3 for shard" for number in (1, 2, 3, 3))
    ]  # fmt: skip
    assert shown[-1].endswith("(the last one; the solution is the notebook beside this one)")
    monkeypatch.chdir(tmp_path)
    check.hint("init")
    assert capsys.readouterr().out.endswith("is called. (the last one)\n")  # no solution is beside the exercise
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


def scatter(going=0, growing=-1, steps=-1, add=True, source=None, room=0):
    """A reduce-scatter that sends chunk r - s + going and adds to chunk r - s + growing, in N + steps steps."""

    def reduce_scatter(chunks, comm):
        rank, size = comm.rank, comm.size
        for step in range(size + steps):
            sent, grown = chunks[(rank - step + going) % size], chunks[(rank - step + growing) % size]
            arrived = np.empty(len(grown) + room, int) if add else grown
            comm.Sendrecv(
                sent, (rank + 1) % size, recvbuf=arrived, source=(rank - 1 if source is None else source) % size
            )
            if add:
                grown += arrived

    return reduce_scatter


def gather(going=1, coming=0, steps=-1, add=False):
    """An allgather, alike."""

    def allgather(chunks, comm):
        rank, size = comm.rank, comm.size
        for step in range(size + steps):
            sent, there = chunks[(rank - step + going) % size], chunks[(rank - step + coming) % size]
            arrived = np.empty_like(there)
            comm.Sendrecv(sent, (rank + 1) % size, recvbuf=arrived, source=(rank - 1) % size)
            there[:] = arrived + there * add

    return allgather


def rebound(chunks, comm):
    """Neither chunk is changed in place."""
    for step in range(comm.size - 1):
        grown = (comm.rank - step - 1) % comm.size
        arrived = np.empty_like(chunks[grown])
        comm.Sendrecv(
            chunks[(grown + 1) % comm.size], (comm.rank + 1) % comm.size, arrived, (comm.rank - 1) % comm.size
        )
        chunks[grown] = chunks[grown] + arrived


def same_chunk(first):
    """The chunk sent never changes with the step; numbers are added to others."""

    def phase(chunks, comm):
        sent = chunks[(comm.rank + first) % comm.size].copy()
        for step in range(comm.size - 1):
            there = chunks[(comm.rank - step - 1 + first) % comm.size]
            arrived = np.empty(len(sent) + 1, int)
            comm.Sendrecv(sent, (comm.rank + 1) % comm.size, arrived, (comm.rank - 1) % comm.size)
            there[:] = arrived[: len(there)] + (0 if first else there)

    return phase


def beyond_the_last(chunks, comm):
    comm.Sendrecv(chunks[0], comm.rank + 1, chunks[1], comm.rank - 1)


def rule(k_of=lambda base, batch: batch / base, **factors):
    """A rule of the LR, with these factors of k in place of the right ones."""

    def scaled_lr(lr, base, batch, name):
        return lr * ({"none": lambda k: 1, "sqrt": math.sqrt, "linear": float} | factors)[name](k_of(base, batch))

    return scaled_lr


def ends_with(accuracy, losses=(2.3,), silent=0.0):
    """A training that ends with this validation accuracy."""
    return lambda setting, seed: History(list(losses), [1.0], [accuracy], silent)


def each(worth):
    """An efficiency from the ranks, their throughput and that of one."""
    return lambda throughput: {n: worth(n, images, throughput[1]) for n, images in throughput.items()}


def between(first, last, times=1000):
    return lambda stamps: times * (stamps[:, :, last] - stamps[:, :, first])


def stamps(*ranks):
    """Stamps of ten steps, from the ms of a step's five parts on each rank."""
    return np.array([[np.cumsum([0, *ms]) / 1e3] * 10 for ms in ranks])


RUNS = {
    "A": stamps((1, 40, 60, 300, 5), (1, 340, 60, 2, 5)),
    "B": stamps((300, 40, 60, 9, 5), (300, 40, 60, 5, 5)),
    "C": stamps((1, 40, 60, 400, 5), (1, 40, 60, 390, 5)),
}


def answers(**others):
    return {"A": "slow rank", "B": "data", "C": "communication"} | others, RUNS


def prefetch(batches):
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch


def in_the_thread_but_late(batches):
    with ThreadPoolExecutor(1) as reader:
        while (batch := reader.submit(next, batches, None).result()) is not None:
            yield batch


def all_at_once(batches):
    with ThreadPoolExecutor(1) as reader:
        yield from reader.submit(list, batches).result()


def without_the_last(batches):
    before = None
    for batch in prefetch(batches):
        if before is not None:
            yield before
        before = batch


def never_ending(batches):
    yield from prefetch(batches)
    while True:
        yield None


def ends_with_none(batches):
    yield from prefetch(batches)
    yield None


def twice(batches):
    for batch in prefetch(batches):
        yield batch
        yield batch


def without_the_first(batches):
    next(batches)
    yield from prefetch(batches)


def nothing(*given): ...


RIGHT = {  # by gap
    "gradient": gradient,
    "gradient, an array": lambda *given: np.array(gradient(*given)),
    "gradient, arrays of one": lambda x, y, m, n: [2 * e(x, y, m, n).T @ x / len(x), 2 * np.mean(e(x, y, m, n), 0)],
    "update": lambda m, n, g, lr: (m - lr * g[0], n - lr * g[1]),
    "update, an array": lambda m, n, g, lr: np.array([m, n]) - lr * np.array(g),
    "batches": cut,
    "batches, yielded": lambda order, size: (each for each in cut(order, size)),
    "batches, split": lambda order, size: np.split(order, range(size, len(order), size)),
    "step": step("z", "b", "s"),
    "step, cleared at the end": step("b", "s", "z"),
    "neighbours": lambda r, n: ((r - 1) % n, (r + 1) % n),
    "neighbours, an array": lambda r, n: np.array([r - 1, r + 1]) % n,
    "reduce_scatter": scatter(),
    "allgather": gather(),
    "bytes_sent": lambda size, n: 2 * (n - 1) * size / n,
    "updates": lambda n, b, e: e * (n // b),
    "scaled_lr": rule(),
    "warmup": lambda done, w: min(1, done / w) if w else 1,
    "choice": (Setting(1024, "linear", 5), ends_with(0.981)),
    "choice, another that keeps it": (Setting(1024, "sqrt", 5), ends_with(0.978)),
    "efficiency": each(lambda n, images, one: images / (n * one)),
    "computing": between(0, 3),
    "computing, added up": lambda s: 1e3 * np.diff(s)[..., :3].sum(-1),
    "limits": answers(),
    "prefetch": prefetch,
    "step, an own loss": step("z", "b", "s", lambda a, b: (a - b).square().mean()),
}

WRONG = {  # by gap: the filling, what is said of it
    "gradient, empty": (nothing, "is still empty"),
    "gradient, no factor": (lambda *given: np.array(gradient(*given)) / 2, "the factor 2 is missing"),
    "gradient, sign": (lambda *given: -np.array(gradient(*given)), "the sign is wrong"),
    "gradient, sum": (lambda *given: 40 * np.array(gradient(*given)), "the sum over the batch"),
    "gradient, swapped": (lambda *given: gradient(*given)[::-1], "the two are swapped"),
    "gradient, no x": (lambda *given: 2 * (gradient(*given)[1],), "lacks the factor x"),
    "gradient, no mean": (
        lambda *given: (2 * e(*given) * given[0], 2 * e(*given)),
        "40 numbers for m, one for every point: the mean over the batch is missing",
    ),
    "gradient, no n": (lambda x, y, m, n: gradient(x, y, m, 0), "n is missing in it"),
    "gradient, absolute": (
        lambda x, y, m, n: ((np.sign(e(x, y, m, n)) * x).mean(), np.sign(e(x, y, m, n)).mean()),
        r"the derivative of \|e\|",
    ),
    "gradient, x outside": (
        lambda x, y, m, n: (2 * e(x, y, m, n).mean() * x.mean(), 2 * e(x, y, m, n).mean()),
        "outside the mean",
    ),
    "gradient, one": (lambda *given: gradient(*given)[0], "and not two numbers, the derivatives"),
    "gradient, fails": (
        lambda x, y, m, n: (m * x + c - y).mean(),  # noqa: F821
        r"stopped in <lambda>\(\), line \d+:\n +lambda x, y, m, n: .*\nNameError: name 'c' is not defined",
    ),
    "update, empty": (nothing, "is still empty"),
    "update, uphill": (lambda m, n, g, lr: (m + lr * g[0], n + lr * g[1]), "it moves uphill"),
    "update, no lr": (lambda m, n, g, lr: (m - g[0], n - g[1]), "the learning rate is missing"),
    "update, divided": (lambda m, n, g, lr: (m - g[0] / lr, n - g[1] / lr), "divides by the learning"),
    "update, the change": (lambda m, n, g, lr: (-lr * g[0], -lr * g[1]), "by how much they change"),
    "update, m alone": (lambda m, n, g, lr: (m - lr * g[0], n), "n has not been updated"),
    "update, swapped": (lambda m, n, g, lr: (m - lr * g[1], n - lr * g[0]), "the two are swapped"),
    "update, one gradient": (lambda m, n, g, lr: (m - lr * g[0], n - lr * g[0]), "n moves along the gr"),
    "update, by lists": (lambda m, n, g, lr: (m - lr * g, n), "stopped in .*TypeError"),
    "batches, empty": (nothing, "it is still empty"),
    "batches, the rest lost": (
        lambda order, size: [order[k * size : (k + 1) * size] for k in range(len(order) // size)],
        "for 1000 points and a batch size of 300, 100 of 1000 points are in no batch: the last batch, of 100",
    ),
    "batches, positions": (lambda order, size: cut(np.arange(len(order)), size), "gives back positions"),
    "batches, their number": (np.array_split, "there are 100 batches, as though batch_size were their number"),
    "batches, one": (lambda order, size: [order[:size]], "there is one batch only, of 100; 10 are right"),
    "batches, overlapping": (
        lambda order, size: [order[at : at + size + 1] for at in range(0, len(order), size)],
        "9 points come twice",
    ),
    "batches, the first": (lambda order, size: [order[:size]] * 10, "900 of 1000 points are in no batch"),
    "batches, sorted": (lambda order, size: cut(np.sort(order), size), "in another order"),
    "batches, too small": (lambda order, size: cut(order, size // 2), "have 50, 50, 50, 50, 50 ... poi"),
    "step, empty": (nothing, "is still empty"),
    "step, no backward": (step("z", "s"), r"loss.backward\(\) is missing"),
    "step, no step": (step("z", "b"), r"optimizer.step\(\) is missing"),
    "step, never cleared": (step("b", "s"), r"never cleared, .*optimizer.zero_grad\(\) clears them"),
    "step, cleared too late": (step("b", "z", "s"), "clears the gradients between backward and step"),
    "step, too early": (step("s", "b"), "updates before the gradient is there"),
    "step, twice": (step("z", "b", "s", "s"), "makes 2 updates of 1 gradient:"),
    "step, sum": (step("z", "b", "s", lambda a, b: (a - b).square().sum()), "the sum over the 20 points"),
    "step, uphill": (step("z", "b", "s", lambda a, b: -mse(a, b)), "it goes uphill"),
    "step, another loss": (step("z", "b", "s", torch.nn.functional.l1_loss), "the loss is the mean squared"),
    "neighbours, empty": (nothing, "is still empty"),
    "neighbours, open": (lambda r, n: (r - 1, r + 1), "there is no rank -1: the ring has to close"),
    "neighbours, swapped": (lambda r, n: ((r + 1) % n, (r - 1) % n), "the two are swapped"),
    "neighbours, one": (lambda r, n: (r + 1) % n, "and not two ranks, left and right"),
    "neighbours, itself": (lambda r, n: (r, (r + 1) % n), "not its own neighbour"),
    "neighbours, four ranks": (lambda r, n: ((r - 1) % 4, (r + 1) % 4), "for rank 0 of 2, and 1, 1"),
    "reduce_scatter, empty": (nothing, "is still empty: no rank sends"),
    "reduce_scatter, overwrites": (scatter(add=False), "adds nothing up"),
    "reduce_scatter, too long": (scatter(steps=0), "makes 4 steps on 4 ranks, and 3 are enough"),
    "reduce_scatter, too short": (scatter(steps=-2), "makes 2 steps on 4 ranks, and N - 1 = 3"),
    "reduce_scatter, another start": (scatter(-1, -2), "begin by sending chunk r"),
    "reduce_scatter, into the sent": (scatter(0, 0), "and not to the chunk just sent"),
    "reduce_scatter, in no place": (rebound, "Chunks are views"),
    "reduce_scatter, the same": (same_chunk(0), "sends the same in every step"),
    "reduce_scatter, one source": (scatter(source=0), "waits for ever: rank . waits for a mess"),
    "reduce_scatter, no room": (scatter(room=-1), "2 numbers arrive, and recvbuf has room for 1"),
    "reduce_scatter, out of the ring": (beyond_the_last, r"stopped in .*there is no rank 4"),
    "allgather, empty": (nothing, "is still empty: no rank sends"),
    "allgather, adds": (gather(add=True), "adds what arrives .*only copied"),
    "allgather, another start": (gather(0, -1), "begins with a chunk that is not finished"),
    "allgather, misplaced": (gather(1, -1), "The chunk that arrives has the number"),
    "allgather, too long": (gather(steps=0), "makes 4 steps on 4 ranks, and 3 are enough"),
    "allgather, too short": (gather(steps=-2), "makes 2 steps on 4 ranks"),
    "allgather, the same": (same_chunk(1), "passes on nothing"),
    "bytes_sent, empty": (nothing, "is still empty"),
    "bytes_sent, one phase": (lambda size, n: (n - 1) * size / n, "one phase of the two"),
    "bytes_sent, whole arrays": (lambda size, n: 2 * (n - 1) * size, "each message is a chunk"),
    "bytes_sent, the limit": (lambda size, n: 2 * size, "with few it is less"),
    "bytes_sent, N steps": (lambda size, n: 2 * (n + 1) * size / n, "N - 1 steps, not N"),
    "bytes_sent, elements": (lambda size, n: (n - 1) * size / n / 4, "elements and not its bytes"),
    "updates, empty": (nothing, "is still empty"),
    "updates, a rest for all": (lambda n, b, e: n * e // b, "takes part of it along"),
    "updates, a fraction": (lambda n, b, e: n * e / b, "is a fraction of an update"),
    "updates, one epoch": (lambda n, b, e: n // b, "the updates of one epoch"),
    "updates, rounded up": (lambda n, b, e: -(-n // b) * e, "counts the rest of an epoch"),
    "updates, no batch": (lambda n, b, e: n * e, "that is the number of examples"),
    "scaled_lr, empty": (nothing, "is still empty"),
    "scaled_lr, inverted": (rule(lambda base, batch: base / batch), "not the other way round"),
    "scaled_lr, swapped": (rule(sqrt=float, linear=math.sqrt), "that is the linear rule"),
    "scaled_lr, none scaled": (rule(none=float), "without a rule the LR stays"),
    "scaled_lr, unscaled": (rule(linear=lambda k: 1), "compare `rule` with the right text"),
    "scaled_lr, root of all": (rule(sqrt=lambda k: math.sqrt(0.1 * k) / 0.1), "of k alone"),
    "scaled_lr, 128 fixed": (rule(lambda base, batch: batch / 128), "one of 64, where 1.6"),
    "scaled_lr, one branch": (lambda a, b, c, r: a if r == "none" else None, "the rule sqrt: a"),
    "warmup, empty": (nothing, "is still empty"),
    "warmup, divides by 0": (lambda done, w: min(1, done / w), "stopped.*ZeroDivisionError"),
    "warmup, rises on": (lambda done, w: done / w if w else 1, "rises further: 2.25 times"),
    "warmup, falls": (lambda done, w: max(0, 1 - done / w) if w else 1, "falls where it has to"),
    "warmup, at the peak": (lambda done, w: 1, "begins at the peak"),
    "warmup, jumps": (lambda done, w: min(1, done // w) if w else 1, "// drops the rest"),
    "warmup, squared": (lambda done, w: min(1, (done / w) ** 2) if w else 1, "a straight line"),
    "warmup, none": (lambda done, w: min(1, done / w) if w else 0, "without any warm-up, and 1"),
    "choice, empty": ((Setting(1024, ..., ...), nothing), "is still empty: name a rule"),
    "choice, none": ((Setting(1024, "none", 5), ends_with(0.95)), "it has not got there"),
    "choice, cold": (
        (Setting(1024, "linear", 0), ends_with(0.83, [2.3, 6.1], 0.57)),
        "83.0% on average .* leaps to 6, and 57% of the hidden units",
    ),
    "choice, sqrt": ((Setting(1024, "sqrt", 0), ends_with(0.97)), "a third of the way"),
    "choice, only warm-up": ((Setting(1024, "linear", 12), ends_with(0.9)), "little time is left"),
    "choice, 128": ((Setting(128, "linear", 5), nothing), "The accuracy is to be kept at 1024"),
    "choice, a rule": ((Setting(1024, "cubic", 5), nothing), "they are none, sqrt and linear"),
    "choice, a text": (("linear", nothing), "is 'linear', and not a Setting"),
    "choice, warm-up": ((Setting(1024, "linear", 40), nothing), "a whole number from 0 to the 12"),
    "efficiency, empty": (nothing, "is still empty"),
    "efficiency, speed-up": (each(lambda n, images, one: images / one), "that is the speed-up"),
    "efficiency, of each": (each(lambda n, images, one: images / n), "of each rank: divide by"),
    "efficiency, inverted": (each(lambda n, images, one: n * one / images), "turned around"),
    "efficiency, per cent": (each(lambda n, images, one: 100 * images / n / one), "in per cent"),
    "efficiency, the largest": (each(lambda n, images, one: images / 200), "the largest number"),
    "efficiency, a list": (lambda throughput: [1, 0.9, 0.5], "and not a dictionary with an eff"),
    "computing, empty": (nothing, "is still empty"),
    "computing, seconds": (between(0, 3, 1), "in seconds: times 1,000 are ms"),
    "computing, the step": (between(0, 5), "the whole step, waiting included"),
    "computing, allreduce too": (between(0, 4), "the allreduce too: that is waiting"),
    "computing, allreduce": (between(3, 4), "the map of who waits"),
    "computing, backward": (between(2, 3), "backward alone"),
    "computing, no data": (between(1, 3), "without the data"),
    "computing, negative": (between(3, 0), "negative: the end minus the begin"),
    "computing, swapped": (lambda s: between(0, 3)(s).T, "steps and ranks swapped"),
    "computing, the mean": (lambda s: between(0, 3)(s).mean(1), r"shape \[3\], and .* = \[3, 5\]"),
    "limits, empty": (answers(A=...), "is still empty: for each of the runs A, B, C one of computing"),
    "limits, A network": (
        answers(A="communication"),
        "calls communication what limits run A. Look: rank 0 is ready after 101 ms, rank 1 is ready after 401 ms.",
    ),
    "limits, B a rank": (answers(B="slow rank"), "run B. Look: its parts are data 300, forward 40"),
    "limits, C data": (answers(C="data"), "run C.*all wait then, 400, 390 ms"),
    "limits, C computing": (answers(C="computing"), "calls computing what limits run C"),
    "limits, another word": (answers(B="disk"), "has 'disk' for run B; the answers are computing, d"),
    "limits, a run left out": (({"A": "slow rank"}, RUNS), "has the runs A, and A, B, C are right"),
    "prefetch, empty": (nothing, "is still empty"),
    "prefetch, untouched": (lambda batches: iter([...]), "is still empty"),
    "prefetch, not ahead": (in_the_thread_but_late, "while the loop works on batch 0, nobody reads"),
    "prefetch, no thread": (iter, "does not read ahead"),
    "prefetch, all at once": (all_at_once, "reads all batches before it gives the first one"),
    "prefetch, no end": (never_ending, "never ends"),
    "prefetch, None": (ends_with_none, "gives None as the last batch"),
    "prefetch, the last lost": (without_the_last, "loses the last batch: 39 of 40"),
    "prefetch, the first lost": (without_the_first, "reads some batches in the loop's own thread"),
    "prefetch, twice": (twice, "gives batch 0 twice"),
    "step, arguments": (lambda model, optimizer, x: None, "stopped.*TypeError"),
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(profiling, "_READ_AHEAD", 0.5)


MODULES = {gap: module for module in (sgd, ring, large_batches, profiling) for gap in module.Check.hints}


def given(gap, filling):
    return MODULES[gap].Check(), gap, *(filling if isinstance(filling, tuple) else [filling])


@pytest.mark.parametrize(("name", "filling"), RIGHT.items(), ids=RIGHT)
def test_right_fillings(capsys, name, filling):
    check, *what = given(name.partition(",")[0], filling)
    check_right(check, capsys, *what)


@pytest.mark.parametrize(("gap", "filling", "message"), by_gap(WRONG))
def test_wrong_fillings_are_recognised(gap, filling, message):
    check, *what = given(gap, filling)
    check_wrong(check, message, *what)


@pytest.mark.parametrize("lab", "1345")
def test_every_gap_is_tried_in_five_wrong_ways(lab):
    check_tried(CHECKS[lab], WRONG)
