"""Lab 2: each gap of the exercise, filled right and wrong on real ranks; a message names what is wrong, and why."""

import os
import sys
import tempfile

import jupytext
import nbclient
import numpy as np
import paths
import pytest
from fillings import by_gap, check_right, check_wrong

from hvdtrain.core.schedule import peak_lr
from labtools import Ranks, line
from labtools.exercises.horovod import Check

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
hvd = pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.slow, pytest.mark.xdist_group("labs")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOLUTION = paths.LABS / "2-solution-linear_regression_sgd_horovod.ipynb"
EXERCISE = paths.LABS / "2-exercise-linear_regression_sgd_horovod.ipynb"
GAPS = ("init", "shard", "scale", "wrap", "broadcast")


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(4, preload=["torch._dynamo"])  # which takes two seconds in each run with an optimizer
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def check(ranks):
    return Check(ranks)


def contiguous(batch):
    count = len(batch) // hvd.size()
    return batch[hvd.rank() * count : (hvd.rank() + 1) * count]


def wrapped(optimizer, model, **settings):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **settings)


def broadcast_all(model, optimizer, root=0):
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)


def init_late():
    import horovod.torch as horovod

    horovod.init()
    return horovod.rank()


def by_hand(model, optimizer):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(hvd.broadcast(parameter, root_rank=0))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


RIGHT = {
    "init": hvd.init,
    "init, imported there": init_late,
    "shard, strided": lambda batch: batch[hvd.rank() :: hvd.size()],
    "shard, contiguous": contiguous,
    "shard, split": lambda batch: np.array_split(batch, hvd.size())[hvd.rank()],
    "shard, a list": lambda batch: [int(number) for number in contiguous(batch)],
    "shard, ranks reversed": lambda batch: batch[hvd.size() - 1 - hvd.rank() :: hvd.size()],
    "scale, by hand": lambda lr, base, worker: lr * worker * hvd.size() / base,
    "scale, peak_lr": lambda lr, base, worker: peak_lr(lr, base, worker * hvd.size(), "linear"),
    "wrap": wrapped,
    "wrap, without names": lambda optimizer, model: hvd.DistributedOptimizer(optimizer),
    "wrap, float16 gradients": lambda o, m: wrapped(o, m, compression=hvd.Compression.fp16),
    "broadcast": broadcast_all,
    "broadcast, weight by weight": by_hand,
}


@pytest.mark.parametrize(("gap", "filling"), by_gap(RIGHT))
def test_right_fillings(check, capsys, gap, filling):
    check_right(check, capsys, gap, filling)


def empty(*arguments): ...


def forgets_the_others():
    os.environ.update(HOROVOD_RANK="0", HOROVOD_SIZE="1")
    hvd.init()


def starts_on_rank_0_only():
    if os.environ["HOROVOD_RANK"] == "0":
        hvd.init(process_sets=[])


def torch_distributed():
    torch.distributed.init_process_group("gloo")


def torch_distributed_alone():
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


def stops_again():
    hvd.init()
    hvd.shutdown()


def not_returned(batch):
    batch[hvd.rank() :: hvd.size()]


def overlapping(batch):
    count = len(batch) // hvd.size()
    return batch[hvd.rank() * count : (hvd.rank() + 1) * count + 5]


def without_the_last(batch):
    return contiguous(batch)[:-1]


def unequal(batch):
    cuts = [0, 20, 100, 150, len(batch)]
    return batch[cuts[hvd.rank()] : cuts[hvd.rank() + 1]]


def from_one(batch):
    count = len(batch) // hvd.size()
    return batch[(hvd.rank() + 1) * count : (hvd.rank() + 2) * count]


