"""CSCS's networks in TensorFlow: their parameters, FLOPs by TensorFlow's profiler, the auxiliary classifier in training
only."""

import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import warm
from images import write_tree
from ranks import clean_environ, needs_tensorflow

from hvdtrain.core import network
from hvdtrain.record.checkpoint import Checkpoint
from hvdtrain.tools import convert

pytestmark = [needs_tensorflow, pytest.mark.slow]

PROGRAM = """
import json, os, sys
os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
from hvdtrain.core import recipe
from hvdtrain.engines import frameworks
from hvdtrain.errors import RecipeError
from hvdtrain.run.setup import load_dataset

def of(name, **keys):
    chosen = recipe.load(name, keys)
    dataset = load_dataset(chosen)
    return frameworks.network_of(chosen, "tensorflow", dataset), chosen, dataset

if sys.argv[1:] == ["layouts"]:
    from hvdtrain.tensorflow import models, optimizers, state
    from hvdtrain.tensorflow.engines import Engine
    layouts = {}
    for name, keys in json.loads(os.environ["CASES"]).items():
        chosen = recipe.load(*keys)
        model = models.build(chosen, load_dataset(chosen), Engine("/CPU:0"))
        held = state.variables(model, optimizers.make(chosen, model.trainable_weights))
        layouts[name] = {name: list(each.shape) for name, each in held.items()}
    print(json.dumps(layouts))
    sys.exit()

if len(sys.argv) == 2:
    print(of(f"cscs:{sys.argv[1]}-synthetic", examples=64)[0].parameters)
    sys.exit()

from hvdtrain.tensorflow import flops
found = {"without": of("cscs:inception_v3-synthetic", examples=64, model_args={"aux_logits": False})[0].parameters}
plain, chosen, dataset = of("digits")
found["resnet50 flops"] = [plain.flops, flops.count(chosen, dataset)]
found["kept"] = [flops.kept_by_layer(chosen, dataset, examples=examples) for examples in (2, 64)]
plain, chosen, dataset = of("cscs:inception_v3-synthetic", examples=64)
found["inception_v3"] = plain.parameters
found["resnet101"] = of("cscs:resnet101-synthetic", examples=64)[0].parameters
found["inception_v3 flops"] = frameworks.with_flops(plain, chosen, "tensorflow", dataset).flops

import numpy as np
import tensorflow as tf
from hvdtrain.tensorflow import engines, networks, objective
logits, labels = tf.random.normal((6, 5), seed=1), tf.range(6) % 5
out = networks.InceptionOutputs(logits, 2 * logits)
chosen = recipe.load("synthetic:tiny")
cost = objective.Objective(chosen, load_dataset(chosen), engines.Engine('/CPU:0'))
model = lambda x, training: out if training else out.logits
batch = tf.zeros((6, 8, 8, 3), tf.uint8), tf.cast(labels, tf.int64)
model_of = type("Model", (), {"losses": [], "__call__": lambda self, x, training: model(x, training)})()
found["losses"] = [float(cost.measure(model_of, batch, training)[0]) for training in (True, False)]
found["parts"] = [float(tf.reduce_mean(objective.cross_entropy(one, batch[1]))) for one in out]

try:
    of("cscs:vgg16", dataset="imagenet", train_crop=176, data_dir=sys.argv[1])
except RecipeError as error:
    found["refused"] = str(error)

import contextlib, io, pathlib
from hvdtrain.tools import plan
os.chdir(sys.argv[1])
pathlib.Path("nets.py").write_text(sys.argv[2])
with contextlib.redirect_stdout(io.StringIO()) as page:
    keys = ["--model", "nets:Net", "--dataset", "not.there:data", "--loss", "mse", "--examples", "300"]
    plan.main(["linear", *keys, "--framework", "tensorflow"])
found["plan"] = page.getvalue().splitlines()
with contextlib.redirect_stdout(io.StringIO()) as page:
    plan.main(["linear", "--framework", "tensorflow", "--memory"])
found["activations"] = page.getvalue().splitlines()[-1]
print(json.dumps(found))
"""
UNBUILT = """
import keras

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3)

    def call(self, x):
        return self.layer(x)
"""


