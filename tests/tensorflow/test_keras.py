"""hvdtrain.keras in a user's Keras code: real ranks, compared with one process on the whole batch."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from marks import marked
from paths import REPOSITORY
from ranks import clean_environ, needs_tensorflow, once, programs, run

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900), needs_tensorflow]

EXACT = ("mask, unequal local batches", "two outputs")
EXACT_MORE = (
    "no reduction", "synchronized, late", "mask", "ignored class", "sum", "weights", "weights, eagerly",
    "weights, accumulating", "synchronized", "synchronized, numbered", "by name", "by configuration",
    "loss scale outside", "float16 by compile", "weights, several steps a call",
)  # fmt: skip
"""Each of these takes seconds on every rank, and differs from one above in a setting."""
XLA = (
    "KerasError: XLA cannot compile Horovod's collectives: compile the model with jit_compile=False, or give fit "
    "the callback that broadcasts, which turns it off; take jit_compile=True off a tf.function of your own."
)
STOCK = "KerasError: Horovod's own DistributedOptimizer averages nothing under Keras 3, which never calls it"
APART = "2 ranks would train apart; compile the model with hvdtrain.keras's DistributedOptimizer."
PLAIN = f"KerasError: optimizer 'sgd' is a plain one: {APART}"
REFUSALS = {
    "twice": "KerasError: the optimizer is distributed already: wrap it once.",
    "accumulation in two places": "KerasError: the optimizer has gradient_accumulation_steps=3 already: leave that or "
    "backward_passes_per_step out.",
    "no pass": "KerasError: backward_passes_per_step must be at least 1, got 0.",
    "an unknown option": "KerasError: average is no option of Horovod's: leave it out.",
    "predivided sum": "KerasError: gradient_predivide_factor=2.0 goes with op=Average alone.",
    "groups of Adasum": "KerasError: Adasum combines each gradient by itself: leave groups out.",
    "stock wrapped": f"{STOCK}; give the Keras optimizer itself to hvdtrain.keras's DistributedOptimizer.",
    "stock": f"{STOCK}: {APART}",
    "stock in float16": f"{STOCK}: {APART}",
    "plain, broadcast": PLAIN,
    "plain, metrics": PLAIN,
    "plain, warm-up": PLAIN,
    "an older function": "KerasError: fit made its steps without the distributed optimizer, in a function older than "
    "it; compile the model again, then fit.",
    "twice around a loss scale": "KerasError: the optimizer is distributed already: wrap it once.",
    "no optimizer": "KerasError: DistributedOptimizer needs an optimizer, its name or its configuration, got None.",
    "under a strategy": "KerasError: the model was made under tf.distribute's MirroredStrategy, whose replicas are not",
    "XLA": XLA,
    "XLA, accumulating": XLA,
    "XLA in a loop": XLA,
    "XLA, synchronised": XLA,
    "XLA, broadcast": XLA,
    "validated by one rank": "KerasError: rank 1 logs loss, but rank 0 loss, val_loss: MetricAverageCallback needs the "
    "same metrics of every rank; validate on all ranks or on none.",
    "an unknown length": "KerasError: WarmupCallback needs steps_per_epoch where Keras does not know an epoch's "
    "length.",
    "a stop of one rank": "AgreementError: the ranks differ in next epoch: ",
    "an LR of one rank": "AgreementError: the ranks differ in LR of optimizer: rank 1 on ",
    "an epoch that one rank leaves": "AgreementError: the ranks differ in steps of this epoch: rank 1 on ",
    "weights of one rank": "ReplicaError: after step 1 the ranks differ in weights: rank 1 on ",
    "a second optimizer": f"KerasError: optimizer 'other' is a plain one: {APART}",
    "another vocabulary": "AgreementError: the ranks differ in constant ",
    "another constant": "AgreementError: of the same examples and weights the model computes something else on rank 1 ",
    "another constant, from a data set": "AgreementError: of the same examples and weights the model computes ",
    "another world": "WorldError: mpiexec promised rank 0 of 4",
}
REFUSED = {
    "twice", "no pass", "groups of Adasum", "stock", "plain, broadcast", "an older function", "under a strategy",
    "XLA, broadcast", "validated by one rank", "a stop of one rank", "another vocabulary", "another constant",
    "another world", "weights of one rank",
}  # fmt: skip
"""One of each kind; the others are slow."""
REFUSED_MORE = [case for case in REFUSALS if case not in REFUSED]
TOLERANCES = {
    "fit": 2e-6,
    "thawed later": 2e-6,
    "auto": 2e-6,
    "auto on a GPU": 2e-6,
    "eagerly": 2e-6,
    "several steps a call": 2e-6,
    "adamw": 5e-7,
    "sync batch norm": 1e-5,
    "sync batch norm, float64": 1e-12,
    "batch norm": 5e-6,
    "accumulating": 5e-7,
    "accumulating, each step": 5e-7,
    "sparse": 5e-7,
    "sparse as dense": 5e-7,
    "float16": 1e-2,
    "float16 overflow": 1e-2,
    "float16 accumulating": 1e-2,
}
# These two have no counterpart in one process: "built by a batch" and "dropout".
FIRST = ("fit", "sync batch norm", "float16 overflow")
MORE = tuple(case for case in TOLERANCES if case not in FIRST)
OVER_GLOO = ["sync batch norm", "sparse", "accumulating", "float16 overflow"]
COMMON: dict[str, Any] = {
    "loops": {},
    "moments": {"offset": 1000.0},
    "masked_norm": {},
    "metrics": {"folder": "FOLDER"},
}
LAUNCHES: dict[str, dict[str, Any]] = {
    "alone-1": {
        **COMMON,
        "trainings": {"names": FIRST},
        "exact": {"names": EXACT},
        "roles": {},
        "formed": {},
        "reads": {"folder": "FOLDER"},
    },
    "mpi-2": {
        **COMMON,
        "trainings": {"names": [*FIRST, "built by a batch"]},
        "updates": {"adasum": True},
        "single_source": {},
        "started": {},
        "own_step": {},
        "formed": {},
        "warmups": {},
        "allreduces": {},
        "exact": {"names": EXACT},
        "refusals": {"names": [case for case in REFUSALS if case in REFUSED]},
        "modules": {},
        "roles": {},
        "reads": {"folder": "FOLDER", "left": ["changing"]},
    },
    "alone-1-more": {"trainings": {"names": MORE}, "exact": {"names": EXACT_MORE}},
    "mpi-2-more": {
        "trainings": {"names": [*MORE, "dropout"]},
        "exact": {"names": EXACT_MORE},
        "noted": {},
        "saved": {"folder": "FOLDER"},
        "refusals": {"names": REFUSED_MORE},
        "pairs": {"folder": "FOLDER"},
    },
    "gloo-2": {
        **COMMON,
        "trainings": {"names": OVER_GLOO},
        "updates": {"adasum": False},
        "started": {},
        "evaluates": {"folder": "FOLDER"},
        "folds": {},
        "again": {"folder": "FOLDER"},
    },
}


@dataclass(frozen=True)
class World:
    """The results of one launch, by program and rank, and its output."""

    folder: Path
    results: dict[str, list[Any]]

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """`world("mpi-2")`: the results of that launch of LAUNCHES; each is started once."""

    @once
    def of(name: str) -> World:
        launcher, size, *_ = name.split("-")
        folder = tmp_path_factory.mktemp(name)
        given = json.loads(json.dumps(LAUNCHES[name]).replace("FOLDER", str(folder)))
        return World(folder, programs("tensorflow_keras", launcher, int(size), folder, given))

    return of


def furthest(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 0
    return float(np.abs(np.subtract(ours, theirs)).max())


@pytest.mark.parametrize(
    ("launch", "case"),
    marked(
        [
            *[("mpi-2", case) for case in FIRST],
            *[("mpi-2-more", case) for case in MORE],
            *[("gloo-2", case) for case in OVER_GLOO],
        ],
        slow={"mpi-2-more", "gloo-2"},
    ),
)
def test_fit_on_two_ranks_is_fit_on_their_batches_together(world, launch, case):
    ours, others = [results[case] for results in world(launch).results["trainings"]]
    alone = world("alone-1-more" if case in MORE else "alone-1").results["trainings"][0][case]
    assert ours["weights"] == others["weights"]
    assert ours["state"] == others["state"]
    assert str(ours["history"]) == str(others["history"])
    assert furthest(ours["weights"], alone["weights"]) < TOLERANCES[case]
    if case != "batch norm":  # its reference is a loop without Keras's fit
        assert furthest(ours["state"], alone["state"]) < TOLERANCES[case]
        for name, values in alone["history"].items():
            np.testing.assert_allclose(ours["history"][name], values, rtol=max(1e-5, TOLERANCES[case]))
    assert ours["jit"] is False


@pytest.mark.parametrize(
    ("case", "scale", "updates"),
    marked([("float16 overflow", 256, 22), ("float16 accumulating", 256, 7)], slow={"float16 accumulating"}),
)
def test_every_rank_skips_the_step_in_which_one_overflows(world, case, scale, updates):
    more = "-more" * (case in MORE)
    for results in [*world(f"mpi-2{more}").results["trainings"], *world(f"alone-1{more}").results["trainings"]]:
        assert (results[case]["scale"], results[case]["updates"]) == (scale, updates)


@pytest.mark.slow
def test_dropout_stays_each_ranks_own(world):
    ours, others = [results["dropout"] for results in world("mpi-2-more").results["trainings"]]
    assert ours["weights"] == others["weights"]
    assert ours["seeds"] != others["seeds"]


def test_a_model_that_its_first_batch_builds_becomes_one(world):
    ours, others = [results["built by a batch"] for results in world("mpi-2").results["trainings"]]
    assert (ours["weights"], ours["state"]) == (others["weights"], others["state"])


@pytest.mark.parametrize("launch", marked(["mpi-2", "gloo-2"], slow={"gloo-2"}))
def test_a_step_of_ones_own_is_a_step_on_the_whole_batch(world, launch):
    alone = world("alone-1").results["loops"][0]
    ours, others = world(launch).results["loops"]
    assert ours == others
    for written, weights in ours.items():
        assert furthest(weights, alone[written]) < 5e-6, written


@pytest.mark.parametrize("case", marked([*EXACT, *EXACT_MORE], slow=EXACT_MORE))
def test_a_loss_or_optimizer_of_another_kind_is_that_of_the_whole_batch(world, case):
    more = "-more" * (case in EXACT_MORE)
    alone = world(f"alone-1{more}").results["exact"][0]
    ours, others = [results[case] for results in world(f"mpi-2{more}").results["exact"]]
    assert ours == others
    limit = 1e-2 if "float16" in case else 5e-6
    assert furthest(ours["weights"], alone[case]["weights"]) < limit
    for name, values in alone[case]["history"].items():
        np.testing.assert_allclose(ours["history"][name], values, rtol=limit, err_msg=name)


@pytest.mark.slow
def test_a_loss_that_is_no_mean_over_examples_is_named(world):
    out = world("mpi-2-more").out
    assert re.findall(r"loss (.*?) is no mean over examples", out) == [
        *("dice", "mse and add_loss", "circle", "against_all", "dice")
    ]
    assert out.count("the ranks' batches have unequal numbers of examples, and the mean of each counts alike") == 1
    assert out.count("Summed has a train_step of its own: ") == 1


@pytest.mark.slow
def test_looking_at_a_loss_draws_none_of_pythons_random_numbers(world):
    assert world("mpi-2-more").results["noted"] == [{"drew": False}] * 2


UPDATES = {
    "average": [-1.5, -15],
    "sum": [-3, -30],
    "predivided": [-1.5, -15],
    "compressed": [-1.5, -15],
    "compressed, the sum too large": [-49152, -15],
    "one group": [-1.5, -15],
    "more groups than weights": [-1.5, -15],
    "a list of groups": [-1.5, -15],
    "the same gradient twice": [-1.5, -1.5],
    "without a gradient": [0, -15],
    "sparse": [-1.5, -15],
    "sparse in a group": [-1.5, -15],
    "sparse as dense": [-1.5, -15],
}


@pytest.mark.parametrize("launch", marked(["mpi-2", "gloo-2"], slow={"gloo-2"}))
def test_options_are_arithmetic(world, launch):
    for rank, results in enumerate(world(launch).results["updates"]):
        local = [-1.5, -10 * (rank + 1) / 2]
        adasum = {"adasum": [-1.5, -15]} if launch == "mpi-2" else {}
        assert results == {**UPDATES, "local layer": local, "sparse local layer": local, **adasum}


def test_accumulation_communicates_at_the_update_where_it_can(world):
    for results in world("mpi-2").results["allreduces"]:
        assert results == {"at the update": [0, 0, 6, 0, 0, 6], "each step": [6] * 6}


def test_a_single_source_gives_a_single_gradient(world):
    assert world("mpi-2").results["single_source"] == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("launch", marked(["mpi-2", "gloo-2"], slow={"gloo-2"}))
def test_broadcast_takes_any_variables(world, launch):
    assert world(launch).results["started"] == [{"whole": 2**53 + 1, "pair": [1.1, 1.1, 1.5], "single": [1.0]}] * 2


@pytest.mark.parametrize("launch", marked(["alone-1", "mpi-2", "gloo-2"], slow={"gloo-2"}))
def test_moments_are_those_of_all_values(world, launch):
    limits = {
        "float32": {"mean": 2e-7, "variance": 1e-4, "count": 0, "gradient": 2e-4},
        "float64": {"mean": 1e-15, "variance": 1e-12, "count": 0, "gradient": 1e-12},
    }
    for results in world(launch).results["moments"]:
        assert len(results) == 8
        for case, found in results.items():
            dtype = case.partition(" ")[0]
            assert (found["dtype"], found["shape"]) == (dtype, [4, 4, 4])
            for name, limit in limits[dtype].items():
                assert found[name] <= limit, (case, name)


@pytest.mark.parametrize("launch", marked(["mpi-2", "gloo-2"], slow={"gloo-2"}))
def test_masked_batch_norm_is_kerass_on_all_sequences(world, launch):
    alone = world("alone-1").results["masked_norm"][0]
    results = world(launch).results["masked_norm"]
    assert np.abs(np.concatenate([rank["out"] for rank in results]) - alone["out"]).max() < 1e-5
    for rank in results:
        assert furthest(rank["statistics"], alone["statistics"]) < 1e-6
        assert rank["config"]


@pytest.mark.parametrize("launch", marked(["mpi-2", "gloo-2"], slow={"gloo-2"}))
def test_metrics_are_those_of_all_examples_whatever_the_local_batches(world, launch):
    alone = world("alone-1").results["metrics"][0]["history"]
    ours, others = world(launch).results["metrics"]
    assert ours["history"] == others["history"]
    assert ours["later"] == others["later"]
    assert {"loss", "accuracy", "auc", "f1_score", "mae", "val_loss", "val_auc", "val_r2_score"} < alone.keys()
    assert ours["history"].pop("unknown") == [0.5, 0.5]  # no metric computes it
    for name in alone.keys() - {"unknown"}:
        np.testing.assert_allclose(ours["history"][name], alone[name], rtol=1e-6, err_msg=name)
        mean = np.mean([np.ravel(rank["own"][-1][name]) for rank in (ours, others)], 0)
        assert np.abs(mean - alone[name][-1]).max() > 1e-3, f"{name} would be right by chance"
    for rank in (ours, others):
        assert rank["undisturbed"]
        assert rank["stored"]
        assert rank["predicted"]
        for name, value in world("alone-1").results["metrics"][0]["evaluated"].items():
            np.testing.assert_allclose(rank["evaluated"][name], value, rtol=1e-6, err_msg=name)
        in_order = world("alone-1").results["metrics"][0]["in order"]
        np.testing.assert_allclose(rank["in order"], in_order, rtol=1e-6)


def test_each_step_of_fit_reads_the_rows_of_one_process(world):
    (alone,), ranks = world("alone-1").results["reads"], world("mpi-2").results["reads"]
    for name, steps in alone.items():
        together = [one + other for one, other in zip(*(rank[name] for rank in ranks), strict=True)]
        assert together == steps, name
    for name, width in {"few steps": 6, "many steps": 6}.items():
        for epoch in (alone[name][k : k + width] for k in range(0, len(alone[name]), width)):
            assert len({row for step in epoch for row in step}) == 4 * len(epoch), "a row twice in an epoch of the data"
    assert sorted(alone["few steps"]) == sorted(alone["many steps"][:12]) != sorted(alone["many steps"][4:])
    assert alone["in order"] == 2 * np.arange(24).reshape(6, 4).tolist()
    assert {text for step in alone["texts"] for text in step} == {"a", "bc", "def ghi"}
    line = "fit's shuffle=False has no effect; give it to GlobalBatches"
    assert world("alone-1").out.count(line) == world("mpi-2").out.count(line) == 1


def test_a_set_that_changes_itself_is_in_each_epoch_what_it_is_undisturbed(world):
    (alone,), ranks = world("alone-1").results["reads"], world("mpi-2").results["reads"]
    assert [int(step[0]) // 10 for step in alone["changing"]] == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    for rank in ranks:
        assert rank["changing, left"] == rank["changing"]


def test_each_role_of_global_batches_reads_its_rows_once(world):
    (alone,), ranks = world("alone-1").results["roles"], world("mpi-2").results["roles"]
    together = [one + other for one, other in zip(*(rank.pop("several fits") for rank in ranks), strict=True)]
    assert together == alone.pop("several fits")
    epochs = [sorted(map(tuple, together[k : k + 6])) for k in (0, 6, 12)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert ranks == [alone] * 2
    x = np.arange(25.0)
    error = x + (x > 20) * 100
    for name, of in {"": error, ", 2 steps": error[:8]}.items():
        assert alone[f"validated{name}"] == pytest.approx([of.mean()], rel=1e-6)
        assert alone[f"evaluated{name}"] == pytest.approx([(of**2).mean(), of.mean()], rel=1e-6)
        assert alone[f"predicted{name}"] == x[: len(of)].tolist()
    assert alone["hooks"] == ["begin", "end"] * 2
    assert alone["refused"] == "the set changes by itself and cannot be in epoch 1 again; make one a fit."


def test_metrics_of_any_form_are_exact_or_named(world):
    alone = world("alone-1").results["formed"][0]
    ours, others = world("mpi-2").results["formed"]
    assert (ours["fit"], ours["evaluate"]) == (others["fit"], others["evaluate"])
    named = {line.partition(":")[0] for line in ours["lines"].splitlines() if line.startswith("metric ")}
    assert named == {"metric of batches", "metric kept", "metric drawn"} and not others["lines"]
    for kind in ("fit", "evaluate"):
        assert ours[kind].keys() == alone[kind].keys() > {"value", "deep", "flat", "array", "from one", "high", "low"}
        for name in alone[kind].keys() - {"of batches", "kept", "drawn"}:
            np.testing.assert_allclose(ours[kind][name], alone[kind][name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_evaluation_inside_an_epoch_leaves_the_runs_loss_alone(world):
    assert world("gloo-2").results["evaluates"] == [1.0] * 2
    assert "val_los, which decides on the best checkpoint, was not logged as one number" in world("gloo-2").out


@pytest.mark.slow
def test_callbacks_are_used_for_one_model_after_the_other(world):
    ours, others = world("gloo-2").results["folds"]
    assert ours == others


@pytest.mark.slow
def test_what_has_ended_is_not_trained_further(world):
    ours, others = world("gloo-2").results["again"]
    assert ours == others
    assert ours.pop("another model") == 2
    assert {name: (each["epochs"], each["status"]) for name, each in ours.items()} == {
        "stopped early": ([0, 1, 2], "finished"),
        "the same": ([0, 1, 2], "finished"),
        "more": ([0, 1, 2, 3, 4, 5], "finished"),
        "from the fifth": ([5, 6], "finished"),
        "from the fifth again": ([5, 6], "finished"),
        "none": ([5, 6], "finished"),
    }
    assert ours["the same"]["weights"] == ours["stopped early"]["weights"]
    assert ours["from the fifth again"]["weights"] == ours["from the fifth"]["weights"]


@pytest.mark.slow
def test_all_optimizers_of_a_model_are_resumed(world):
    ours, others = world("mpi-2-more").results["pairs"]
    assert ours == others
    assert ours["resumed"] == ours["at once"] != ours["first"]


def test_what_a_step_of_ones_own_logs_under_a_metrics_name_is_averaged(world):
    assert world("mpi-2").results["own_step"] == [{"loss": [5.0], "steps": [1.0]}] * 2


def test_warm_up_rises_to_the_peak(world):
    rising = [[0.45, 0.5, 0.55, 0.6], [0.65, 0.7, 0.75, 0.8], [0.8] * 4, [0.8] * 4]
    for results in world("mpi-2").results["warmups"]:
        np.testing.assert_allclose(results["every batch"], rising, rtol=1e-6)
        np.testing.assert_allclose(
            results["two batches a call"], [[0.45, 0.55], [0.65, 0.75], [0.8] * 2, [0.8] * 2], 1e-6
        )
    printed = [line for line in world("mpi-2").out.splitlines() if "LR warm-up" in line]
    assert [line.partition("<stdout>: ")[2] for line in printed] == [
        "LR warm-up: 0.4 to 0.8 (2 ranks) over 2 epochs of 4 steps"
    ] * 2


@pytest.mark.slow
def test_a_stored_model_continues(world):
    ours, others = world("mpi-2-more").results["saved"]
    assert ours["continued"] == ours["uninterrupted"] == others["continued"]
    assert ours["loaded"] == ["Adam", False]
    assert ours["config"]


@pytest.mark.slow
def test_a_stored_model_loads_without_hvdtrain(world):
    program = """
