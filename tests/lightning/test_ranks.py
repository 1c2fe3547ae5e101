"""Lightning on real ranks: recipes under ddp and Horovod against hvdtrain.torch, and modules as users write them."""

import json

import numpy as np
import pytest
from marks import marked
from ranks import NEEDS, needs_lightning, once, programs
from worlds import losses, of_kind

pytestmark = [pytest.mark.launched, pytest.mark.timeout(900), NEEDS["torch"], needs_lightning]

LINE = ["linear", "--epochs", "2", "--log-every-steps", "1", "--guard-every-steps", "10"]
TINY = [
    "synthetic:tiny", "--batch-size", "16", "--examples", "64", "--epochs", "9", "--log-every-steps", "1",
    "--lr-rule", "none", "--base-lr", "0.001", "--weight-decay", "5e-4",
]  # fmt: skip
CASES = {
    "line": LINE,
    "clipped micro-batches": [*LINE, "--accumulation-steps", "5", "--clip-norm", "0.05", "--momentum", "0.5"],
    "uneven": [*LINE, "--batch-size", "99"],
    "network": [*TINY, "--batch-norm", "frozen", "--max-steps", "3"],
}
FEW = [*TINY, "--examples", "16", "--max-steps", "1"]
MORE = {
    "bfloat16": [*LINE, "--precision", "bfloat16"],
    "float16": [*LINE, "--precision", "float16", "--compression", "fp16", "--clip-norm", "0.05", "--fused-optimizer"],
    "local network": [*TINY, "--max-steps", "5", "--nesterov", "--momentum", "0.9", "--channels-last"],
    "sync float64": [*TINY, "--batch-norm", "sync", "--precision", "float64", "--max-steps", "2"],
}
INSIDE = [*LINE, "--checkpoint-every-steps", "3", "--checkpoint-every-epochs", "9"]
STOPPED = {"torch begun": [*INSIDE, "--max-steps", "17"], "signalled": INSIDE}
BOTH, HOROVOD = ("torch", "horovod", "ddp"), ("torch", "horovod")
RECIPES = {
    "mpi-1": {"line": BOTH},
    "mpi-2": {
        **{"line": BOTH, "clipped micro-batches": HOROVOD, "uneven": HOROVOD, "network": BOTH},
        "few": ["horovod"],
    },
    "mpi-2-more": {
        **{"bfloat16": BOTH, "sync float64": BOTH, "few": ["ddp"]},
        **{"float16": HOROVOD, "local network": HOROVOD},  # ddp has other compressions, and averages local statistics
    },
    "mpi-4": dict.fromkeys(CASES, BOTH),
    "gloo-2": {"line": BOTH},
}
"""By launch and case, the adapters and strategies that train it."""
SETTINGS = {
    "plain": {},
    "micro-batches": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
}
TRAINERS = ["plain", "micro-batches", "scheduled", "averaged", "limited", "overfitted", "stopped", "reloaded"]
TRAINERS += ["barebones", "clocked", "tried", "sums", "sums of micro-batches", "terms"]
OF_DDP = ["ddp plain", "ddp sums", "ddp sums of micro-batches", "ddp terms"]
"""The trainers that tests which are not slow run under ddp too."""
OF_HOROVOD = [f"horovod {case}" for case in TRAINERS]
WAYS = {
    "mpi-1": [*OF_HOROVOD, "ddp plain", "ddp terms", "auto terms"],
    "mpi-2": [*OF_HOROVOD, *OF_DDP],
    "mpi-2-more": [way for case in TRAINERS if (way := f"ddp {case}") not in OF_DDP],
}
"""By launch, strategy and Trainer."""

