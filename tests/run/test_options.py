"""The help of a run: every flag in one group, without what the recipe cannot use, within the width of the terminal."""

import re

import pytest

from hvdtrain.core import flags, recipe
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.recipe.augmentation import Augmentation
from hvdtrain.core.recipe.classes import Classes
from hvdtrain.errors import RecipeError
from hvdtrain.run import options
from hvdtrain.run.options import OPTIONS, parse_run

KEYS = [key for key in Recipe.model_fields if key != "name"]
CROPS = {"train_crop", "valid_resize", "valid_crop"}
PACKED = {"cache_dir", "shuffle", "decoder", "exif"}
OF_CLASSES = {*Classes.model_fields, *Augmentation.model_fields}
TOKENS = {"sequence_length", "sequences", "token_dtype"}
SYNTHETIC = {"image_size", "classes", "examples", *TOKENS}
OWN_DATA = {"dataset_args", "collate", "sample_check"}
TORCH_ONLY = {"channels_last", "fused_optimizer", "cudnn_benchmark", "compile", "data_on_device"}
HIDDEN = {
    "digits": ("digits", {}, "torch", {"model_args", "data_dir", "xla", *CROPS, *PACKED, *SYNTHETIC, *OWN_DATA}),
    "digits, TensorFlow": (
        *("digits", {}, "tensorflow"),
        {"model_args", "data_dir", *CROPS, *PACKED, *SYNTHETIC, *OWN_DATA, *TORCH_ONLY},
    ),
    "digits, Lightning": (
        *("digits", {}, "lightning"),
        {"model_args", "data_dir", "xla", "compile", "reduction", "profile", "devices"}
        | {*CROPS, *PACKED, *SYNTHETIC, *OWN_DATA},
    ),
    "linear": (
        *("linear", {}, "torch"),
        {"model_args", "stem", "batch_norm", "label_smoothing", "channels_last", "data_dir", "xla", *OF_CLASSES}
        | {*CROPS, *PACKED, *SYNTHETIC, *OWN_DATA},
    ),
    "ImageNet": ("imagenet", {}, "torch", {"model_args", "data_on_device", "xla", *SYNTHETIC, *OWN_DATA}),
    "CIFAR-100": ("cifar100", {}, "torch", {"model_args", "xla", *CROPS, *PACKED, *SYNTHETIC, *OWN_DATA}),
    "synthetic": ("synthetic", {}, "torch", {"model_args", "data_dir", "xla", *CROPS, *PACKED, *TOKENS, *OWN_DATA}),
    "another model": ("cscs:vgg16", {}, "torch", {"stem", "data_on_device", "xla", *SYNTHETIC, *OWN_DATA}),
    "your own": (
        *("digits", {"model": "cells:Net", "dataset": "cells:data", "loss": "mse"}, "torch"),
        {"stem", "data_dir", "data_on_device", "xla", *CROPS, *PACKED, *SYNTHETIC},
    ),
    "your own, TensorFlow": (
        *("digits", {"model": "cells:net", "dataset": "cells:data", "loss": "mse"}, "tensorflow"),
        {"stem", "data_dir", "collate", *CROPS, *PACKED, *SYNTHETIC, *TORCH_ONLY},
    ),
    "any framework": (
        *("imagenet", {}, None),
        {"model_args", "data_on_device", *SYNTHETIC, *OWN_DATA},
    ),
}


@pytest.mark.parametrize(("name", "keys", "adapter", "hidden"), HIDDEN.values(), ids=HIDDEN)
def test_what_is_left_out(name, keys, adapter, hidden):
    of_networks = set() if "model" in keys else {"buffers"}
    assert set(options.layout_of(recipe.load(name, keys), adapter).hidden) == hidden | of_networks


def test_every_flag_is_in_one_group():
    grouped = [name for names in options.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted([*KEYS, *OPTIONS])
    assert set(options.USED_BY) <= set(KEYS)


def help_of(argv, adapter, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        parse_run("python -m hvdtrain.torch", argv, adapter)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("adapter", ["torch", "tensorflow", "lightning"])
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["cifar100:bs2048", "linear"])
def test_help(name, columns, adapter, monkeypatch, capsys):
    page = help_of([name, "--help"], adapter, columns, monkeypatch, capsys)
    assert max(map(len, page.splitlines())) <= columns
    above, _, boxes = page.partition("options")
    shown = {flag.replace("-", "_") for flag in re.findall(r"[ ]--([a-z0-9-]+)", boxes)}
    hidden = set(options.layout_of(recipe.load(name), adapter).hidden)
    assert {*KEYS, *OPTIONS} - hidden <= shown
    assert not hidden & shown
    assert {flag.replace("-", "_") for flag in re.findall(r"--([a-z0-9-]+)", above)} == hidden - {"devices"}
    assert re.findall(r"[a-z][a-z ]+ options", page) == [f"{one} options" for one in options.GROUPS]


def test_help_shows_the_recipes_values(monkeypatch, capsys):
    page = help_of(["cifar100:bs2048", "-h"], "torch", 80, monkeypatch, capsys)
    assert "--batch-size INT" in page
    assert "(default: 2048)" in page
    assert "None" not in page
    assert "mirrored" not in page


def test_hidden_flags_are_read_and_refused_as_ever():
    assert parse_run("x", ["digits", "--train-crop", "8", "--xla"], "torch")[0].xla
    with pytest.raises(RecipeError, match="model_args go with a model of your own"):
        parse_run("x", ["digits", "--model-args", "a=1"], "torch")


def test_groups_do_not_change_what_a_flag_gives():
    fields = {**OPTIONS, **{key: Recipe.model_fields[key] for key in KEYS}}
    argv = "linear --lr 0.5 --lr-milestones 3 4 --nesterov --output a --metrics iou=m:iou --clip-norm None"
    defaults = recipe.load("linear").model_dump()
    rest = argv.split()[1:]
    plain = flags.given(fields, "x", rest, defaults)
    assert plain == flags.given(fields, "x", rest, defaults, layout=flags.Layout(options.GROUPS, KEYS))
    assert set(plain) == {"base_lr", "lr_milestones", "nesterov", "output", "metrics", "clip_norm"}