def another_optimizer(optimizer, model):
    return wrapped(torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"]), model)


def weights_only(model, optimizer):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def slope_only(model, optimizer):
    hvd.broadcast_parameters({"weight": model.state_dict()["weight"]}, root_rank=0)


def copied(model, optimizer):
    for parameter in model.parameters():
        hvd.broadcast(parameter.data, root_rank=0)


def on_rank_0_only(model, optimizer):
    if hvd.rank() == 0:
        broadcast_all(model, optimizer)


def averaged(model, optimizer):
    for parameter in model.parameters():
        parameter.data.copy_(hvd.allreduce(parameter.data))


def divided_twice(optimizer, model):
    """Averages, and then divides by the number of ranks once more."""
    inner = wrapped(optimizer, model)
    step = inner.step

    def smaller(closure=None):
        inner.synchronize()
        for parameter in model.parameters():
            parameter.grad /= hvd.size()
        with inner.skip_synchronize():
            return step(closure)

    inner.step = smaller
    return inner


WRONG = {
    # Gap 1.
    "init, empty": (empty, "Gap 1, init, is still empty: nothing in it starts Horovod"),
    "init, not called": (lambda: hvd.init, "names hvd.init, but does not call it: the parentheses"),
    "init, shut down": (stops_again, "it is shut down again"),
    "init, alone": (forgets_the_others, "believes that it is rank 0 of 1: that is 4 trainings beside"),
    "init, torch.distributed": (torch_distributed, "is PyTorch's own library, .*Horovod does: hvd.init"),
    "init, torch.distributed by a file": (torch_distributed_alone, "starts torch.distributed, which is PyTorch's"),
    "init, on some": (starts_on_rank_0_only, r"Gap 1, init, .*(some processes only|some ranks only)"),
    # Gap 2.
    "shard, empty": (empty, "Gap 2, shard, is still empty"),
    "shard, no return": (not_returned, "is still empty: it gives back nothing"),
    "shard, forgotten": (
        lambda batch: batch,
        r"every rank has all 200 examples.\nAll compute one and the same gradient, for the slope .*three of the four",
    ),
    "shard, rank 0's": (lambda batch: batch[:50], "gives every rank the same local batch, that of rank 0"),
    "shard, one for all": (lambda batch: batch[:: hvd.size()], "gives every rank the same local batch: no rank"),
    "shard, local": (lambda batch: batch[hvd.local_rank() :: hvd.local_size()], "is right on one machine only"),
    "shard, positions": (lambda batch: np.arange(hvd.rank(), len(batch), hvd.size()), "gives back positions"),
    "shard, from one": (from_one, "counts the ranks from 1: nobody has the first 50"),
    "shard, overlapping": (overlapping, r"gives 15 of 200 examples to several ranks \(number \d+ to 0, 1\)"),
    "shard, losing": (without_the_last, r"loses 4 of 200 examples \(number \d+ is on no rank\)"),
    "shard, unequal": (unequal, "local batches of different sizes, 20, 80, 50, 50"),
    "shard, 50 fixed": (lambda batch: batch[50 * hvd.rank() : 50 * hvd.rank() + 50], r"Use len\(batch\)"),
    "shard, 4 fixed": (lambda batch: batch[hvd.rank() :: 4], r"not on 2: there it .* Use hvd.size\(\)"),
    # Gap 3.
    "scale, empty": (empty, "Gap 3, scale, is still empty"),
    "scale, not": (lambda lr, base, worker: lr, "gives 0.1 for 4 ranks .*: it is not scaled"),
    "scale, size missing": (lambda lr, base, worker: lr * worker / base, r"hvd.size\(\) is missing"),
    "scale, squared": (
        lambda lr, base, worker: lr * hvd.size() ** 2 * worker / base,
        r"square of the number of ranks, twice the rule.\nFrom slope .*\(it has diverged\)",
    ),
    "scale, divided": (lambda lr, base, worker: lr * worker / base / hvd.size(), "it is divided by the number"),
    "scale, by rank": (lambda lr, base, worker: lr * (hvd.rank() + 1), r"scaled by hvd.rank\(\).*the ranks part"),
    "scale, sqrt": (lambda lr, base, worker: lr * (worker * hvd.size() / base) ** 0.5, "the square-root rule"),
    "scale, local": (
        lambda lr, base, worker: lr * worker * hvd.local_size() / base,
        r"hvd.local_size\(\) counts one machine's ranks",
    ),
    "scale, always": (lambda lr, base, worker: lr * hvd.size(), "scales although the global batch is kept"),
    "scale, 4 fixed": (lambda lr, base, worker: lr * worker * 4 / base, r"the number of ranks is hvd.size\(\)"),
    # Gap 4.
    "wrap, empty": (empty, "Gap 4, wrap, is still empty"),
    "wrap, not": (lambda optimizer, model: optimizer, "does not average the gradients: .* the ranks part"),
    "wrap, sum": (lambda o, m: wrapped(o, m, op=hvd.Sum), r"4 times as much. That is the sum .*hvd.Sum"),
    "wrap, divided twice": (divided_twice, "a quarter. The gradients are divided by the number of ranks twice"),
    "wrap, Adasum": (lambda o, m: wrapped(o, m, op=hvd.Adasum), "requests Adasum, another rule than the mean"),
    "wrap, another": (another_optimizer, "wrap the optimizer given, which has momentum"),
    # Gap 5.
    "broadcast, empty": (empty, "Gap 5, broadcast, is still empty: .*the paths part"),
    "broadcast, copies": (copied, "hvd.broadcast gives back a copy"),
    "broadcast, no momentum": (weights_only, "not the state of the optimizer: .*the paths part"),
    "broadcast, slope": (slope_only, "broadcasts the slope alone"),
    "broadcast, root 1": (lambda m, o: broadcast_all(m, o, 1), "the weights of rank 1: the root is the wrong"),
    "broadcast, own roots": (lambda m, o: broadcast_all(m, o, hvd.rank()), "names a different root on each rank"),
    "broadcast, rank 0 only": (on_rank_0_only, "is not for some ranks only: 1, 2, 3 of 4 went past it"),
    "broadcast, the mean": (averaged, r"is not rank 0's .*, but the mean over the ranks"),
}


@pytest.mark.parametrize(("gap", "filling", "message"), by_gap(WRONG))
def test_wrong_fillings_are_recognised(check, gap, filling, message):
    check_wrong(check, message, gap, filling)


def test_the_exercise_untouched_fails_each_check_with_its_own_message():
    lab = jupytext.read(EXERCISE)
    last = max(number for number, cell in enumerate(lab.cells) if cell.source.startswith("check.broadcast"))
    lab.cells = lab.cells[: last + 1]
    nbclient.NotebookClient(
        lab, timeout=200, kernel_name="python3", resources=paths.IN_LABS, allow_errors=True
    ).execute()
    shown = {}
    for cell in lab.cells:
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if errors:
            shown[cell.source] = "\n".join(errors[0].traceback)
    assert list(shown) == [f"check.{gap}({gap})" for gap in GAPS]
    for number, (gap, text) in enumerate(zip(GAPS, shown.values(), strict=True), 1):
        assert text.startswith(f"Gap {number}, {gap}, is still empty"), text
        assert "Traceback" not in text
        assert "File " not in text


@pytest.fixture(scope="module")
def solution():
    """What the solution defines before its ranks train."""
    names = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDTRAIN_LAB_SCALE", "1")
        patch.setattr("labtools.Ranks", lambda *size, preload: None)
        patch.setattr("labtools.exercises.horovod.Check", lambda ranks: None)
        for cell in jupytext.read(SOLUTION).cells:
            if cell.cell_type == "code" and not cell.source.startswith(
                ("check.", "def keep_own", "with ", "one_large")
            ):
                exec(cell.source.partition("check.needs")[0], names)
            if "def keep_lr" in cell.source:
                break
    return names


def test_four_ranks_at_one_global_batch_walk_the_path_of_one(ranks, solution):
    train, scale, broadcast = (solution[name] for name in ("train", "scale", "broadcast"))
    one = ranks.run(train, 200, scale, broadcast, ranks=1)[0]
    four = np.array(ranks.run(train, 50, scale, broadcast))
    assert one.shape == (31, 2)
    assert np.abs(four - one).max() < 1e-5
    assert np.ptp(four, axis=0).max() == 0


def test_at_one_batch_per_rank_the_rule_makes_up_for_the_fewer_steps(ranks, solution):
    train, broadcast = solution["train"], solution["broadcast"]
    one = ranks.run(train, 50, solution["scale"], broadcast, ranks=1)[0]
    scaled = ranks.run(train, 50, solution["scale"], broadcast)[0]
    kept = ranks.run(train, 50, solution["keep_lr"], broadcast)[0]
    x, y = line.points()
    above = [line.loss(x, y, *path[-1]) - line.loss(x, y, *line.least_squares(x, y)) for path in (one, scaled, kept)]
    assert len(one) - 1 == 4 * (len(scaled) - 1) == 4 * (len(kept) - 1)
    assert np.abs(one[-1] - scaled[-1]).max() < 0.1
    assert max(above[:2]) < 3e-3
    assert above[2] > 0.03
    assert np.abs(one[::4] - scaled).max() > 0.02