STEPS = ["phases", "in turn", "finetuned", "grown", "gathered", "averaged", "every second", "without manual_backward"]
"""Kinds of steps that train on any number of ranks as on one; see lightning_steps.py."""
BY_HAND = "ReplicaError: after step 1 the ranks differ in weights: rank 1 on "
NO_LOSS = "LoopError: rank 1 has no backward where rank 0 is in backward 1 of update 2: "
UNEQUAL = "AgreementError: the ranks differ in tensor: rank 1 on "
FOREIGN = "LoopError: an optimizer updates parameters that are not the module's, whose gradients "
WRONG_STEPS = {
    "horovod by hand": BY_HAND,
    "horovod absent": NO_LOSS,
    "horovod None": NO_LOSS,
    "horovod twice": "LoopError: rank 1 is in backward 2 of update 2",
    "horovod foreign": FOREIGN,
    "horovod line search": "LoopError: an optimizer with line_search_fn steps by each rank's own loss",
    "horovod unequal": UNEQUAL,
    "ddp unequal": UNEQUAL,
    "ddp left out": "LoopError: rank ",
    "ddp by hand": BY_HAND,
    "ddp without manual_backward": BY_HAND,
    "ddp thawed inside": BY_HAND,
    "ddp foreign": FOREIGN,
    "ddp noise": BY_HAND,
    "horovod noise": BY_HAND,
}
"""What is refused, and how the error begins."""
WAYS_OF_STEPS = {
    "mpi-1": [f"horovod {kind}" for kind in (*STEPS, "thawed inside")],
    "mpi-2": [*(f"horovod {kind}" for kind in STEPS), "ddp phases", "ddp gathered", *list(WRONG_STEPS)[:9]],
    "mpi-2-more": [
        *(f"ddp {kind}" for kind in STEPS[:-1]),
        *("static phases", "static in turn", "unused phases", "unused in turn", "unused finetuned"),
        *("tolerant phases", "horovod thawed inside"),
        *list(WRONG_STEPS)[9:],
    ],
    "mpi-4": ["horovod gathered", "ddp gathered"],
    "torchrun-2": ["horovod phases"],
}


def recipes_of(name, folder):
    """The command line of each recipe's run in a launch."""
    every = CASES | MORE | {"few": FEW}
    argv = {}
    for case, ways in RECIPES[name].items():
        for way in ways:
            engine = ["--engine", "horovod" if way == "torch" else way]
            argv[f"{way} {case}"] = [*every[case], *engine, "--output", str(folder / f"{way} {case}")]
    if name == "mpi-2":
        for run, given in STOPPED.items():
            output = ["--engine", "horovod", "--output", str(folder / run)]
            argv |= {run: [*given, *output], f"continued from {run}": [*INSIDE, *output]}
    return argv


def given(name, folder):
    """The programs of a launch, with the values that they are called with."""
    programs = {}
    ways = WAYS_OF_STEPS.get(name, [])
    of_horovod = [way for way in ways if way.startswith(("horovod", "tolerant"))]
    programs |= {"steps": {"ways": of_horovod, "folder": str(folder)}}
    if name == "torchrun-2":
        return programs
    if name in {"mpi-2", "mpi-4"}:
        settings = SETTINGS if name == "mpi-2" else {"plain": {}}
        programs |= {"own_module": {"folder": str(folder / "own"), "settings": settings}}
        programs |= {"manual": {"folder": str(folder / "manual")}}
    if name in WAYS:
        programs |= {"trainers": {"ways": WAYS[name]}}
    if name == "mpi-2":
        programs |= {"resumed": {"folder": str(folder / "own")}, "refused": {"name": "horovod"}}
    if name == "mpi-2-more":
        programs |= {"refused": {"name": "ddp"}}
    programs |= {"recipes": {"given": recipes_of(name, folder)}}
    if name != "mpi-2-more":
        programs |= {"strategy_verbs": {}, "modules": {"folder": str(folder / "logged")}}
    of_ddp = [way for way in ways if way not in of_horovod]
    return programs | {"ddp_steps": {"ways": of_ddp, "folder": str(folder)}}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """`launched("mpi-2")`: the folder of that launch's runs, and each rank's results; each is started once."""

    @once
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        launcher, size, *_ = name.split("-")
        return folder, programs("lightning", launcher, int(size), folder, given(name, folder))

    return of


LAUNCHES = ["mpi-1", "mpi-2", "mpi-4", "gloo-2"]
on_all = pytest.mark.parametrize("name", marked(LAUNCHES, slow={"mpi-4", "gloo-2"}))
on_mpi = pytest.mark.parametrize("name", marked(["mpi-2", "mpi-4"], slow={"mpi-4"}))


def size_of(name):
    return int(name.split("-")[1])