import sys, keras
model = keras.models.load_model(sys.argv[1])
assert not {"hvdtrain", "horovod"} & sys.modules.keys()
print(type(model.optimizer).__module__, type(model.optimizer).__name__, int(model.optimizer.iterations))
"""
    stored = world("gloo-2").folder / "best-0.keras"
    ended = run("alone", 1, [sys.executable, "-c", program, str(stored)]).good()
    assert ended.out.split() == ["keras.src.optimizers.sgd", "SGD", "6"]


@pytest.mark.parametrize("case", marked(REFUSALS, fast=REFUSED))
def test_what_would_go_wrong_is_refused(world, case):
    kind, _, reason = REFUSALS[case].partition(": ")
    for results in world("mpi-2" if case in REFUSED else "mpi-2-more").results["refusals"]:
        assert results[case].startswith(f"{kind}: ")  # TensorFlow may put "in user code" before the reason
        assert reason in results[case]


def test_no_process_holds_both_frameworks(world):
    assert world("mpi-2").results["modules"] == [["horovod", "tensorflow"]] * 2


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)```", (REPOSITORY / "docs" / "keras.md").read_text(), re.DOTALL | re.MULTILINE)


CHECK = """
import numpy as np

weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])[None]
everybodys = hvd.allgather(weights.astype("float64")).numpy()
assert len(everybodys) == 2 and (everybodys == everybodys[0]).all()
"""
ACCURATE = "assert model.history.history['accuracy'][-1] > 0.95"
OUTCOMES = {"fit": ACCURATE, "resumable": ACCURATE, "loop": "assert loss < 0.3"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OUTCOMES)), ids=OUTCOMES)
def test_the_pages_examples_train_one_model(number, tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(examples()[number] + CHECK + list(OUTCOMES.values())[number] + "\n")
    run("mpi", 2, warm.command("tensorflow", program), cwd=tmp_path).good()


def test_the_pages_examples_use_every_name():
    reference = (REPOSITORY / "docs" / "reference" / "keras.md").read_text()
    assert len(examples()) == len(OUTCOMES)
    for name in re.findall(r"^::: hvdtrain.*\.(\w+)$", reference, re.MULTILINE):
        assert f"hvd.{name}(" in "".join(examples()), name


def here(program: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in clean_environ().items() if name != "KERAS_BACKEND"} | environ
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=clean)


INLINE = """
import keras, numpy as np
import hvdtrain.keras as hvd

