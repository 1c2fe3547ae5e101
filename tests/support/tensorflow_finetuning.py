"""Which weights of Keras's files a recipe starts from, what of them is refused, and what of a model learns."""

import os
import zipfile

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install -e .[tensorflow]")
os.environ["KERAS_BACKEND"] = "tensorflow"

import h5py
import keras
import numpy as np

from hvdtrain.core import recipe as recipes
from hvdtrain.errors import CheckpointError
from hvdtrain.tensorflow import finetuning, optimizers, state

KEYS = {
    "name": "own", "model": "own:net", "dataset": "own:data", "loss": "mse", "epochs": 4, "batch_size": 4,
    "base_lr": 0.1,
}  # fmt: skip


def made(**keys):
    return recipes.validate({**KEYS, **keys})


def net(seed=0, classes=3):
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    inner = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(6, name="inner")], name="block")
    x = inputs = keras.Input((4,))
    for layer in (keras.layers.Dense(6, name="body"), keras.layers.BatchNormalization(name="bn"), inner):
        x = layer(x)
    x = keras.layers.Dropout(0.5, name="drop")(x)
    return keras.Model(inputs, keras.layers.Dense(classes, name="fc")(x))


def saved(path, model):
    model.save(path) if path.suffix == ".keras" else model.save_weights(path)
    return str(path)


@pytest.mark.parametrize("name", ["given.keras", "given.weights.h5"])
def test_weights_of_keras_are_taken_but_for_the_head(name, tmp_path):
    path = saved(tmp_path / name, net(1, classes=10))
    theirs, ours = net(1, classes=10), net(2)
    line = finetuning.start(made(init_from=path, init_skip=["fc"]), ours)
    assert line == f"init        8 of 10 tensors are from {path}; new: fc.kernel, fc.bias"
    for layer in ("body", "bn", "block"):
        for own, there in zip(ours.get_layer(layer).weights, theirs.get_layer(layer).weights, strict=True):
            assert np.array_equal(own.numpy(), there.numpy())
    with pytest.raises(CheckpointError) as caught:
        finetuning.start(made(init_from=path), net(2))
    assert "fc.kernel is float [6, 10], here float [6, 3], fc.bias is float [10], here float [3]" in str(caught.value)


def test_weights_of_keras_2_are_found_by_their_layers_names(tmp_path):
    theirs, ours = net(1), net(2)
    with h5py.File(tmp_path / "old.h5", "w") as file:
        for each in theirs.weights:
            if "seed" not in each.path:
                layer, leaf = each.path.split("/")[-2:]
                file[f"{layer}/{layer}/{leaf}:0"] = each.numpy()
    keys = {"init_rename": {"inner": "block.inner"}}
    assert "10 of 10 tensors" in finetuning.start(made(init_from=str(tmp_path / "old.h5"), **keys), ours)
    assert np.array_equal(ours.get_layer("block").weights[0].numpy(), theirs.get_layer("block").weights[0].numpy())


def hostile(kind, folder):
    path = folder / "given.weights.h5"
    saved(path, net(1))
    whole = path.read_bytes()
    if kind in {"link", "external"}:
        secret = folder / "secret.h5"
        with h5py.File(secret, "w") as file:
            file["0"] = np.ones((6, 3), np.float32)
        with h5py.File(path, "r+") as file:
            vars_of = file["layers/dense_1/vars"]
            del vars_of["0"]
            if kind == "link":
                vars_of["0"] = h5py.ExternalLink(str(secret), "0")
            else:
                vars_of.create_dataset("0", (6, 3), "f4", external=[(str(secret), 0, 72)])
    elif kind == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path = folder / "given.keras"
        entries = {"config.json": "{}"} if kind == "no weights" else {"model.weights.h5": bytes(100 << 20)}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    return path


HOSTILE = {  # words of the line
    "link": "missing: fc.kernel",
    "external": "layers/dense_1/vars/0 lies in another file",
    "truncated": "cannot be read (",
    "pipe": "it is not a regular file",
    "bomb": "its model.weights.h5 is compressed",
    "no weights": "cannot be read (",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(kind, tmp_path):
    path = hostile(kind, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        finetuning.start(made(init_from=str(path)), net(2))
    assert HOSTILE[kind] in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1500


PARTS = {"freeze": ["body", "bn"], "lr_scale": {"block": 0.5}, "no_weight_decay": ["bias", "norm"], "weight_decay": 0.1}


def learning(model, **keys):
    recipe = made(**PARTS, momentum=0.9, **keys)
    found = finetuning.Learning(recipe, model)
    return found, optimizers.make(recipe, found.all, found.parts)


def test_frozen_weights_have_no_state_and_bn_keeps_its_statistics():
    model = net()
    found, optimizer = learning(model)
    names = ["block.inner.kernel", "block.inner.bias", "fc.kernel", "fc.bias"]
    assert [weight.path.replace("/", ".") for weight in found.learning] == names
    assert [(part.lr_scale, part.has_decay) for part in found.parts] == [
        (0.5, True),
        (0.5, False),
        (1, True),
        (1, False),
    ]
    slots = {name for name in state.variables(model, optimizer, None, found.all) if name.startswith("momentum")}
    assert slots == {f"momentum_buffer.{name}" for name in names}
    before = [each.numpy() for each in model.get_layer("bn").weights]
    model(np.ones((4, 4)), training=True)
    assert all(
        np.array_equal(one, each.numpy()) for one, each in zip(before, model.get_layer("bn").weights, strict=True)
    )


def test_thawed_weights_learn_from_their_epoch_on():
    found, optimizer = learning(net(), freeze_until_epoch=2)
    assert len(found.all) == 8 and len(found.now) == 4 and not found.enter(1)
    assert found.enter(2) and len(found.now) == 8
    assert len(optimizer.state["momentum_buffer"]) == 8