def epoch_records(folder):
    keys = ("step", "epoch", "train_loss", "valid_loss", "valid_acc1")
    return [[record.get(key, 0) for key in keys] for record in of_kind("epoch", folder)]


@pytest.mark.parametrize("name", marked([*LAUNCHES, "mpi-2-more"], slow={"mpi-4", "gloo-2", "mpi-2-more"}))
def test_every_run_ends_as_it_should(launched, name):
    _, results = launched(name)
    for rank in results["recipes"]:
        for run, ended in rank.items():
            assert ended["code"] == (143 if run == "signalled" else 0), (run, ended)


@pytest.mark.parametrize(
    ("name", "case", "strategy"),
    marked(
        [
            (name, case, way)
            for name, cases in RECIPES.items()
            for case, ways in cases.items()
            if case in CASES
            for way in ways[1:]
        ],
        slow={"mpi-4", "gloo-2"},
    ),
)
def test_a_recipe_has_the_losses_of_the_horovod_engine(launched, name, case, strategy):
    limit = 1e-3 if case == "network" else 1e-5
    folder, _ = launched(name)
    theirs, ours = losses(folder / f"torch {case}"), losses(folder / f"{strategy} {case}")
    assert len(theirs) and ours == pytest.approx(theirs, rel=limit)
    if case == "line":
        assert ours.tolist() == theirs.tolist()
    at_epochs = epoch_records(folder / f"torch {case}")
    for mine, his in zip(epoch_records(folder / f"{strategy} {case}"), at_epochs, strict=True):
        assert mine == pytest.approx(his, rel=limit)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_precisions_and_statistics_are_those_of_the_horovod_engine(launched, case):
    folder, _ = launched("mpi-2-more")
    theirs = losses(folder / f"torch {case}")
    assert losses(folder / f"horovod {case}") == pytest.approx(theirs, rel=1e-3)
    for ours, his in zip(*(epoch_records(folder / f"{a} {case}") for a in ("horovod", "torch")), strict=True):
        assert ours == pytest.approx(his, rel=1e-3)
    if "ddp" in RECIPES["mpi-2-more"][case]:
        assert losses(folder / f"ddp {case}") == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("stopped", STOPPED)
def test_a_stopped_run_continues_as_if_nothing_had_been(launched, stopped):
    folder, results = launched("mpi-2")
    assert losses(folder / stopped).tolist() == losses(folder / "horovod line").tolist()
    assert "resuming from step" in results["recipes"][0][f"continued from {stopped}"]["out"]
    assert json.loads((folder / stopped / "status.json").read_text())["state"] == "finished"


def test_a_signal_stops_all_ranks_with_a_checkpoint(launched):
    _, results = launched("mpi-2")
    assert "StoppedError" in results["recipes"][0]["signalled"]["err"]
    assert "with a checkpoint; the same command continues from it." in results["recipes"][0]["signalled"]["err"]


def test_the_log_is_rank_0s_and_lightning_is_silent(launched):
    folder, results = launched("mpi-2")
    first, other = (rank["horovod network"] for rank in results["recipes"])
    assert other["out"] == "" and other["err"] == "" and first["err"] == ""
    assert all(line.startswith("INFO - ") for line in first["out"].splitlines())
    assert list((folder / "horovod network").glob("events.out.tfevents.*"))


@on_all
def test_the_strategys_verbs_are_arithmetic(launched, name):
    _, results = launched(name)
    size = size_of(name)
    total = size * (size + 1) / 2
    for rank, verbs in enumerate(results["strategy_verbs"]):
        assert verbs == {
            "ranks": [rank, rank, size, rank == 0],
            "reduced": {"mean": total / size, "avg": total / size, "sum": total, "max": size, "min": 1},
            "as torch says": total,
            "whole numbers": total / size - 1,
            "no tensor": "text",
            "gathered": [[other, 10 * other] for other in range(size)],
            "gradient": size,
            "of any size": [np.arange(2 * other).reshape(other, 2).tolist() for other in range(size)],
            "scalars": list(range(size)),
            "broadcast": {"rank": size - 1},
            "all": [size == 1, True],
            "any": [True],
        }


@on_all
def test_no_rank_imports_tensorflow(launched, name):
    _, results = launched(name)
    for rank in results["modules"]:
        assert "torch" in rank and not {"tensorflow", "keras"} & set(rank)


