"""The engines over tf.distribute: verbs, curves, replicas, what ends them, and what TensorFlow cannot do."""

import json
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from marks import marked
from paths import SUPPORT
from ranks import command, held, needs_tensorflow, once, programs, run, started, stopped_at, train, wait_for_step
from worlds import DIGITS, SINGLE, furthest, losses

from hvdtrain import datasets

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900), needs_tensorflow]

LINE = ["linear", "--epochs", "5", "--log-every-steps", "1", "--guard-every-steps", "10"]
SHORT_LINE = ["linear", "--epochs", "2", "--log-every-steps", "1"]
CLIPPED = [*SHORT_LINE, "--clip-norm", "0.05", "--momentum", "0.5"]
NETWORK = [*DIGITS, *SINGLE, "--max-steps", "3"]
RUNS = {
    "line": LINE,
    "unwatched": ["linear", "--epochs", "30", "--log-every-steps", "1000"],
    "uneven": [*SHORT_LINE, "--batch-size", "102"],
    "clipped": CLIPPED,
    "clipped micro-batches": [*CLIPPED, "--accumulation-steps", "5"],
    "plain": [*SHORT_LINE, "--compression", "none"],
    "bfloat16": [*SHORT_LINE, "--precision", "bfloat16"],
    "float16": [*SHORT_LINE, "--precision", "float16"],
    "float64": [*SHORT_LINE, "--precision", "float64"],
    "lamb": [*SHORT_LINE, "--optimizer", "lamb", "--weight-decay", "0.1", "--ema-decay", "0.9"],
    "xla": [*SHORT_LINE, "--xla"],
    "masks": [f"{SUPPORT}/keras_cells/cells.yaml:tokens", "--loss", "keras_cells.costs:ignoring"],
    "overflow": ["linear", "--precision", "float16"],
    "parted": ["linear"],
    "sync": [*NETWORK, "--batch-norm", "sync"],
    "frozen": [*NETWORK, "--batch-norm", "frozen"],
    "local": [*NETWORK, "--batch-norm", "local"],
}
LINES = [
    "line", "uneven", "clipped", "clipped micro-batches", "plain", "bfloat16", "float16", "float64", "lamb", "xla",
]  # fmt: skip
NO_XLA = LINES[:-1]
ASYNCHRONOUS = ["line", "clipped", "plain", "bfloat16", "float64", "lamb"]
MIRRORED, CENTRAL = "mirrored cpu", "central cpu"

# Every run is traced on every rank, for a second or more: each engine's verbs and line are fast, all others slow. What
# multiworker shows on two ranks, Horovod on two and multiworker on one show too.
# Launches by name: launcher, number of ranks, and the runs of each engine. A process can start each engine once.
LAUNCHES: dict[str, tuple[str, int, dict[str, list[str]]]] = {
    "one": (
        "alone",
        1,
        {"local": ["line"], MIRRORED: ["line"], "multiworker": ["line", "overflow"]},
    ),
    "more": ("alone", 1, {"local": [*LINES[1:], "masks", "sync", "frozen"], CENTRAL: ["line"]}),
    "served": ("alone", 1, {"parameter-server": ["line"]}),
    "served, more": ("alone", 1, {"parameter-server": [*ASYNCHRONOUS[1:], "frozen"]}),
    "two": (
        "alone",
        1,
        {
            f"{MIRRORED},cpu": [*LINES, "masks", "overflow", "parted", "sync"],
            f"{CENTRAL},cpu": [*NO_XLA, "overflow", "parted", "frozen"],
        },
    ),
    "four": ("alone", 1, {f"{MIRRORED},cpu,cpu,cpu": ["line", "uneven"], f"{CENTRAL},cpu,cpu,cpu": ["line", "uneven"]}),
    "mpi-2": ("mpi", 2, {"multiworker": ["line", "overflow", "parted"]}),
    "mpi-2-more": ("mpi", 2, {"multiworker": [*LINES[1:], "masks", "sync"]}),
    "gloo-4": ("gloo", 4, {"multiworker": ["line", "uneven"]}),
    "served-2": ("gloo", 2, {"parameter-server": ["line", "unwatched"]}),
    "served-4": ("mpi", 4, {"parameter-server": ["line", "unwatched"]}),
}
BESIDES: dict[str, dict[str, Any]] = {
    "one": {"evened": {}},
    "served": {"refused": {"cases": [["cuda:1"]]}},
}


@dataclass(frozen=True)
class Begun:
    """The results of one launch, by program and by rank."""

    folder: Any
    results: dict[str, list[Any]]

    def losses(self, engine, run):
        return losses(self.folder / engine / run)

    def of(self, engine):
        """The results of that engine on each rank."""
        return [rank[engine] for rank in self.results["strategies"]]


