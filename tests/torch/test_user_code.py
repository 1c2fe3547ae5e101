"""A recipe that names code of the user's: what is wrong with it is one line with the remedy, and exit code 2."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from marks import marked, rows  # noqa: E402

from hvdtrain.run import main as runs  # noqa: E402
from hvdtrain.torch.__main__ import train  # noqa: E402

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return self.layer(x)


def pairs(n=8, valid=4, labels=4):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(n) % labels), TensorDataset(x[:valid], torch.arange(valid) % labels)


def regression(shape=(4,)):
    return [TensorDataset(torch.randn(8, 4), torch.randn(8, *shape)) for _ in range(2)]


def loss(out, y):
    return nn.functional.cross_entropy(out, y)
"""
KEYS = {
    "model": "own:Net", "dataset": "own:pairs", "loss": "own:loss", "epochs": 1, "batch_size": 4, "base_lr": 0.1,
}  # fmt: skip

ONE = "class One(Net):\n    def __init__(self): super().__init__(1)\n"
F1 = {"metrics": {"f1": "torchmetrics.classification:MulticlassF1Score"}}

CASES = {  # by name: keys of the recipe, code of the user's, and words of the line
    "no module": ({"model": "onw:Net"}, "", ["model onw:Net: there is no module onw in", "start in the folder"]),
    "no name": ({"model": "own:Nett"}, "", ["own.py has no 'Nett'", "Did you mean Net?"]),
    "no import path": ({"model": "own.Net"}, "", ["model must be one of", "'own.Net'"]),
    "not callable": ({"model": "own:size"}, "size = 3", ["own:size must be callable, got an object of type int"]),
    "syntax": ({}, "def f(:\n    pass", ["dataset own:pairs", "own.py line 27: SyntaxError"]),
    "error of the import": ({}, "1 / 0", ["own.py line 27: ZeroDivisionError"]),
    "exit of the import": (
        {},
        "import sys; sys.exit(3)",
        ["own:pairs cannot be imported", "own.py line 27: SystemExit: 3"],
    ),
    "unknown argument": ({"model_args": {"widht": 3}}, "", ["own:Net: got an", "argument 'widht'. It takes width."]),
    "unknown argument, passed on": (
        {"model": "own:f", "model_args": {"widht": 3, "deep": True}},
        "def f(deep, *rest, **more): return Net(**more)",
        ["own.py line 27: TypeError: Net.__init__() got", "argument 'widht'. It takes width, deep."],
    ),
    "unknown argument of many": (
        {"model": "own:f", "model_args": {"a": 3}},
        f"def f({', '.join(f'channels_of_layer_{each}=1' for each in range(150))}): return Net()",
        [" It takes channels_of_layer_0, ", "_of_layer_13 and more."],
    ),
    "missing argument": (
        {"model": "own:f"},
        "def f(depth): return Net()",
        ["own:f(depth)", "own.py line 27", "'depth'"],
    ),
    "no Module": ({"model": "own:f"}, "def f(): return 3", ["own:f must return a torch.nn.Module, got a int"]),
    "no parameters": ({"model": "own:f"}, "def f(): return nn.ReLU()", ["model own:f has no parameters to train"]),
    "error of the model": (
        {"model_args": {"width": -1}},
        "",
        ["model own:Net: ", "own.py line 10: RuntimeError: Trying to create tensor"],
    ),
    "error of forward": (
        {"model": "own:F"},
        "class F(Net):\n    def forward(self, x): return self.layer(x[:, :3])",
        ["model own:F: ", "own.py line 28: RuntimeError"],
    ),
    "model_args of a built-in model": (
        {"model": "resnet50", "model_args": {"a": 1}, "dataset": "digits", "loss": None},
        "",
        ["model_args go with a model of your own, got model resnet50; drop them."],
    ),
    "unknown name of a library": ({"model": "torchvision:resnet19"}, "", ["model torchvision:resnet19", "resnet19"]),
    "unset variable": ({"dataset_args": {"n": "$NO_SUCH"}}, "", ["dataset_args n needs", "$NO_SUCH", "export it"]),
    "no loss": ({"loss": None}, "", ["dataset own:pairs needs a loss (cross_entropy,", "or a step"]),
    "a loss that learns": (
        {"loss": "own:f"},
        "class F(Net):\n    def forward(self, out, y): return loss(self.layer(out), y)\nf = F()",
        ["loss own:f has parameters that learn", "put them into the model, and name a step in place of a loss, or"],
    ),
    "a method of a loss that learns": (
        {"loss": "own:f"},
        "class F(Net):\n    def of(self, out, y): return loss(self.layer(out), y)\nf = F().of",
        ["loss own:f has parameters that learn"],
    ),
    "a step that learns": (
        {"loss": None, "step": "own:f"},
        "class F(Net):\n    def forward(self, net, of): return loss(self.layer(net(of[0])), of[1])\nf = F()",
        ["step own:f has parameters that learn"],
    ),
    "one data set": ({"dataset": "own:f"}, "def f(): return pairs()[0]", ["must return (train, valid)"]),
    "nothing to validate": ({"dataset_args": {"valid": 0}}, "", ["validation set (TensorDataset", "length is 0"]),
    "fewer than a batch": ({"dataset_args": {"n": 3, "valid": 3}}, "", ["at most the 3 training examples, got 4"]),
    "no order": (
        {"dataset": "own:f"},
        "class Stream(IterableDataset):\n    def __iter__(self): yield 1\ndef f(): return Stream(), Stream()",
        ["training set (Stream) has no samples by index", "__getitem__"],
    ),
    "error of the data set": (
        {"dataset": "own:f"},
        "def f(): return open('/nowhere/cells.h5')",
        ["dataset own:f: ", "own.py line 27: FileNotFoundError", "/nowhere/cells.h5"],
    ),
    "error of a sample": (
        {"dataset": "own:f"},
        "class D(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): return [1][i + 5]\n"
        "def f(): return D(), D()",
        ["training set, sample ", "own.py line 29: IndexError: list index"],
    ),
    "samples of two shapes": (
        {"dataset": "own:f"},
        "class D(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): "
        "return torch.ones(4 + i % 2), 1\ndef f(): return D(), D()",
        ["float32 [5]", "float32 [4]", "own.py", "give a collate"],
    ),
    "a sample that differs": (
        {"dataset": "own:f"},
        "G = torch.Generator()\nclass D(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): "
        "return torch.rand(4, generator=G), 1\ndef f(): return D(), D()",
        ["differs when it is read again", "own.py", "__getitem__"],
    ),
    "a collate that differs": (
        {"collate": "own:f"},
        "from torch.utils.data import default_collate\nG = torch.Generator()\ndef f(samples):\n"
        "    x, y = default_collate(samples)\n    return x + torch.rand(x.shape, generator=G), y",
        ["what collate makes of sample ", " differs when it is read again in ", "own.py", "__getitem__ or collate"],
    ),
    "labels as texts": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f(): return [[(torch.ones(4), 'cat')] * 8, [(torch.ones(4), 'dog')] * 8]",
        ["needs numbers as labels, own:f gives texts (str); number them, as by sorted(set(labels)).index(label)."],
    ),
    "texts as objects": (
        {"dataset": "own:f"},
        "import numpy\ndef f(): return [[(numpy.array(['a', 'b'], object), 1)] * 8] * 2",
        ["found object. Sample ", " is (object [2], int): give texts as str."],
    ),
    "no pair": (
        {"dataset": "own:f", "loss": "mse"},
        "def f(): return [TensorDataset(torch.ones(8, 4)) for _ in range(2)]",
        ["a sample of own:f must be a pair (x, y), got 1 values"],
    ),
    "error of collate": (
        {"collate": "own:f"},
        "def f(samples): raise ValueError('what is this')",
        ["own.py line 27: ValueError: what is this"],
    ),
    "collate of no batch": ({"collate": "own:f"}, "def f(samples): return None", ["must be a pair", "NoneType"]),
    "label out of range": (
        {"dataset_args": {"labels": 9}, "loss": "cross_entropy"},
        "",
        ["DataError: model own:Net gives 4 outputs, dataset own:pairs has label", ": labels must be 0 to 3 (PyTorch l"],
    ),
    "label -1": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f():\n    train, valid = pairs()\n    train.tensors[1].sub_(1)\n    return train, valid",
        ["gives 4 outputs, dataset own:f has label -1: labels must be 0 to 3 (PyTorch leaves out -100); change them."],
    ),
    "a label of validation's alone": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f(): return pairs()[0], TensorDataset(torch.ones(4, 4), torch.full((4,), 255))",
        ["DataError: model own:Net gives 4 outputs, dataset own:f has label 255", "or give it 256 outputs."],
    ),
    "more classes than outputs": (
        {"model": "own:F", "model_args": {"classes": 9}, "dataset": "digits", "loss": None},
        "class F(Net):\n    def __init__(self, classes):\n        super().__init__()\n"
        "        self.layer = nn.Linear(192, classes)\n    def forward(self, x): return self.layer(x.flatten(1))",
        [
            "RecipeError: model own:F gives 9 outputs, dataset digits has 10 classes: labels must be 0 to 8 (PyTorch "
            "leaves out -100); change them, or give model_args classes=10."
        ],
    ),
    "label out of range of a user's loss": (
        {"dataset_args": {"labels": 9}},
        "",
        ["own.py line 26: IndexError", "out of bounds"],
    ),
    "shapes that broadcast": (
        {"dataset": "own:regression", "dataset_args": {"shape": []}, "loss": "mse"},
        "",
        ["loss mse needs outputs and targets of one shape, got outputs [4, 4] and targets float32 [4]; reshape one in"],
    ),
    "outputs with an axis more": (
        {"model": "own:One", "dataset": "own:regression", "dataset_args": {"shape": []}, "loss": "torch.nn:MSELoss"},
        ONE,
        [
            "loss torch.nn:MSELoss needs outputs and targets of one shape, got outputs [4, 1] and targets float32 [4]; "
            "give the targets another axis, as y[..., None], or take the last one of the outputs"
        ],
    ),
    "targets with an axis more": (
        {"model": "own:One", "dataset": "own:regression", "dataset_args": {"shape": [1, 1]}, "loss": "l1"},
        ONE,
        ["got outputs [4, 1] and targets float32 [4, 1, 1]; take the last axis of the targets, as y.squeeze(-1)"],
    ),
    "labels of another axis": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f(): return [TensorDataset(each.tensors[0], each.tensors[1][:, None]) for each in pairs()]",
        [
            "loss cross_entropy needs outputs [n, classes] and labels [n], or outputs [n, ..., classes] and labels [n, "
            "...], got outputs [4, 4] and targets int64 [4, 1]; drop the last axis of the labels, as y.squeeze(-1)."
        ],
    ),
    "one-hot labels": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f(): return [TensorDataset(each.tensors[0], nn.functional.one_hot(each.tensors[1])) for each in pairs()]",
        ["targets int64 [4, 4]; labels are one-hot: give class numbers, as y.argmax(-1)."],
    ),
    "labels as floating-point numbers": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f(): return [TensorDataset(each.tensors[0], each.tensors[1].float()) for each in pairs()]",
        ["targets float32 [4]; give class numbers as int64, or a probability of each class in the shape of"],
    ),
    "targets of -1 and 1": (
        {"dataset": "own:f", "loss": "bce_with_logits"},
        "def f(): return [TensorDataset(each.tensors[0], -torch.ones(len(each), 4)) for each in pairs()]",
        ["DataError: loss bce_with_logits needs targets from 0 to 1, dataset own:f has -1; change them, as (y + 1)"],
    ),
    "classes for mse": (
        {"loss": "cross_entropy", "dataset": "own:regression", "dataset_args": {"shape": [3, 2]}},
        "",
        ["cross_entropy", "[4, 4]", "[4, 3, 2]"],
    ),
    "a loss of each example": (
        {"loss": "own:f"},
        "def f(out, y): return nn.functional.cross_entropy(out, y, reduction='none')",
        ["loss own:f must give one number", "got shape [4]"],
    ),
    "a loss without gradient": (
        {"loss": "own:f"},
        "def f(out, y): return loss(out, y).detach()",
        ["loss own:f gives a loss without gradient", "detach()"],
    ),
    "a loss of other arguments": (
        {"loss": "own:f"},
        "def f(out): return 1.0",
        ["loss own:f(out) (", "own.py line 27): too many positional arguments"],
    ),
    "error of the loss": (
        {"loss": "own:f"},
        "def f(out, y): return out.no_such()",
        ["loss own:f", "own.py line 27: AttributeError"],
    ),
    "no loss of that name": ({"loss": "cross_entrpy"}, "", ["'cross_entrpy'", "Did you mean cross_entropy?"]),
    "a metric of another shape": (
        {"metrics": {"right": "own:f"}},
        "def f(out, y): return out",
        ["metric right must give a value for each of the 4 examples", "got shape [4, 4]"],
    ),
    "a metric that is a number": (
        {"metrics": {"right": "own:f"}},
        "def f(out, y): return 0.5",
        ["metric right must give a value for each of the 4 examples", "got a float"],
    ),
    "error of a metric": (
        {"metrics": {"right": "own:f"}},
        "def f(out, y): return out.no_such()",
        ["metrics right", "own.py line 27: AttributeError"],
    ),
    "a metric of another shape, of whole sets too": (
        {"metrics": {"right": "own:f"}},
        "def f(out, y): return out",
        ["where it is no mean over examples, give a pair (update, compute) or a metric of torchmetrics."],
    ),
    "a metric that is nothing": ({"metrics": {"f": "own:f"}}, "f = 3", ["metric f must give", "got a int; where it"]),
    "a pair without arrays": (
        {"metrics": {"f": "own:f"}},
        "f = (lambda out, y: None), (lambda: 1)",
        ["update of metric f must give a number, an array or a tuple of them, got a NoneType; sum over the batch"],
    ),
    "a pair of other shapes": (
        {"metrics": {"f": "own:f"}, "dataset_args": {"valid": 6}},
        "f = (lambda out, y: (out.sum(1), 1)), (lambda a, b: b)",
        ["update of metric f must give arrays of the same shapes for all", "got [[4], []] and [[2], []]; sum over"],
    ),
    "a pair without a number": (
        {"metrics": {"f": "own:f"}},
        "f = [lambda out, y: out.sum(0), lambda sums: sums]",
        ["metric f must come to one number, got shape [4]; take a mean of it, as average=macro"],
    ),
    "a pair that fails": (
        {"metrics": {"f": "own:f"}},
        "def g(sums): return sums.no_such()\nf = (lambda out, y: out.sum()), g",
        ["metrics f own:f: ", "own.py line 27: AttributeError"],
    ),
    "a value a class": (
        {**F1, "metrics_args": {"f1": {"num_classes": 4, "average": None}}},
        "",
        ["metric f1 must come to one number, got shape [4]"],
    ),
    "states that do not merge": (
        {"metrics": {"r": "torchmetrics:PearsonCorrCoef"}},
        "",
        ["metric r: PearsonCorrCoef merges its state mean_x by None, which is exact for sum, cat, min and max alone"],
    ),
    "an unknown argument of a metric": (
        {**F1, "metrics_args": {"f1": {"num_klasses": 4}}},
        "",
        ["metrics f1 torchmetrics.classification:MulticlassF1Score(", "missing a required argument: 'num_classes'"],
    ),
    "arguments of no metric": ({"metrics_args": {"f": {}}}, "", ["metrics_args f must be of a name in metrics; as in"]),
    "no arguments by name": ({**F1, "metrics_args": {"f1": 4}}, "", ["metrics_args f1 must map arguments to values"]),
    "a metric of Keras's": (
        {"metrics": {"f1": "keras.metrics:F1Score"}},
        "",
        ["metrics f1 keras.metrics:F1Score is TensorFlow's, this run is PyTorch's; take one of torchmetrics."],
    ),
    "a metric called loss": ({"metrics": {"loss": "own:loss"}}, "", ["a metric's name must be a word other than"]),
    "a step beside a loss": ({"step": "own:loss"}, "", ["step computes loss and metrics itself; drop loss"]),
    "a step of three": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch): return 1, 2, 3",
        ["step own:f must return a loss, or (loss, metrics)"],
    ),
    "a step that returns nothing": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch): pass",
        ["step own:f must give one number", "got a NoneType"],
    ),
    "error of a step": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch): return batch['x']",
        ["step own:f", "own.py line 27: TypeError"],
    ),
    "other metrics in validation": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch):\n    loss_now = loss(model(batch[0]), batch[1])\n"
        "    return loss_now, ({} if model.training else {'right': (1, 2)})",
        ["the metrics must have the same names in every step, got right after none", "(0, 0)"],
    ),
    "a metric that is the loss": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch): return loss(model(batch[0]), batch[1]), {'loss': (1, 2)}",
        ["or (loss, metrics) with a dict of metrics, none of them called loss"],
    ),
    "sum and count of many": (
        {"loss": "own:f"},
        "def f(out, y): return out.sum(0), len(y)",
        ["loss own:f must give one number, the mean over the batch's examples, or (sum, count), got shape [4]"],
    ),
    "sum and count of some": (
        {"loss": "own:f"},
        "def f(out, y): return (out.sum(), len(y)) if out.requires_grad else out.mean()",
        ["the metrics must have the same names in every step, got none after loss"],
    ),
    "two outputs": (
        {"model": "own:F", "loss": "cross_entropy"},
        "class F(Net):\n    def forward(self, x): return self.layer(x), 0",
        ["loss cross_entropy needs a model that returns a tensor, own:F returns a tuple"],
    ),
    "best of what": ({"flags": ["--best"]}, "", ["--best needs --evaluate RUN; drop it."]),
    "no pickle for workers": (
        {"dataset": "own:f", "workers": 1},
        "class D(Dataset):\n    def __init__(self): self.read = lambda: torch.ones(4)\n"
        "    def __len__(self): return 8\n    def __getitem__(self, i): return self.read(), 1\n"
        "def f(): return D(), D()",
        ["own:f, training set cannot be sent to workers, as pickle: ", "set workers to 0"],
    ),
    "a user's model in parts": (
        {"flags": ["--engine", "modelparallel", "--devices", "cpu,cpu"]},
        "",
        ["model own:Net cannot be with engine modelparallel", "take --engine ddp"],
    ),
    "a step in parts": (
        {"loss": None, "step": "own:f", "flags": ["--engine", "modelparallel", "--devices", "cpu,cpu"]},
        "def f(model, batch): return loss(model(batch[0]), batch[1])",
        ["step own:f cannot be with engine modelparallel"],
    ),
}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """`refused(keys, code)`: the only line on stderr of a run of that recipe, whose exit code is 2; or 0, with none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(keys, code="", exit_code=2):
        from ruamel.yaml import YAML

        sys.modules.pop("own", None)
        flags = [*keys.pop("flags", []), "--output", "run"]
        (tmp_path / "own.py").write_text(f"{OWN}{code}\n")
        chosen = {key: value for key, value in {**KEYS, **keys}.items() if value is not None}
        with (tmp_path / "mine.yaml").open("w") as file:
            YAML().dump({"default": chosen}, file)
        assert runs.main("torch", ["mine.yaml", *flags], train) == exit_code
        if exit_code:
            (line,) = capsys.readouterr().err.splitlines()
            return line
        return None

    yield run
    sys.modules.pop("own", None)


@pytest.mark.parametrize("case", CASES)
def test_one_line_that_names_it(refused, case):
    keys, code, expected = CASES[case]
    line = refused(dict(keys), code)
    assert not [words for words in expected if words not in line], line


def test_data_that_are_not_finite_are_named_in_place_of_the_lr(refused):
    code = "def f():\n    train, valid = pairs()\n    train.tensors[0][5, 1] = torch.nan\n    return train, valid"
    line = refused({"dataset": "own:f"}, code, 1)
    assert "loss is nan at step 2; dataset own:f, training set, sample 5 is not finite: correct it, or leave it" in line
    assert line.index("where that is meant, lower the LR")


def test_a_batch_of_texts_is_one_argument(refused):
    code = (
        "class N(Net):\n    def forward(self, texts): return super().forward(torch.ones(len(texts), 4))\n"
        "def f(): return [[('a text', 1)] * 8] * 2"
    )
    refused({"model": "own:N", "dataset": "own:f"}, code, 0)


CALLS = "calls of recipe loss has changed, and no checkpoint holds an attribute: register a buffer"
PAIRS = "loss own:f gives (sum, count): sums and counts of all ranks are divided"
LOSSES = {  # by name: a loss of the user's, and whether a line names it
    "mean": ("def f(out, y): return loss(out, y)", False),
    "per image": ("def f(out, y): return (1 - (out.sigmoid() * hot(y)).sum(1) / (out + 9).sum(1)).mean()", False),
    "ignored": ("def f(out, y): return nn.functional.cross_entropy(out, y, ignore_index=0)", True),
    "ignored, sum and count": (
        "def f(out, y): return nn.functional.cross_entropy(out, y, ignore_index=0, reduction='sum'), (y != 0).sum()",
        False,
    ),
    "class weights, counted": ("f = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0, 9.0]))", False),
    "dice of a batch": (
        "def f(out, y): return 1 - 2 * (out.sigmoid() * hot(y)).sum() / out.sigmoid().sum()",
        True,
    ),
    "dice, times its examples": (
        "def f(out, y): return len(y) * (out * hot(y)).sum() / (out ** 2).sum(), len(y)",
        True,
    ),
    "contrastive": ("def f(out, y): return nn.functional.cross_entropy(out @ out.T, torch.arange(len(y)))", True),
    "sum": ("def f(out, y): return nn.functional.cross_entropy(out, y, reduction='sum')", True),
    "random": ("def f(out, y): return loss(out + torch.randn_like(out), y)", False),
    "whole batches alone": ("def f(out, y): return loss(out.view(8, 4), y)", False),
    "in place": ("def f(out, y): return loss(out.mul_(2), y)", False),
    "a class": ("class f(nn.Module):\n    def forward(self, out, y): return loss(out, y)", False),
    "with state": (
        "class F(nn.Module):\n    calls = 0\n    def forward(self, out, y):\n        self.calls += 1\n"
        "        return self.calls * loss(out, y)\nf = F()",
        False,
    ),
    "PyTorch's": ("", False),
}


@pytest.mark.parametrize(
    ("case", "precision"), [*((case, "float32") for case in LOSSES), ("mean", "bfloat16"), ("per image", "bfloat16")]
)
def test_a_loss_that_is_no_mean_over_examples_is_named(refused, tmp_path, capsys, case, precision):
    """Once, in the log and for the report; looking at it changes nothing."""
    code, is_named = LOSSES[case]
    code = f"def hot(y): return nn.functional.one_hot(y, 4)\n{code}"
    keys = {"loss": "own:f" if "f" in code.partition("\n")[2] else "torch.nn:CrossEntropyLoss", "batch_size": 8}
    keys |= {"dataset_args": {"labels": 3, "valid": 8}}
    refused({**keys, "precision": precision}, code, 0)
    lines = [line for line in capsys.readouterr().out.splitlines() if "is no mean over examples" in line]
    assert [line.partition(" (")[0] for line in lines] == ["INFO - loss own:f is no mean over examples"] * is_named
    events = [json.loads(line) for line in (tmp_path / "run/launches.jsonl").read_text().splitlines()]
    lines += [f"INFO - {PAIRS}"] * ("count" in case or "times" in case)
    lines += [f"INFO - {CALLS}"] * (case == "with state")
    assert {each["text"] for each in events if each.get("event") == "note"} == {line[7:] for line in lines}
    if case == "with state":
        assert sys.modules["own"].f.calls == 2  # a step and a validation


NOTED = {  # by name: keys of the recipe, code of the user's, and a line of the log
    "a step with a mean over words": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=0)",
        "step own:f: cross_entropy with weights or labels that are left out is no mean over examples",
    ),
    "a step with a sum": (
        {"loss": None, "step": "own:f"},
        "def f(model, batch): return loss(model(batch[0]), batch[1]) + (model(batch[0]) ** 2).sum()",
        "step own:f: a sum over the batch is no mean over examples",
    ),
    "groups with other LRs": (
        {"optimizer": "own:f"},
        "def f(parameters, lr):\n    weight, bias = parameters\n"
        "    return torch.optim.SGD([{'params': [weight], 'lr': lr / 10}, {'params': [bias]}], lr=lr)",
        "LR of the optimizer's groups: x0.1 for 16 parameters, x1 for 4 parameters",
    ),
    "nothing to compile": (
        {"model": "own:F", "compile": True},
        "class F(Net):\n    @torch.compiler.disable\n    def forward(self, x): return super().forward(x)",
        "compile has compiled nothing",
    ),
    "probabilities for logits": (
        {"model": "own:F", "loss": "cross_entropy"},
        "class F(Net):\n    def forward(self, x): return super().forward(x).softmax(1)",
        "model own:F gives probabilities and loss cross_entropy takes logits: softmax is taken twice; let the model",
    ),
    "probabilities for logits of two classes": (
        {"model": "own:F", "loss": "bce_with_logits", "dataset": "own:f"},
        "class F(Net):\n    def forward(self, x): return super().forward(x).sigmoid()\n"
        "def f(): return [TensorDataset(torch.randn(8, 4), torch.ones(8, 4)) for _ in range(2)]",
        "model own:F gives probabilities and loss bce_with_logits takes logits: sigmoid is taken twice; let the model",
    ),
    "logits for log-probabilities": (
        {"loss": "torch.nn:NLLLoss"},
        "",
        "loss torch.nn:NLLLoss takes log-probabilities, which the outputs of model own:Net are not; end it with log_s",
    ),
    "classes first or last": (
        {"dataset": "own:f", "loss": "cross_entropy"},
        "def f(): return [TensorDataset(torch.randn(8, 4, 4), torch.ones(8, 4).long()) for _ in range(2)]",
        "loss cross_entropy: outputs [4, 4, 4] and targets [4, 4] fit with axis 1 or the last as classes; axis 1",
    ),
    "a regression whose loss compares all with all": (
        {"model": "own:One", "dataset": "own:regression", "dataset_args": {"shape": []}, "loss": "own:f"},
        f"{ONE}def f(out, y): return (out - y).square().mean()",
        "give the targets another axis, as y[..., None], or take the last one of the outputs: else each output is",
    ),
    "keys for others": (
        {"stem": "cifar", "image_size": 8, "channels_last": True},
        "",
        "no effect   stem, image_size: for other frameworks, data sets or models",
    ),
    "a loss that counts its calls": (
        {"loss": "own:f"},
        "calls = 0\ndef f(out, y):\n    global calls\n    calls += 1\n    return loss(out, y)",
        CALLS,
    ),
}


@pytest.mark.parametrize(("keys", "code", "line"), marked(rows(NOTED), slow={"nothing to compile"}))
def test_what_the_log_names_once(refused, capsys, keys, code, line):
    if "compile" in keys:
        torch._dynamo.utils.counters.clear()
    refused(dict(keys), code, 0)
    assert capsys.readouterr().out.count(line) == 1


def test_classes_may_be_the_last_axis_of_outputs(refused, tmp_path):
    """[n, time, classes], as a language model has them, is what [n, classes, time] is in a loss of one's own."""
    made = "def f(): return [TensorDataset(torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1)), "
    code = f"{made}torch.arange(40).view(8, 5) % 4) for _ in range(2)]\n"
    code += "def turned(out, y): return loss(out.transpose(1, 2), y)\n"
    found = []
    for loss in ("cross_entropy", "own:turned"):
        refused({"dataset": "own:f", "loss": loss}, code, 0)
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        found.append([row["valid_loss"] for row in map(json.loads, lines) if "valid_loss" in row])
        (tmp_path / "run").rename(tmp_path / loss.replace(":", "-"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert len(found[0]) == 1


def test_a_run_resumes_with_the_buffers_of_its_loss(refused):
    code = "class F(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    code += "        self.register_buffer('calls', torch.tensor(0))\n    def forward(self, out, y):\n"
    code += "        self.calls += torch.is_grad_enabled()\n        return loss(out, y)\nf = F()"
    for flags in (["--max-steps", "1"], []):
        refused({"loss": "own:f", "epochs": 2, "flags": flags}, code, 0)
    assert sys.modules["own"].f.calls == 4


FORMED = """
from torch.nn import functional as F
SEEN = []
class Images(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv, self.norm, self.top = nn.Conv2d(2, 4, 3), norm(4), nn.Linear(4, 3)
    def forward(self, x):
        return self.top(self.norm(self.conv(x)).relu().mean((2, 3)))
class Own(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("running_mean", torch.zeros(size))
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, torch.ones_like(self.running_mean), self.weight, training=True)
class Wide(Images):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)
class Eager(Images):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)
MADE = Images()
class Volumes(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Unflatten(1, (2, 1)), nn.Conv3d(2, 3, (1, 6, 6)), nn.Flatten())
def images():
    x = torch.randn(16, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(16) % 3), TensorDataset(x[:6], torch.arange(6) % 3)
def watched(out, y):
    SEEN.append(str(out.dtype))
    return loss(out.float(), y)
def build():
    model = make()
    SEEN.append(model)
    return model
"""
TYPES = (
    "precision bfloat16 does not hold for 2 of 2 matrix products and convolutions, float32 by the model's own types; "
)
TYPES += "make it without half() and autocast"
LEFT_OUT = "batch_norm frozen leaves out layers that are scripted, the model's own, or without running statistics: 1"
WEIGHTS = "mixed precision needs weights of float32, the model has others"
NO_LAYER = "no effect   batch_norm: for other frameworks, data sets or models"
KEYED = ("precision bf", "mixed ", "batch_norm f", "no effect")
FORMS = {  # by name: what makes the model, and the lines on keys that do not hold for it
    "a class": ("Images()", []),
    "a class, made at import": ("MADE", []),
    "half already": ("Images().bfloat16()", [WEIGHTS]),
    "channels_last already": ("Images().to(memory_format=torch.channels_last)", []),
    "a SyncBatchNorm": ("nn.SyncBatchNorm.convert_sync_batchnorm(Images())", []),
    "torch.compile": ("torch.compile(Images(), backend='eager')", []),
    "TorchScript": ("torch.jit.script(Images())", [LEFT_OUT, NO_LAYER]),
    "a trace": ("torch.jit.trace(Images(), torch.ones(2, 2, 6, 6))", [LEFT_OUT, NO_LAYER]),
    "autocast of its own": ("Wide()", [TYPES]),
    "a BatchNorm of its own": ("Images(Own)", [LEFT_OUT, NO_LAYER]),
    "no statistics": ("Images(lambda n: nn.BatchNorm2d(n, track_running_stats=False))", [LEFT_OUT]),
    "no BatchNorm": ("Images(lambda n: nn.InstanceNorm2d(n, affine=True))", [NO_LAYER]),
    "volumes": ("Volumes()", [NO_LAYER]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "form", marked(FORMS, fast={"a class, made at import", "TorchScript", "autocast of its own", "volumes"})
)
def test_each_key_holds_for_each_form_of_model_or_is_named(refused, tmp_path, capsys, form):
    """Measured: the outputs' type, layouts, running statistics, the norm of an update, averages, weights of a seed."""
    from safetensors.torch import load_file

    make, named = FORMS[form]
    keys = {"model": "own:build", "dataset": "own:images", "loss": "own:watched", "max_steps": 2, "batch_size": 8}
    keys |= {"checkpoint_every_steps": 1, "clip_norm": 0.01, "ema_decay": 0.9, "batch_norm": "frozen"}
    runs = []
    for folder, seed in (("first", 1), ("again", 1), ("other", 2)):
        code = f"{FORMED}\ndef make(): return {make}"
        refused({**keys, "seed": seed, "precision": "bfloat16", "channels_last": True}, code, 0)
        written = sorted((tmp_path / "run").rename(tmp_path / folder).glob("checkpoints/*/state.safetensors"))
        runs.append([load_file(path) for path in written])
    lines = [line[7:] for line in capsys.readouterr().out.splitlines()]
    assert {line for line in lines if line.startswith(KEYED)} == set(named)
    seen = sys.modules["own"].SEEN
    assert TYPES in named or seen[-1] == "torch.bfloat16"
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    weights = list([each for each in seen if isinstance(each, torch.nn.Module)][-1].parameters())
    assert all(each.is_contiguous(memory_format=layouts[each.dim()]) for each in weights if each.dim() in layouts)
    before, after = runs[0]
    means = [value for name, value in after.items() if name.endswith("running_mean") and "ema" not in name]
    assert LEFT_OUT in named or not any(map(torch.any, means))
    learned = [name.removeprefix("ema.") for name in after if name.startswith("ema.")]
    moved = torch.cat([(after[f"model.{each}"] - before[f"model.{each}"]).flatten() for each in learned])
    assert WEIGHTS in named or float(moved.norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)  # LR x norm
    assert any((after[f"model.{each}"] != after[f"ema.{each}"]).any() for each in learned)
    same, others = ([bool((run[1][name] == after[name]).all()) for name in after] for run in runs[1:])
    assert all(same) and not all(others)


def evaluated(capsys, *argv):
    """The exit code of `--evaluate RUN FLAGS`, what it printed, and its errors."""
    capsys.readouterr()
    code = runs.main("torch", ["--evaluate", *map(str, argv)], train)
    return code, *capsys.readouterr()


def everything(folder):
    return {path: path.is_file() and (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_run_is_evaluated_and_not_touched(refused, tmp_path, capsys):
    """Another user's run chooses no code that runs here."""
    refused({"metrics": {"f": "own:f"}, "epochs": 2}, "f = (lambda out, y: out.sum()), float", 0)
    run = tmp_path / "run"
    before = everything(run)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    for flags in ([], ["--best"], ["--batch-size", "8"]):
        code, out, err = evaluated(capsys, run, "--json", *flags)
        found = json.loads(out)
        assert (code, err) == (0, ""), err
        names = ("valid_loss", "valid_f", "valid_examples")
        assert "--best" in flags or [found[name] for name in names] == pytest.approx([last[name] for name in names])
    assert "step 4, epoch 2, 3 examples: valid loss=" in evaluated(capsys, run, "--dataset-args", "valid=3")[1]
    code, _, err = evaluated(capsys, run, "--output", "other")
    assert (code, "--evaluate goes without --output" in err) == (2, True)
    (tmp_path / "program").mkdir()
    (tmp_path / "program/run.json").write_text("{}")
    for folder, words in (("program", "is the run of a program, which alone knows"), ("none", "No such file")):
        code, _, err = evaluated(capsys, tmp_path / folder)
        assert (code, words in err, err.count("\n")) == (2, True, 1), err
    assert everything(run) == before
    (run / "recipe.yaml").rename(run / "kept.yaml")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):  # none hangs, or fills the memory
        make(run / "recipe.yaml")
        code, _, err = evaluated(capsys, run)
        assert (code, "cannot read recipe file" in err) == (2, True), err
        (run / "recipe.yaml").rmdir() if (run / "recipe.yaml").is_dir() else (run / "recipe.yaml").unlink()
    (run / "kept.yaml").rename(run / "recipe.yaml")
    if os.geteuid():
        pytest.skip("needs root, to give a file to another user: sudo")
    for theirs in (run / "recipe.yaml", run):
        os.chown(theirs, 12345, 12345)
        code, _, err = evaluated(capsys, run)
        assert (code, "recipe.yaml is another user's and names code, model own:Net, which" in err) == (2, True), err
        assert evaluated(capsys, run, "--json", *OF_USER)[0] == 0  # by the user's own word
        os.chown(theirs, 0, 0)


OF_USER = ("--model", "own:Net", "--dataset", "own:pairs", "--loss", "own:loss", "--metrics", "f=own:f")


def test_one_line_where_the_checkpoint_is_not_there(refused, tmp_path, capsys):
    refused({}, "", 0)
    for path in (tmp_path / "run/checkpoints").iterdir():
        (path / "meta.json").write_text("{}")
    code, _, err = evaluated(capsys, "run")
    assert (code, "run holds no whole checkpoint; give the folder of a run that wrote one." in err) == (2, True), err