@pytest.mark.parametrize(
    ("name", "case"), marked([("mpi-4", "plain"), *(("mpi-2", s) for s in SETTINGS)], slow={"mpi-4"})
)
def test_anybodys_module_reaches_under_horovod_what_it_reaches_under_ddp(launched, name, case):
    _, results = launched(name)
    for rank in results["own_module"]:
        ours, theirs = rank[f"horovod {case}"], rank[f"ddp {case}"]
        for metric in ("accuracy", "mean", "loose"):
            assert ours["metrics"][metric] == pytest.approx(theirs["metrics"][metric], rel=1e-5)
        assert same(ours["weights"], theirs["weights"])
        # The scheduler's alone: half after an epoch, whatever the number of ranks.
        steps = 8 // size_of(name)
        assert ours["rates"] == theirs["rates"] == [0.02] * steps + [0.01] * steps


@on_mpi
def test_ranks_end_with_one_module(launched, name):
    _, results = launched(name)
    for case in results["own_module"][0]:
        weights = [rank[case]["weights"] for rank in results["own_module"]]
        learnt = [{key: value for key, value in rank.items() if "running" not in key} for rank in weights]
        assert all(rank == learnt[0] for rank in learnt)


@on_mpi
def test_metrics_are_exact_though_ranks_validate_unequal_numbers_of_batches(launched, name):
    _, results = launched(name)
    for rank in results["own_module"]:
        metrics = rank["horovod plain"]["metrics"]
        assert metrics == results["own_module"][0]["horovod plain"]["metrics"]
        assert round(metrics["accuracy"] * 25) == pytest.approx(metrics["accuracy"] * 25, abs=1e-5)
        assert metrics["accuracy"] == metrics["loose"]
        assert metrics["listed"] == rank["ddp plain"]["metrics"]["listed"] == 25
        assert metrics["logged"] == pytest.approx(metrics["mean"], rel=1e-5)


def test_a_checkpoint_of_one_strategy_continues_under_the_other(launched):
    _, results = launched("mpi-2")
    for resumed, before in zip(results["resumed"], results["own_module"], strict=True):
        assert same(resumed["horovod"], resumed["ddp"])
        assert resumed["ddp"]["head.weight"] != before["horovod plain"]["weights"]["head.weight"]


def test_only_the_last_micro_batch_of_an_update_communicates(launched):
    _, results = launched("mpi-2")
    for rank in results["own_module"]:
        averaged = {case: rank[f"horovod {case}"]["averaged"] for case in SETTINGS}
        assert averaged == {"plain": 8, "micro-batches": 4}


@on_mpi
def test_optimizers_stepped_by_hand(launched, name):
    _, results = launched(name)
    for rank in results["manual"]:
        assert same(rank["horovod"]["weights"], rank["ddp"]["weights"])
        assert rank["horovod"]["weights"] == results["manual"][0]["horovod"]["weights"]


@pytest.mark.parametrize(
    ("name", "way"),
    marked([(name, way) for name in ("mpi-2", "mpi-2-more") for way in WAYS[name]], slow={"mpi-2-more"}),
)
def test_every_trainer_reads_and_learns_the_same_whatever_the_number_of_ranks(launched, name, way):
    (one,), case = launched("mpi-1")[1]["trainers"], way.partition(" ")[2]
    alone, both = one.get(way, one[f"horovod {case}"]), [rank[way] for rank in launched(name)[1]["trainers"]]
    read = {epoch: [i for rank in both for i in rank["read"][epoch]] for epoch in alone["read"]}
    assert {e: sorted(found) for e, found in read.items()} == {e: sorted(found) for e, found in alone["read"].items()}
    for rank in both:
        assert rank["updates"] == alone["updates"]
        for key, weights in alone["weights"].items():
            np.testing.assert_allclose(rank["weights"][key], weights, rtol=1e-9)
        for metrics, of_one in zip(rank.get("alone", []), alone.get("alone", []), strict=True):
            assert metrics == pytest.approx(of_one, rel=1e-6)
    batches = {"limited": [16] * 3, "overfitted": [16] * 3, "stopped": [40, 16], "tried": [16]}
    epochs = 4 if case == "averaged" else 3
    assert [len(set(found)) for found in read.values()] == batches.get(case, [40] * epochs)
    assert [len(found) for found in read.values()] == batches.get(case, [40] * epochs)
    if case == "overfitted":
        assert len({i for found in read.values() for i in found}) == 16