hvd.init()
x = np.arange(12.0)[:, None]
keras.utils.set_random_seed(3)  # with which Keras itself would read the steps in another order
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
seen = []
step = model.train_step
model.train_step = lambda data: seen.append(data[0].numpy().ravel().tolist()) or step(data)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)), "mse", run_eagerly=True)
model.fit(hvd.GlobalBatches((x, x), 2, shuffle=False), callbacks=[hvd.BroadcastCallback()], verbose=0)
assert sum(seen, []) == list(range(12)), seen
"""


def test_a_fit_reads_global_batches_that_its_own_line_makes():
    done = here(INLINE)  # `model.fit` is looked up before `hvd.GlobalBatches` is
    assert done.returncode == 0, done.stderr


TAKEN = """
import keras, numpy as np
import hvdtrain.keras as hvd
from hvdtrain.errors import DataError

hvd.init()
x, y = np.arange(8.0)[:, None], np.arange(8.0)
batch = hvd.GlobalBatches(([x, x], y), 2, shuffle=False)[0]
assert keras.tree.map_structure(len, batch) == ((2, 2), 2), batch
for given in [(x, y[1:]), (x, y.tolist()), (x, [[1], [2, 3]]), (np.array([[1], None], object), y[:2])]:
    try:
        hvd.GlobalBatches(given, 2)
    except DataError as error:
        print(error)