def of_one(begun, run):
    """The losses of one process without a strategy."""
    return begun("one" if run == "line" else "more").losses("local", run)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """`begun("mpi-2")`: the results of that launch; each is made once."""

    @once
    def of(name):
        launcher, ranks, engines = LAUNCHES[name]
        folder = tmp_path_factory.mktemp(name)
        chosen = {engine: {run: RUNS[run] for run in runs} for engine, runs in engines.items()}
        given = {"strategies": {"engines": chosen, "folder": str(folder)}, **BESIDES.get(name, {})}
        return Begun(folder, programs("tensorflow_distribute", launcher, ranks, folder, given))

    return of


def synchronous(*runs):
    """(launch, engine, run) of all synchronous engines that have these runs."""
    return [
        pytest.param(launch, engine, run, id=f"{engine}-{launch}-{run}".replace(" ", "-"))
        for launch, (_, _, engines) in LAUNCHES.items()
        for engine, chosen in engines.items()
        for run in chosen
        if run in runs and engine not in {"local", "parameter-server"}
    ]


# Verbs.


def expected(ranks, replicas, shared):
    total, numbers = ranks * (ranks + 1) / 2, range(1, ranks * replicas + 1)
    mean, copies = sum(numbers) / len(numbers), 1 if shared else replicas
    return {
        "world": [ranks, replicas],
        "sum of float64": [total, 0.125 * (total - ranks)],
        "sum of float32": [total],
        "sum of int64": [2**62 + 1 - int(total - ranks), 2**53 * int(total - ranks) + ranks],
        "sum of a table": [[total] * 3] * 2,
        "sum of another shape": [ranks * i for i in range(7)],
        "metadata": {"step": 3, "best": None, "text": "é"},
        "no metadata": None,
        "broadcast": {"scalar": 7, "counts": [2**53 + 1] * 3, "weights": [[0.5] * 2] * 2, "doubles": [0.1] * 2},
        "sum": [sum(numbers)] * copies,
        "gradient": [sum(numbers)] * copies,
        "weight": [-11 * mean] * copies,
    }


VERBS = [
    (launch, engine)
    for launch, (_, _, engines) in LAUNCHES.items()
    for engine in engines
    if not launch.startswith(("served-", "served, more"))
]


@pytest.mark.parametrize(
    ("launch", "engine"), marked(VERBS, slow={"more", "two", "four", "mpi-2-more", "gloo-4"}, only_ci={"mpi-2"})
)
def test_verbs_are_arithmetic(begun, launch, engine):
    ranks, replicas, shared = LAUNCHES[launch][1], engine.count("cpu") or 1, engine.startswith("central")
    for rank, results in enumerate(begun(launch).of(engine)):
        verbs = dict(results["verbs"])
        own = [2.0 * (rank * replicas + index + 1) for index in range(replicas)]
        assert verbs.pop("kept") == ([replicas + 1.0] if shared else own)
        assert verbs.pop("world") == [rank, *expected(ranks, replicas, shared)["world"]]
        assert verbs == {name: value for name, value in expected(ranks, replicas, shared).items() if name != "world"}


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "ranks"), [("served-2", 2), ("served-4", 4)])
def test_every_rank_is_a_worker_and_the_chief_leads(begun, launch, ranks):
    chief, *others = begun(launch).of("parameter-server")
    assert chief["verbs"]["world"] == [0, ranks, 1]
    assert [results["served"] for results in others] == [[rank, ranks] for rank in range(1, ranks)]


# Curves: relative difference to one process.

LIMITS = {
    "line": 1e-5, "uneven": 1e-5, "clipped": 1e-5, "clipped micro-batches": 1e-5, "plain": 1e-5, "xla": 1e-5,
    "lamb": 1e-5, "masks": 1e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 2e-2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "engine", "run"),
    marked(synchronous(*LIMITS), slow={"two", "mpi-2-more", "four", "gloo-4", "more"}, only_ci={"mpi-2"}),
)
def test_the_line_has_the_curve_of_one_process(begun, launch, engine, run):
    theirs = of_one(begun, run)
    assert len(theirs) == {"line": 50, "uneven": 18, "masks": 8}.get(run, 20)
    assert furthest(begun(launch).losses(engine, run), theirs) < LIMITS[run]


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "engine", "run"), synchronous("sync", "frozen"))
def test_resnet50_has_the_curve_of_one_process(begun, launch, engine, run):
    theirs = of_one(begun, run)
    assert len(theirs) == 3
    assert furthest(begun(launch).losses(engine, run), theirs) < 1e-6


@pytest.mark.parametrize(
    ("launch", "run"),
    marked(
        [("served", "line"), *(("served, more", run) for run in [*ASYNCHRONOUS[1:], "frozen"])], slow={"served, more"}
    ),
)
def test_one_worker_of_a_parameter_server_makes_the_updates_of_one_process(begun, launch, run):
    np.testing.assert_array_equal(begun(launch).losses("parameter-server", run), of_one(begun, run))


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["served-2", "served-4"])
def test_workers_that_do_not_wait_learn_the_line(begun, launch):
    points = datasets.load("linear").train
    results = begun(launch).of("parameter-server")[0]["unwatched"]
    assert results["line"] == pytest.approx(np.polyfit(points.x[:, 0], points.y[:, 0], 1), abs=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["served-2", "served-4"])
