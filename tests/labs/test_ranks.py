"""Real ranks in a notebook: their results, and the explanation of every failure."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import paths
import pytest
from marks import marked, rows
from ranks import wait_until

from labtools import LabError, Ranks, run_mpi, tell
from labtools.scale import scaled

pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def where(factor):
    import horovod.torch as hvd
    import torch

    hvd.init()
    added = hvd.allreduce(torch.tensor([float(factor * hvd.rank())]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), added.item()


@pytest.mark.parametrize("size", [3, 2, 1, 3])
def test_a_run_joins_its_ranks(ranks, size):
    total = 10.0 * sum(range(size))
    assert ranks.run(where, 10, ranks=size) == [(rank, size, rank, total) for rank in range(size)]


def leaves_a_trace():
    import sys

    first = not hasattr(sys, "been_here")
    sys.been_here = True
    return first, os.environ.get("OF_THIS_RUN")


def test_every_run_is_in_a_fresh_process(ranks):
    assert ranks.run(leaves_a_trace, ranks=2, environ={"OF_THIS_RUN": "1"}) == [(True, "1")] * 2
    assert ranks.run(leaves_a_trace, ranks=2) == [(True, None)] * 2


def tells_and_prints():
    tell({"step": 1})
    print("half", end="")
    tell({"step": 2})
    print(" a line")
    print("no end", end="")


def test_values_and_lines_reach_the_notebook(ranks, capsys):
    received = []
    assert ranks.run(tells_and_prints, ranks=2, watch=lambda rank, value: received.append((rank, value["step"]))) == [
        None,
        None,
    ]
    assert sorted(received) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [step for rank, step in received if rank == 1] == [1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] half a line", "[rank 0] no end", "[rank 1] half a line", "[rank 1] no end"]


def fails_on_rank_1():
    import horovod.torch as hvd
    import torch

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("not this one")
    hvd.allreduce(torch.ones(1))


def fails_everywhere():
    import horovod.torch as hvd

    return hvd.rank()


def skips_a_collective():
    import horovod.torch as hvd
    import torch

    hvd.init()
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1))


def is_killed():
    if os.environ["HOROVOD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def returns_a_lock():
    import threading

    return threading.Lock()


def slip(code):
    """A run of this line on a rank, with a model and optimizers that may be wrapped."""

    def one_slip():
        import horovod.torch as hvd
        import torch

        hvd.init()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        names = {"hvd": hvd, "torch": torch, "model": model, "optimizer": optimizer}
        exec(f"wrap = lambda o: hvd.DistributedOptimizer(o, named_parameters=model.named_parameters())\n{code}", names)

    return one_slip


BACKWARD = "model(torch.ones(1, 1)).sum().backward()"
SLIPS = {
    "shapes": ("hvd.allreduce(torch.ones(3 + hvd.rank()), name='a')", "tensors of different shapes to one allreduce"),
    "types": ("hvd.allreduce(torch.ones(3).to([torch.int64, torch.float64][hvd.rank()]), name='a')", "different types"),
    "roots": ("hvd.broadcast(torch.ones(3), root_rank=hvd.rank(), name='a')", "The ranks name different roots"),
    "one name": ("for _ in range(2): hvd.allreduce_async(torch.ones(3), name='a')", "One name stands for two tensors"),
    "left": ("hvd.rank() and hvd.shutdown(); hvd.allreduce(torch.ones(3))", "Another rank has failed or left|not runn"),
    "names": ("hvd.DistributedOptimizer(optimizer, named_parameters=model.parameters())", "model.named_parameters()"),
    "wrapped twice": ("wrap(wrap(optimizer))", "wrapped already: wrap it once"),
    "cleared": (f"o = wrap(optimizer); {BACKWARD}; o.zero_grad(); o.step()", "clear them before backward"),
    "backward twice": (f"o = wrap(optimizer); {BACKWARD}; {BACKWARD}", "backward.. ran twice before a step"),
    "NumPy": ("import numpy; hvd.allreduce(numpy.ones(3))", "torch.from_numpy.array"),
}


@pytest.mark.parametrize(
    ("code", "words"),
    marked(
        rows(SLIPS),
        slow={"types", "one name", "names", "cleared", "backward twice", "NumPy"},
        only_ci={"roots", "left", "wrapped twice"},
    ),
)
def test_horovods_errors_come_with_what_they_mean(ranks, code, words):
    with pytest.raises(LabError) as caught:
        ranks.run(slip(code), ranks=2)
    *_, meaning, error = str(caught.value).splitlines()
    assert re.search(words, meaning), caught.value
    assert re.match(r"\w+(Error|Exception): ", error)


FAILURES = {
    "one rank": (
        fails_on_rank_1,
        r'Rank 1 of 2 failed in fails_on_rank_1\(\), line \d+:\n    raise ValueError\("not this one"\)\n'
        r"ValueError: not this one",
    ),
    "all ranks alike": (
        fails_everywhere,
        r"All 2 ranks failed in fails_everywhere\(\), line \d+:\n    return hvd.rank\(\)\n"
        r"Horovod is not running in this process: call hvd.init\(\) first, on every rank.\n"
        r"ValueError: Horovod has not been initialized; use hvd.init\(\).",
    ),
    "killed": (is_killed, r"Rank 1 of 2 ended by signal 9 in is_killed\(\): out of memory, or killed."),
    "a result that cannot be pickled": (
        returns_a_lock,
        r"All 2 ranks failed:\nTypeError: cannot pickle '_thread.lock' object",
    ),
}


@pytest.mark.parametrize(("function", "text"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_explained(ranks, function, text):
    with pytest.raises(LabError) as caught:
        ranks.run(function, ranks=2)
    assert re.fullmatch(text, str(caught.value)), caught.value
    assert ranks.run(where, 1, ranks=2)[1][3] == 1.0  # and the ranks take the next run


def test_ranks_that_wait_for_one_another(ranks, monkeypatch):
    monkeypatch.setattr("labtools.ranks.AFTER_FIRST", 1.0)
    with pytest.raises(
        LabError, match=r"^Rank 0 still waits in skips_a_collective\(\), while rank 1 has come to its end."
    ):
        ranks.run(skips_a_collective, ranks=2)
    with pytest.raises(LabError, match=r"No rank has come to the end of sleep\(\) in 1 seconds"):
        ranks.run(time.sleep, 60, ranks=2, seconds=1)


def test_more_ranks_than_there_are(ranks):
    with pytest.raises(LabError, match=r"ranks must lie in \[1, 3\], the number that was started, got 4"):
        ranks.run(where, 1, ranks=4)


def test_tell_outside_a_rank():
    with pytest.raises(LabError, match=r"call it in a function that Ranks\.run starts"):
        tell(1)


def fails_over_mpi():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("not this one")
    MPI.COMM_WORLD.Barrier()


def test_a_failure_over_mpi_is_explained():
    with pytest.raises(
        LabError, match=r"^Rank 1 of 2 failed in fails_over_mpi\(\), line \d+:\n.*\nValueError: not this"
    ):
        run_mpi(fails_over_mpi, ranks=2)


def sends_first():
    import numpy as np
    from mpi4py import MPI

    other = 1 - MPI.COMM_WORLD.rank
    MPI.COMM_WORLD.Send(np.ones(1_000_000), dest=other)
    MPI.COMM_WORLD.Recv(np.empty(1_000_000), source=other)


def test_ranks_that_wait_inside_mpi_do_not_keep_the_notebook():
    with pytest.raises(LabError, match=r"No rank has come to the end of sends_first\(\) in 2 seconds"):
        run_mpi(sends_first, ranks=2, seconds=2)


def parent():
    return os.getppid()


@pytest.mark.slow
def test_ranks_beside_engines_over_mpi(start_engines):
    """In one mpirun, as a teacher would start them."""
    with start_engines(engines="mpi").connect_client_sync() as client:
        of_engines = client[:].apply_sync(os.getpid)
    ranks = Ranks(2)
    try:
        assert ranks.run(where, 10) == [(0, 2, 0, 10.0), (1, 2, 1, 10.0)]
        workers = ranks.run(parent)
        starters = [Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1] for worker in workers]
        assert sorted(map(int, starters)) == sorted(of_engines)
    finally:
        ranks.close()


NOTEBOOK = """
import os, time
from labtools import Ranks, tell