"""


def test_what_global_batches_take_is_named():
    done = here(TAKEN)
    uneven, of_lists, of_list, of_objects = done.stdout.splitlines()
    assert "must have one length and hold numbers or texts" in uneven
    assert of_lists.endswith("must hold arrays, got a float in it; take numpy.array of lists.")
    assert of_list.endswith("must hold arrays, got a int in it; take numpy.array of lists.")
    assert "must have one length and hold numbers or texts" in of_objects


BARS = """
import hvdtrain.keras as hvd
from keras.callbacks import CallbackList, ProgbarLogger
from hvdtrain.keras import fault_tolerance as module
from hvdtrain.terminal import SCREEN

def left(display):
    SCREEN.display, kept = display, []
    run = hvd.FaultTolerance("run")
    run._session.join_ranks = lambda: None
    module.list_of = lambda callback: CallbackList([ProgbarLogger(), run])
    module._check = lambda run, callbacks: kept.extend(callbacks) or 1 / 0
    try:
        run.on_train_begin()
    except ZeroDivisionError:
        return [type(each).__name__ for each in kept]

print(left("shared"), left("lines"))
"""


def test_no_bar_of_keras_where_a_launcher_would_tear_it():
    done = here(BARS)
    assert done.stdout == "['FaultTolerance', 'ProgbarLogger'] ['FaultTolerance']\n", done.stderr


@pytest.mark.parametrize("package", ["keras", "tensorflow"])
def test_the_package_loads_no_framework(package):
    program = f"""