def program(*argv):
    """The last line of PROGRAM, as JSON."""
    command = warm.command("tensorflow", "-c", PROGRAM, *argv)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environ())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return program(write_tree(tmp_path_factory.mktemp("images")), UNBUILT)


PUBLISHED = {  # CSCS's: of Inception-v3 without the auxiliary classifier
    "resnet101": 44_601_832 - 52_672,  # without Keras's biases in front of BatchNorm
    "without": 23_817_352,
    "vgg16": 138_357_544,
    "inception_v3": 23_817_352 + 3_325_800,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items(), ids=PUBLISHED)
def test_parameters(name, parameters, found):
    assert (program(name) if name == "vgg16" else found[name]) == parameters


def test_the_plan_counts_what_forward_keeps(found):
    """As PyTorch's: 64 images through the first convolution, its BatchNorm and ReLU keep 64 x 64 x 8 x 8 numbers."""
    two, whole = (dict(each) for each in found["kept"])
    assert 100 < whole[""] / 2**20 < 110
    assert 30 < whole[""] / two[""] <= 32
    assert sum(whole.values()) == 2 * whole[""]
    assert found["activations"].startswith(
        "activations 0.0 MiB of a micro-batch of 100 examples are kept for backward: "
    )
    assert " to " in found["activations"]


LAYOUTS = {
    "linear": ("linear", {"momentum": 0.9}),
    "resnet50": ("digits", {"optimizer": "lars", "nesterov": False, "fused_optimizer": False}),
    "resnet101": ("digits", {"model": "resnet101", "optimizer": "adam", "momentum": 0.0, "nesterov": False}),
}


def test_convert_makes_what_a_checkpoint_holds(monkeypatch):
    monkeypatch.setenv("CASES", json.dumps(LAYOUTS))
    for model, held in program("layouts").items():
        trained, statistics = network.weights(SimpleNamespace(model=model), 10)
        slots = {
            "linear": ["momentum_buffer"],
            "resnet50": ["momentum_buffer"],
            "resnet101": ["exp_avg", "exp_avg_sq"],
        }[model]
        shapes = {f"{slot}.{name}": shape for slot in ("model", *slots) for name, shape in trained.items()}
        shapes |= {f"model.{name}": shape for name, shape in statistics.items()}
        shapes |= {f"step.{name}": () for name in trained if model == "resnet101"}
        arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
        made = convert.converted(Checkpoint(arrays, {"step": 0, "framework": "torch", "recipe": "x"}), "tensorflow")
        assert {name: list(array.shape) for name, array in made.arrays.items()} == held


def test_flops_are_those_of_torch_and_a_little_for_single_numbers(found):
    by_arithmetic, counted = found["resnet50 flops"]
    assert by_arithmetic < counted < 1.002 * by_arithmetic
    assert found["inception_v3 flops"] == pytest.approx(2 * 5.71e9, rel=1e-2)  # torchvision's documentation


def test_the_auxiliary_loss_weighs_two_fifths_and_only_in_training(found):
    main, auxiliary = found["parts"]
    assert found["losses"] == pytest.approx([main + 0.4 * auxiliary, main], rel=1e-6)


def test_crops_of_two_sizes_are_refused(found):
    assert found["refused"] == (
        "model vgg16 takes images of one size in TensorFlow: train_crop and valid_crop must be equal, got 176 and 224."
    )


def test_a_plan_without_the_example_that_a_network_is_built_by(found):
    assert found["plan"][0] == (
        "recipe      linear: nets:Net (an unknown number of parameters) on not.there:data, 300 examples to train, an "
        "unknown number to validate"
    )
    assert "parameters  not counted: there is no example to look at" in found["plan"]
    assert not any(line.startswith("memory") for line in found["plan"])