def sleeps():
    tell((os.getpid(), os.getppid()))
    time.sleep(600)

if __name__ == "__main__":
    Ranks(2).run(sleeps, watch=lambda rank, pids: print(*pids, flush=True), seconds=600)
"""


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_ranks_end_with_their_notebook():
    """In the middle of a run. test_security.py kills a notebook with SIGKILL."""
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK], stdout=subprocess.PIPE, text=True, cwd=paths.LABS
    ) as notebook:
        pids = [int(pid) for _ in range(2) for pid in notebook.stdout.readline().split()]
        notebook.terminate()
    assert len(pids) == 4
    wait_until(lambda: not any(map(alive, pids)))


SCALES = {"none": (None, 400), "small": ("0.1", 40), "least": ("0.001", 20), "large": ("2.5", 1000)}


@pytest.mark.parametrize(("scale", "expected"), SCALES.values(), ids=SCALES)
def test_a_scale(scale, expected, monkeypatch):
    monkeypatch.delenv("HVDTRAIN_LAB_SCALE", raising=False)
    if scale:
        monkeypatch.setenv("HVDTRAIN_LAB_SCALE", scale)
    assert scaled(400, least=20) == expected


@pytest.mark.parametrize("scale", ["much", "0", "-1", "inf", "nan"])
def test_a_scale_that_is_none(scale, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_LAB_SCALE", scale)
    with pytest.raises(LabError, match=f"HVDTRAIN_LAB_SCALE must be a positive number, got '{scale}'"):
        scaled(1)