import sys, hvdtrain.{package} as hvd
assert {{"DistributedOptimizer", "allreduce"}} < set(dir(hvd))
try: hvd.torch
except AttributeError as error: print(error)
print(sorted({{"tensorflow", "keras", "horovod", "torch"}} & sys.modules.keys()))
"""
    assert here(program).stdout == f"module 'hvdtrain.{package}' has no attribute 'torch'\n[]\n"


def test_keras_2_has_a_road_of_its_own():
    ended = here("import hvdtrain.keras as hvd\nhvd.init()", TF_USE_LEGACY_KERAS="1")
    assert ended.stderr.splitlines()[-1] == (
        "hvdtrain.errors.KerasError: TF_USE_LEGACY_KERAS makes tf.keras Keras 2, and hvdtrain.keras is for Keras 3: "
        "unset it, or import horovod.tensorflow.keras, of the Horovod that `python -m hvdtrain build` makes."
    )


@pytest.mark.parametrize("imported", [False, True], ids=["chosen", "imported"])
def test_keras_on_another_backend_is_refused(imported):
    fake = "import sys, types; config = types.SimpleNamespace(backend=lambda: 'jax')\n"
    fake += "sys.modules['keras'] = types.SimpleNamespace(config=config)\n"
    program = (fake if imported else "") + "import hvdtrain.tensorflow as hvd\nhvd.init()"
    ended = here(program, **({} if imported else {"KERAS_BACKEND": "jax"}))
    assert ended.stderr.splitlines()[-1] == (
        "hvdtrain.errors.KerasError: Keras runs on jax, hvdtrain.keras needs it on TensorFlow; "
        "set KERAS_BACKEND=tensorflow before Keras is imported."
    )


def test_without_horovod_the_build_is_named():
    program = """
import sys
for name in [*sys.modules]:
    if name.startswith(("horovod", "hvdtrain")):
        del sys.modules[name]
sys.modules["horovod"] = None
import hvdtrain.tensorflow as hvd
hvd.size()
"""
    ended = run("alone", 1, warm.command("tensorflow", "-c", program))
    assert ended.err.splitlines()[-1].startswith(
        "hvdtrain.errors.EngineUnavailable: Horovod for TensorFlow cannot be imported ("
    )
    assert ended.err.endswith("build it: python -m hvdtrain build --frameworks tensorflow\n")
