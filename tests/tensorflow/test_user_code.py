"""A user's own Keras models, data sets, losses, metrics and steps: one training for any number of ranks, resumed to the
bit, and mistakes in one line."""

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import warm
from marks import marked
from paths import SUPPORT
from ranks import command, held, needs_horovod, needs_tensorflow, once, programs, run, started, train, wait_for_step
from safetensors.numpy import load_file
from worlds import arrays, losses, of_kind

pytestmark = [needs_tensorflow, needs_horovod, pytest.mark.timeout(900)]

CELLS = f"{SUPPORT}/keras_cells/cells.yaml"
STEPPED, TOKENS = f"{CELLS}:stepped", f"{CELLS}:tokens"
NETS, DATA, COSTS = "keras_cells.nets:", "keras_cells.data:", "keras_cells.costs:"
LATE = ["--model", f"{NETS}Late", "--dataset", f"{DATA}dicts"]
CONSTRAINED = "constraints on weights of two types"
ADAPTED = [CELLS, "--model", f"{NETS}adapted", "--batch-norm", "local", "--buffers", "rank_0", "--model-args"]
BY_VARIABLE = "a variable that Keras counts no weight"
RUNS = {
    "arrays": [CELLS],
    "source": [CELLS, "--dataset", f"{DATA}source", "--loss", f"{COSTS}loss"],
    "items": [CELLS, "--dataset", f"{DATA}items", "--batch-norm", "frozen", "--accumulation-steps", "2"],
    "items in float64": [CELLS, "--dataset", f"{DATA}items", "--precision", "float64"],
    "a subclass, its x a dict": [CELLS, *LATE, "--precision", "float64", "--loss", f"{COSTS}Scored"],
    "a step": [STEPPED, "--dataset", f"{DATA}source"],
    "a step with a frozen layer": [
        STEPPED, "--step", f"{COSTS}token_step", "--model", f"{NETS}embedded", "--dataset", f"{DATA}tokens",
    ],
    "masks, in micro-batches": [TOKENS, "--accumulation-steps", "2"],
    "an ignored class": [TOKENS, "--loss", f"{COSTS}ignoring", "--model-args", "synchronized=true"],
    "a sum": [TOKENS, "--loss", f"{COSTS}summed", "--base-lr", "1e-4"],
    "sum and count": [TOKENS, "--loss", f"{COSTS}kept", "--precision", "float16"],
    "a step's sum and count": [
        STEPPED, "--step", f"{COSTS}kept_step", "--model", f"{NETS}masked", "--dataset", f"{DATA}sequences",
        "--batch-norm", "local", "--accumulation-steps", "2",
    ],
    CONSTRAINED: [TOKENS, "--model", f"{NETS}constrained"],
    "a layer adapted to the data": [*ADAPTED, "how=norm"],
    BY_VARIABLE: [*ADAPTED, "how=variable"],
}  # fmt: skip
FIRST = ("arrays", "items", "masks, in micro-batches", "a step's sum and count", BY_VARIABLE)
"""Each kind of data, losses and state once; the others are slow, as each takes seconds."""
MORE = tuple(name for name in RUNS if name not in FIRST)
LAUNCHES = {1: "alone", 2: "mpi", 4: "mpi"}
PLAIN = {"first": ["masks, in micro-batches"], "more": ["an ignored class", "a sum", CONSTRAINED]}
"""Runs that plain Keras's fit trains too."""
REFUSED = {
    "bins": "the ranks differ in discretization/bin_boundaries: rank 1 on ",
    "number": "of the same examples and weights the model computes something else on rank 1 on ",
}
"""The messages where layers are adapted to each rank's own data, by kind of layer."""
DROPPED = [CELLS, *LATE, "--model-args", "rate=0.5", "--batch-norm", "local", "--checkpoint-every-steps", "2"]
DROPPED += ["--epochs", "3"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """`begun(2, "items")`: the folder of that many ranks' runs with that one, and what each rank returned; each is
    started once."""

    @once
    def of(ranks, more):
        folder = tmp_path_factory.mktemp(f"own-{ranks}")
        chosen = [name for name in RUNS if (name in MORE) == more]
        runs = {name: [*RUNS[name], "--output", str(folder / name)] for name in chosen}
        given = {}
        if not more and ranks == 2:
            again = [*RUNS[BY_VARIABLE], "--output", str(folder / "again")]
            runs |= {"one epoch": [*again, "--epochs", "1"], "again": again}
            refused = {how: [*ADAPTED, f"how={how}", "--output", str(folder / how)] for how in REFUSED}
            given = {"recipes": {"given": {how: {"argv": argv} for how, argv in refused.items()}}}
        if ranks == 1:
            given = {"plain_fits": {"cases": {name: RUNS[name] for name in PLAIN["more" if more else "first"]}}}
        given = {"trainings": {"given": runs}, **given}
        return folder, programs("tensorflow", LAUNCHES[ranks], ranks, folder, given, cwd=SUPPORT)

    return lambda ranks, run="arrays": of(ranks, run in MORE)


@pytest.mark.launched
@pytest.mark.parametrize("ranks", marked([2, 4], slow={4}))
@pytest.mark.parametrize("name", marked(RUNS, slow=MORE))
def test_every_number_of_ranks_has_one_curve(begun, ranks, name):
    alone, together = (begun(number, name)[0] / name for number in (1, ranks))
    ours, theirs = (losses(folder) for folder in (alone, together))
    assert len(ours) == 8 and len(set(ours)) == 8
    in_float32 = 1e-6 if ranks == 2 else 3e-5  # how a sum of four is rounded depends on the processor
    np.testing.assert_allclose(theirs, ours, rtol=1e-12 if "float64" in RUNS[name] else in_float32)
    for mine, other in zip(of_kind("epoch", alone), of_kind("epoch", together), strict=True):
        for key in mine.keys() - {"kind", "seconds"}:
            assert other[key] == pytest.approx(mine[key], rel=max(1e-5, in_float32)), key
    assert len({rank[name]["state"] for rank in begun(ranks, name)[1]["trainings"]}) == 1


@pytest.mark.parametrize("which", marked(PLAIN, slow={"more"}))
def test_masks_sums_and_constraints_are_kerass(begun, which):
    for name in PLAIN[which]:
        folder, results = begun(1, name)
        np.testing.assert_allclose(losses(folder / name), results["plain_fits"][0][name], rtol=1e-5, err_msg=name)


@pytest.mark.launched
@pytest.mark.parametrize("how", REFUSED)
def test_what_layers_have_adapted_to_each_ranks_own_data_is_refused(begun, how):
    assert REFUSED[how] in begun(2)[1]["recipes"][0][how]["err"]


SETS = """
import json

import keras
import numpy as np
import tensorflow as tf


def net():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def data():
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((61, 4)).astype("float32"), np.eye(3, dtype="float32")[draw.integers(0, 3, 61)]
    return (x[:24], y[:24]), (x[24:], y[24:])


def likelihood(out, y):
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(y, out)), tf.shape(y)[0]


perplexity = likelihood, lambda total, count: tf.exp(total / count)


def plain(arrays):
    model, (x, y) = net(), data()[1]
    kernel, bias = (next(arrays[name] for name in arrays if name.endswith(last)) for last in (".kernel", ".bias"))
    model.set_weights([kernel, bias])
    out, found = model(x), {}
    for name, metric in (("f1", keras.metrics.F1Score("macro")), ("auc", keras.metrics.AUC(from_logits=True)),
                         ("r2", keras.metrics.R2Score())):
        metric.update_state(y, out)
        found[name] = float(metric.result())
    total, count = likelihood(out, y)
    return {**found, "perplexity": float(np.exp(total / float(count)))}


if __name__ == "__main__":
    from safetensors.numpy import load_file

    print(json.dumps(plain(load_file("run/checkpoints/step-00000004/state.safetensors"))))
"""
SETS_YAML = """
default:
  model: sets:net
  dataset: sets:data
  loss: cross_entropy
  metrics:
    f1: keras.metrics:F1Score
    auc: keras.metrics:AUC
    r2: keras.metrics:R2Score
    perplexity: sets:perplexity
  metrics_args: {f1: {average: macro}, auc: {from_logits: true}}
  batch_size: 12
  epochs: 2
  base_lr: 0.5
"""


@pytest.mark.launched
@pytest.mark.parametrize("ranks", marked([1, 2, 4], slow={4}, only_ci={1}))  # as on two ranks
def test_metrics_of_a_whole_set_are_kerass_on_one_process(ranks, tmp_path):
    """Trained, and by --evaluate on as many ranks to the bit."""
    (tmp_path / "sets.py").write_text(SETS)
    (tmp_path / "sets.yaml").write_text(SETS_YAML)
    train("tensorflow", LAUNCHES[ranks], ranks, "sets.yaml", "--output", "run", cwd=tmp_path).good()
    last = of_kind("epoch", tmp_path / "run")[-1]
    wanted = json.loads(run("alone", 1, warm.command("tensorflow", "sets.py"), cwd=tmp_path).good().out)
    assert {name: last[f"valid_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    ended = train("tensorflow", LAUNCHES[ranks], ranks, "--evaluate", "run", "--json", cwd=tmp_path).good()
    found = json.loads(ended.out[ended.out.index("{") :])
    assert found == {key: last[key] for key in found}


@pytest.mark.launched
def test_a_variable_that_is_no_weight_is_resumed(begun):
    folder = begun(2)[0]
    assert arrays(folder / "again") == arrays(folder / BY_VARIABLE)


@pytest.mark.launched
@pytest.mark.parametrize("ranks", marked([2, 4], slow={4}), ids="of-{}".format)
def test_metrics_are_those_of_all_examples(begun, ranks):
    (_, last) = of_kind("epoch", begun(ranks)[0] / "arrays")
    assert last["valid_right"] == last["valid_acc1"]
    assert last["train_right"] == last["train_acc1"] > 0
    of_class_0 = 9  # of the 20 to validate
    assert last["valid_zero"] in {right / of_class_0 for right in range(of_class_0 + 1)}


@pytest.mark.slow
@pytest.mark.launched
def test_killed_with_dropout_and_resumed_to_the_bit(tmp_path):
    whole = tmp_path / "whole"
    train("tensorflow", "mpi", 2, *DROPPED, "--output", whole, cwd=SUPPORT).good()
    argv = [*DROPPED, "--output", tmp_path / "killed"]
    with started("mpi", 2, command("tensorflow", *argv), cwd=SUPPORT, **held(7)) as ranks:
        wait_for_step(ranks, tmp_path / "killed", 7)
        ranks.kill()
    assert "resuming from step" in train("tensorflow", "mpi", 2, *argv, cwd=SUPPORT).good().out
    assert arrays(tmp_path / "killed") == arrays(whole)
    again, undisturbed = losses(tmp_path / "killed").tolist(), losses(whole).tolist()
    assert again == undisturbed and len(set(again)) == 12


# Losses by name.

DRAW = np.random.default_rng(0)
OUT, LABELS = DRAW.normal(size=(6, 5, 3)), DRAW.integers(0, 3, (6, 5))
SAME, PROBABLE = DRAW.normal(size=(6, 5, 3)), DRAW.dirichlet(np.ones(3), (6, 5))


def theirs(name, out, y):
    out, y = torch.tensor(out), torch.tensor(y)
    if name == "cross_entropy":  # PyTorch's classes are the second dimension
        return F.cross_entropy(out.movedim(-1, 1), y.movedim(-1, 1) if y.is_floating_point() else y)
    return {"mse": F.mse_loss, "bce_with_logits": F.binary_cross_entropy_with_logits, "l1": F.l1_loss}[name](out, y)


def test_losses_have_pytorchs_numbers(tmp_path):
    cases = [
        ("cross_entropy", OUT, LABELS),
        ("cross_entropy", OUT, PROBABLE),
        ("mse", OUT, SAME),
        ("bce_with_logits", OUT, PROBABLE),
        ("l1", OUT, SAME),
    ]
    given = [[name, out.tolist(), y.tolist()] for name, out, y in cases]
    (ours,) = programs("tensorflow", "alone", 1, tmp_path, {"named_losses": {"cases": given}})["named_losses"]
    np.testing.assert_allclose(ours, [float(theirs(*case)) for case in cases], rtol=1e-12)


# One process.

SAME_CURVES = {
    "Keras's own loss": ["--loss", "keras.losses:SparseCategoricalCrossentropy", "--model", f"{NETS}likely"],
    "a class of a loss": ["--loss", f"{COSTS}Scored"],
    "Keras's order of arguments": ["--loss", f"{COSTS}keras_order"],
    "their own loss": ["--loss", f"{COSTS}loss"],
    "mirrored": ["--engine", "mirrored", "--devices", "cpu"],
    "multiworker": ["--engine", "multiworker"],
}


@pytest.fixture(scope="module")
def train_alone(train_here, tmp_path_factory):
    """`train_alone(*argv)`: how a run of one process ended, and its folder."""

    def train(*argv, recipe=CELLS):
        folder = tmp_path_factory.mktemp("alone") / "run"
        return train_here("tensorflow", recipe, *argv, "--output", folder), folder

    return train


@pytest.mark.parametrize("name", marked(SAME_CURVES, fast={"Keras's order of arguments"}))
def test_one_curve_whatever_names_the_loss_and_whichever_engine(begun, train_alone, name):
    ended, folder = train_alone(*SAME_CURVES[name])
    assert ended.code == 0, ended.err
    np.testing.assert_allclose(losses(folder), losses(begun(1)[0] / "arrays"), rtol=1e-5)


def test_arrays_read_ahead_are_the_same_to_the_bit(begun, train_alone):
    """The loop itself reads small batches of arrays; with a reader a thread reads them."""
    ended, folder = train_alone("--workers", "1")
    assert not ended.code and losses(folder).tolist() == losses(begun(1)[0] / "arrays").tolist()


LEARNS = {
    "bfloat16": ["--precision", "bfloat16"],
    "float16": ["--precision", "float16"],
    "XLA": ["--batch-norm", "local", "--xla"],
    "label smoothing": ["--label-smoothing", "0.1"],
    "frozen statistics": ["--batch-norm", "frozen"],
    "Adam": ["--optimizer", "adam", "--momentum", "0", "--base-lr", "0.01"],
    "averaged weights": ["--ema-decay", "0.5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_what_a_recipe_says_beside_holds(train_alone, name):
    ended, folder = train_alone(*LEARNS[name], "--epochs", "6")
    assert ended.code == 0, ended.err
    of_epochs = [line["train_loss"] for line in of_kind("epoch", folder)]
    assert of_epochs[-1] < of_epochs[0] - 0.02, of_epochs


TYPED = {  # by model: the recipe's precision, and what the log says
    "norms": ("bfloat16", None),
    "retyped": ("bfloat16", None),
    "typed": ("bfloat16", "3 of 3 matrix products and convolutions, float32"),
    "headed": ("bfloat16", "3 of 4 matrix products and convolutions, float32"),
    "typed mixed_bfloat16": ("float32", "3 of 3 matrix products and convolutions, bfloat16"),
}


@pytest.mark.parametrize("name", marked(TYPED, slow={"norms", "retyped", "headed", "typed mixed_bfloat16"}))
def test_a_precision_that_the_models_own_types_replace_is_named(train_alone, name):
    precision, says = TYPED[name]
    model, *policy = name.split()
    how = ["--model", f"{NETS}{model}", *(["--model-args", f"policy={policy[0]}"] if policy else [])]
    ended, _ = train_alone(*how, "--precision", precision, "--max-steps", "1", "--channels-last", "--stem", "cifar")
    assert ended.code == 0, ended.err
    lines = [line[7:] for line in ended.out.splitlines() if "does not hold" in line or "no effect" in line]
    before = "no effect   stem, channels_last: for other frameworks, data sets or models"
    wanted = [f"precision {precision} does not hold for {says} by the model's own types; where it is made, set"] * bool(
        says
    )
    assert [line.partition(" layer.dtype_policy = ")[0] for line in lines] == [before, *wanted]


@pytest.mark.slow
def test_xla_in_functions_that_run_eagerly_is_named(tmp_path):
    argv = [
        "--model",
        f"{NETS}eager",
        "--xla",
        "--batch-norm",
        "local",
        "--max-steps",
        "1",
        "--output",
        tmp_path / "run",
    ]
    assert (
        "xla has no effect: functions run eagerly"
        in train("tensorflow", "alone", 1, CELLS, *argv, cwd=SUPPORT).good().out
    )


@pytest.mark.parametrize("optimizer", marked(["sgd", "adamw"], slow={"adamw"}))
def test_weights_that_no_gradient_reaches_are_not_decayed(train_alone, optimizer):
    how = ["--model", f"{NETS}stopped", "--optimizer", optimizer, "--weight-decay", "0.1"]
    how += [] if optimizer == "sgd" else ["--momentum", "0"]
    ended, folder = train_alone(*how, "--max-steps", "4", "--checkpoint-every-steps", "1")
    assert ended.code == 0, ended.err
    first, last = (load_file(each / "state.safetensors") for each in sorted((folder / "checkpoints").glob("step-*")))
    moved = {name: bool((first[name] != last[name]).any()) for name in first if name.startswith("model.")}
    assert moved == {name: "top" in name for name in moved}
    assert len(moved) == 4


@pytest.mark.parametrize("loss", marked(["ratio", "kept"], slow={"kept"}))
def test_a_loss_that_is_no_mean_over_examples_is_named(train_alone, loss):
    ended, _ = train_alone("--loss", f"{COSTS}{loss}", "--batch-size", "8", "--max-steps", "1", recipe=TOKENS)
    assert ended.code == 0, ended.err
    assert (f"loss {COSTS}{loss} is no mean over examples (" in ended.out + ended.err) == (loss == "ratio")


LOGITS = {
    "likely": ("cross_entropy", "gives probabilities and loss cross_entropy takes logits: softmax is taken twice; let"),
    "norms": ("keras.losses:SparseCategoricalCrossentropy", "takes probabilities, which the outputs of model keras_"),
}


@pytest.mark.parametrize(("net", "loss", "line"), [(net, *rest) for net, rest in LOGITS.items()])
def test_logits_and_probabilities_for_a_loss_of_the_others_are_named(train_alone, net, loss, line):
    ended, _ = train_alone("--model", f"{NETS}{net}", "--loss", loss, "--max-steps", "1")
    assert ended.code == 0, ended.err
    assert line in ended.out


# Mistakes.

X, Y = "float32 [16, 3]", "int64 [16]"
LABELLED = ["--dataset", f"{DATA}labelled", "--dataset-args"]
OF_LABELLED = f"DataError: model {NETS}norms gives 3 outputs, dataset {DATA}labelled has label"
NOT_FINITE = "data that are not finite"
BAD = {
    "no such module": (["--model", "cellz.nets:unet"], "model cellz.nets:unet: there is no module cellz in "),
    "no such name": (["--model", f"{NETS}norm"], "has no 'norm'. Did you mean norms?"),
    "other arguments": (["--model-args", "widht=3"], "unexpected keyword argument 'widht'. It takes width."),
    "no model": (["--model", f"{NETS}no_model"], f"model {NETS}no_model must return a keras.Model, got a int."),
    "compiled": (["--model", f"{NETS}compiled"], "leave compile() out, or load_model(..., compile=False)."),
    "nothing to train": (["--model", f"{NETS}no_weights"], f"model {NETS}no_weights has no parameters to train."),
    "a model that fails": (["--model", f"{NETS}broken", "--model-args", "width=0"], "Received: units=-1."),
    "a BatchNorm of their own": (["--model", f"{NETS}special"], "layer special is a Special; take batch_norm local, "),
    "nothing to learn from": (["--dataset", f"{DATA}empty"], "training set (list) has no samples: its length is 0."),
    "one set": (["--dataset", f"{DATA}one"], "must return (train, valid), two of arrays (x, y), a keras.utils."),
    "iterated": (["--dataset", f"{DATA}iterated"], "has no samples by index, so no order of them could be the same"),
    "arrays of two lengths": (["--dataset", f"{DATA}unequal"], "got (float64 [5, 2], float64 [4]); make them alike."),
    "arrays of arrays": (["--dataset", f"{DATA}ragged"], "hold numbers or texts, got (object [5], float64 [5]); make "),
    "samples of two shapes": (["--dataset", f"{DATA}shapes"], " is (float64 [12, 7], int), sample "),
    "items of two lengths": (["--dataset", f"{DATA}uneven"], "rows, the first one has 2; all items but the last"),
    "its own generator": (["--dataset", f"{DATA}restless"], "differs when it is read again in "),
    "triples": (["--dataset", f"{DATA}triples"], "must be a pair (x, y), got 3 values; return a pair, or give a step."),
    "no numbers": (["--dataset", f"{DATA}texts"], "a sample must hold numbers, texts and arrays, got a NoneType."),
    "labels as texts": (["--dataset", f"{DATA}named"], "needs numbers as labels, keras_cells.data:named gives texts ("),
    NOT_FINITE: (["--dataset", f"{DATA}infinite"], "sample 5 is not finite: correct it, or leave it out; "),
    "another thread's": (["--dataset", f"{DATA}database"], ". Open it in __getitem__, in each thread."),
    "a damaged file": (["--dataset", f"{DATA}damaged"], "OSError: no file "),
    "a loss per example": (["--loss", f"{COSTS}vector"], "batch's examples, or (sum, count), got float32 [16]."),
    "a loss of Python's": (["--loss", f"{COSTS}plain"], "must give one number, the mean over the batch's examples, "),
    "a loss without gradient": (["--loss", f"{COSTS}without_gradient"], "gives a loss without gradient; "),
    "arguments turned round": (["--loss", f"{COSTS}turned"], f"of outputs {X} and targets {Y}: "),
    "targets of another shape": (["--loss", "mse"], "loss mse needs outputs and targets of one shape, got "),
    "labels from 1": ([*LABELLED, "train=1"], f"{OF_LABELLED} 3: labels must be 0 to 2 (PyTorch leaves out -100); ch"),
    "labels from 1, with XLA": ([*LABELLED, "train=1", "--xla", "--batch-norm", "local"], f"{OF_LABELLED} 3: labels "),
    "labels from -1": ([*LABELLED, "train=-1"], f"{OF_LABELLED} -1: labels must be 0 to 2 "),
    "a label of validation's alone": ([*LABELLED, "valid=253"], f"{OF_LABELLED} 255: labels must be 0 to 2 "),
    "more classes than outputs": (
        ["--model", f"{NETS}images", "--model-args", "classes=9", "--dataset", "digits"],
        f"model {NETS}images gives 9 outputs, dataset digits has 10 classes: labels must be 0 to 8 (PyTorch leaves out "
        "-100); change them, or give model_args classes=10.",
    ),
    "a loss by another name": (["--loss", "crossentropy"], "Did you mean cross_entropy?"),
    "a metric per batch": (["--metrics", f"iou={COSTS}of_batch"], "metric iou must give a value for each of the "),
    "a Keras metric of their own": (
        ["--metrics", f"f={COSTS}Changed"], "Changed updates variables by code of its own, which need not add up over ",
    ),
    "a metric of torchmetrics": (
        ["--metrics", "f=torchmetrics:MeanMetric"], "is PyTorch's, this run is TensorFlow's; take one of keras.metrics",
    ),
    "a pair without a number": (["--metrics", f"f={COSTS}no_number"], "f must come to one number, got shape [3]"),
    "a step's list": (["--step", f"{COSTS}listed"], "with a dict of metrics, none of them called loss."),
    "a loader of PyTorch's": (["--collate", f"{COSTS}loss"], "collate is PyTorch's, this run is TensorFlow's, where "),
    "a network of PyTorch's": (["--model", "torchvision:resnet18"], "model torchvision:resnet18 is PyTorch's, "),
    "two readers": (["--workers", "2"], "workers must be 0 or 1 with a data set of your own in TensorFlow: "),
    "a collective in XLA": (
        ["--model", f"{NETS}masked", "--model-args", "synchronized=true", "--xla", "--batch-norm", "local"],
        " is synchronized=True, which puts a collective into what XLA compiles; drop one.",
    ),
    "float8": (["--model", f"{NETS}of_8_bits"], " becomes its gradient (float8), of which ranks would have the mean; "),
    "a loss scale": (
        ["--optimizer", f"{COSTS}scaled", "--momentum", "0"],
        " has a loss scale of its own, which no recipe runs; drop it, and give precision: float16.",
    ),
    "shared variables": (["--engine", "central"], f"model {NETS}norms cannot be with engine central: "),
}  # fmt: skip


OF_A_KIND = {
    "no such name", "a BatchNorm of their own", "its own generator", "triples", "a loss per example", "labels from 1",
    "a metric per batch", "a collective in XLA", "a pair without a number", "float8", "shared variables", NOT_FINITE,
    "labels as texts",
}  # fmt: skip
"""The others of a kind are slow."""


def test_a_set_that_changes_itself_is_called_once_an_epoch(train_alone):
    ended, _ = train_alone("--dataset", f"{DATA}called", recipe=CELLS)
    assert re.findall(r"epoch [a-z]+ \d", ended.good().out) == [
        f"epoch {of} {n}" for n in (1, 2) for of in ("begins", "ends")
    ]


@pytest.mark.parametrize("name", marked(BAD, fast=OF_A_KIND))
def test_mistakes_are_one_line(train_alone, name):
    argv, message = BAD[name]
    ended, _ = train_alone(*argv, recipe=STEPPED if "--step" in argv else CELLS)
    assert ended.code == (1 if name == NOT_FINITE else 2), ended.err
    assert message in ended.err and ended.err.count("\n") == 1, ended.err