def test_sums_over_counts_are_the_same_for_any_number_of_micro_batches(launched):
    for rank in launched("mpi-2")[1]["trainers"]:
        for strategy in ("horovod", "ddp"):
            whole, parts = (rank[f"{strategy} {case}"]["weights"] for case in ("sums", "sums of micro-batches"))
            for name, weights in whole.items():
                np.testing.assert_allclose(parts[name], weights, rtol=1e-9)
            assert whole != rank[f"{strategy} plain"]["weights"]


def test_several_means_in_a_step_are_those_of_plain_lightning(launched):
    (found,) = launched("mpi-1")[1]["trainers"]
    for strategy in ("horovod", "ddp"):
        for name, weights in found["auto terms"]["weights"].items():
            np.testing.assert_allclose(found[f"{strategy} terms"]["weights"][name], weights, rtol=1e-9)


REFUSED = {
    "plateau": "the ranks differ in loss_epoch: rank 1 on ",
    "early": "the ranks differ in loss_epoch: rank 1 on ",
    "by hand": "the ranks differ in LR 0: rank 1 on ",
    "by one": "the ranks differ in next epoch: rank 1 on ",
    "terms": "hl.mean_loss was called twice in a training_step, whose gradients accumulate_grad_batches=2 would divide",
    "penalty": "training_step adds something to hl.mean_loss, which accumulate_grad_batches=2 would divide by counts,",
    "labels": "the data set of a DataLoader: example ",
    "labels of validation": "the data set of a DataLoader: example ",
    "numbers of what was read": "the data set of a DataLoader: example ",
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", marked(["mpi-2", "mpi-2-more"], slow={"mpi-2-more"}))
def test_what_ranks_would_decide_or_divide_apart_is_refused(launched, name, case):
    for rank in launched(name)[1]["refused"]:
        assert rank.keys() == REFUSED.keys()
        assert rank[case].startswith(REFUSED[case])


@pytest.mark.parametrize(
    ("name", "way"),
    marked(
        [(name, way) for name, ways in WAYS_OF_STEPS.items() if name != "mpi-1" for way in ways],
        slow={"mpi-2-more", "mpi-4"},
    ),
)
def test_steps_of_any_kind_train_as_on_one_rank_or_are_named(launched, name, way):
    results = launched(name)[1]
    for rank in results["steps" if way.startswith(("horovod", "tolerant")) else "ddp_steps"]:
        if way in WRONG_STEPS:
            assert rank[way].startswith(WRONG_STEPS[way])
            assert ("(loss * 0)" in rank[way]) == (way in {"horovod absent", "horovod None", "horovod twice"})
            assert ("torch.autograd.grad" in rank[way]) == (way.endswith(("by hand", "manual_backward")))
            assert ("parameters (head.weight, head.bias)" in rank[way]) == (way == "ddp left out")
            assert ("draws random numbers" in rank[way]) == way.endswith("noise")
            assert "memory" not in rank[way]
        else:
            np.testing.assert_allclose(
                rank[way], launched("mpi-1")[1]["steps"][0][f"horovod {way.split(' ', 1)[1]}"], 0, 1e-12
            )


@pytest.mark.only_ci
def test_a_rank_without_backward_for_which_the_others_never_come_is_named(tmp_path):
    given = {"steps": {"ways": ["ddp absent"], "folder": str(tmp_path), "patience": 5.0}}
    (_, named) = programs("lightning", "mpi", 2, tmp_path, given)["steps"]
    assert named["ddp absent"].startswith(
        "LoopError: rank 1 made no backward, and no other rank within 5 seconds in batch "
    )
    assert "(loss * 0)" in named["ddp absent"]


def same(ours, theirs):
    """Whether two modules' weights are equal but for rounding; what no rank used to the bit."""
    assert ours.keys() == theirs.keys()
    return all(
        np.allclose(ours[key], theirs[key], rtol=1e-4, atol=0 if key.startswith("never") else 1e-5)
        for key in ours
        if "running" not in key
    )