def test_workers_that_are_watched_at_every_step_are_interleaved(begun, launch):
    theirs = begun("one").losses("local", "line")
    np.testing.assert_array_equal(begun(launch).losses("parameter-server", "line"), theirs)


# Replicas.


@pytest.mark.parametrize(
    ("launch", "engine", "run"),
    marked(
        synchronous("line", "float16", "clipped micro-batches", "sync"),
        slow={"two", "mpi-2-more", "four", "more", "gloo-4"},
        only_ci={"mpi-2"},
    ),
)
def test_all_replicas_end_with_one_state_to_the_bit(begun, launch, engine, run):
    states = {state for results in begun(launch).of(engine) for state in results[run]["states"]}
    assert len(states) == 1


@pytest.mark.parametrize(("launch", "engine", "run"), marked(synchronous("overflow"), slow={"two"}, only_ci={"mpi-2"}))
def test_an_overflow_is_skipped_by_all_replicas(begun, launch, engine, run):
    for results in begun(launch).of(engine):
        (first, scale), (second, halved), (third, kept) = results[run]
        assert second == first and halved == scale / 2
        assert third != second and kept == halved
        assert len({*third}) == 1 and np.isfinite(third).all()


HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("launch", "engine", "parted", "where"),
    marked(
        [
            ("two", f"{MIRRORED},cpu", "weights of replica 1 on cpu differ from replica 0's", "device"),
            ("mpi-2", "multiworker", f"ranks differ in weights: rank 1 on {HOST} has ", "host"),
        ],
        slow={"two"},
        only_ci={"mpi-2"},
    ),
    ids=["two", "mpi-2"],
)
def test_a_parted_replica_is_found(begun, launch, engine, parted, where):
    (text,) = {results["parted"] for results in begun(launch).of(engine)}
    assert text.startswith(f"ReplicaError: after step 0 the {parted}")
    assert f"resume from the last checkpoint with the same command, and check that {where}'s memory." in text


def test_replicas_with_less_to_validate_read_what_counts_nothing(begun):
    read, counts = begun("one").results["evened"][0]
    assert read == ["a0", "b0", "a0", "a1", "b1", "a1", "a2", "a2", "a2"]
    assert counts == [[1, 1, 0], [1, 1, 0], [1, 0, 0]]


def test_devices_that_no_strategy_takes(begun):
    (unseen,) = begun("served").results["refused"][0]
    assert unseen == "DeviceError: --devices names cuda:1, TensorFlow sees 0 GPUs; name others."


@pytest.mark.slow
def test_tensorflow_itself_cannot_compile_what_uses_a_variable_on_another_device():
    ended = run("alone", 1, [sys.executable, SUPPORT / "tensorflow_distribute_xla.py"])
    assert ended.code == 1
    assert "Trying to access resource" in ended.err and "InvalidArgumentError" in ended.err


# Whole runs, as they are started.


@pytest.mark.slow
def test_a_run_continues_under_another_engine(begun, tmp_path, train_here):
    argv = [*LINE, "--output", tmp_path / "moved"]
    train_here("tensorflow", *argv, "--max-steps", "25", "--engine", "local").good()
    ended = train("tensorflow", "gloo", 2, *argv, "--max-steps", "38", "--engine", "multiworker").good()
    assert "resuming from step 25" in ended.out
    train_here("tensorflow", *argv, "--engine", "mirrored", "--devices", "cpu").good()
    assert furthest(losses(tmp_path / "moved"), begun("one").losses("local", "line")) < 1e-5


# A proxy that does not answer, in every variable; the user's exceptions from it are kept.
NAMES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
PROXY = {"no_proxy": "example.org", "NO_PROXY": "example.org", **dict.fromkeys(NAMES, "http://127.0.0.1:9")}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["multiworker", "parameter-server"])
def test_a_lost_rank_ends_the_others(engine, tmp_path):
    argv = ["linear", "--epochs", "4000", "--log-every-steps", "1", "--engine", engine, "--output", tmp_path]
    with started("gloo", 2, command("tensorflow", *argv), **PROXY) as ranks:
        wait_for_step(ranks, tmp_path, 5)
        ranks.kill_rank(1)
        ended = ranks.wait()
    assert ended.code != 0
    assert ended.left == []
    assert ended.lines[0].startswith(f"AbortedError (rank 0 on {HOST}): rank 1 on {HOST} ended without a message")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_a_run_of_a_parameter_server_stops_in_order(tmp_path):
    argv = [*LINE, "--engine", "parameter-server", "--output", tmp_path]
    with started("gloo", 2, command("tensorflow", *argv), **held(7)) as ranks:
        ended = stopped_at(ranks, tmp_path, 7, lambda: ranks.members()[1], signal.SIGUSR2)
    assert ended.code != 0
    assert ended.left == []
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "stopped"
    assert any("SIGUSR2: stopped after step" in line for line in ended.lines), ended.err
