"""`plan` without its data: published sizes, those of the files where they are there, and what --examples changes."""

import pickle

import pytest
from cifar100_files import batch, write
from images import write_tree
from paths import SUPPORT
from ranks import needs_torch

from hvdtrain import cli
from hvdtrain.tools import pack, plan

PUBLISHED = {
    "imagenet": ("imagenet", "1,281,167 examples to train, 50,000 to validate", "no --data-dir is given"),
    "a folder that is elsewhere": (
        *("imagenet --data-dir /not/here", "1,281,167 examples to train, 50,000 to validate"),
        "/not/here is not here",
    ),
    "packed, elsewhere": (
        *("imagenet --data-dir /not/here --shuffle shards --cache-dir /nor/here", "1,281,167 examples"),
        "/not/here is not here",
    ),
    "a name that no folder has": (f"imagenet --data-dir {'x' * 300}", "1,281,167 examples to train", "is not here"),
    "cifar100": ("cifar100", "50,000 examples to train, 10,000 to validate", "not downloaded yet"),
    "its folder is elsewhere": (
        "cifar100 --data-dir /not/here",
        "50,000 examples to train",
        "/not/here is not here",
    ),
    "so many examples": (
        *("imagenet --examples 5120 --valid-examples 7", "5,120 examples to train, 7 to validate"),
        "no --data-dir is given; taken as published: 1,000 classes",
    ),
    "so many to train": ("imagenet --examples 5120", "5,120 examples to train, 50,000 to validate", "1,000 classes"),
}


@pytest.fixture(autouse=True)
def nothing_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_DATA", str(tmp_path / "downloads"))
    yield
    assert not (tmp_path / "downloads").exists()


def planned(argv, capsys, code=0):
    assert cli.main(["plan", *argv.split()]) == code
    out, err = capsys.readouterr()
    assert bool(err) == bool(code)
    return err if code else out


@pytest.mark.parametrize(("argv", "sizes", "why"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_sizes(argv, sizes, why, capsys):
    *lines, data = planned(argv, capsys).splitlines()
    assert sizes in lines[0]
    assert data.startswith("data        ")
    assert why in data
    assert "taken as published: " in data


def test_the_numbers_of_a_plan_without_data(capsys):
    lines = planned("imagenet --ranks 32", capsys)
    assert "resnet50 (25,557,032 parameters)" in lines
    assert "batch       8192 = 32 ranks x 256" in lines
    assert "156 an epoch (3,215 examples left out, others each epoch), 90 epochs, 14040 in all" in lines
    assert "8.178 GFLOPs an example forward" in lines


WHERE_DATA_IS_THERE = {
    "folder": ("", "16 examples to train, 6 to validate", 23_512_130),
    "so many examples of its classes": ("--examples 4096", "4,096 examples to train, 6 to validate", 23_512_130),
    "so many to validate": ("--valid-examples 9", "16 examples to train, 9 to validate", 23_512_130),
}


@pytest.mark.parametrize(("argv", "sizes", "parameters"), WHERE_DATA_IS_THERE.values(), ids=WHERE_DATA_IS_THERE)
def test_a_folder_that_is_there_counts(argv, sizes, parameters, tmp_path, capsys):
    folder = write_tree(tmp_path / "images")
    out = planned(f"imagenet --data-dir {folder} --batch-size 8 {argv}", capsys)
    assert f"({parameters:,} parameters) on imagenet, {sizes}\n" in out
    assert "published" not in out


def test_a_packed_set_is_neither_copied_nor_decoded(tmp_path, capsys):
    pack.pack(pack.Options(write_tree(tmp_path / "images"), tmp_path / "packed", shards=2))
    argv = f"--cache-dir {tmp_path / 'node'} --shuffle shards --batch-size 8"
    assert "16 examples to train, 6 to validate" in planned(f"imagenet --data-dir {tmp_path / 'packed'} {argv}", capsys)
    assert not (tmp_path / "node").exists()


def test_files_of_cifar100_that_are_there_count(tmp_path, capsys):
    write(tmp_path / "cifar-100-python", pickle.dumps(batch(40)), pickle.dumps(batch(30)))
    out = planned(f"cifar100 --data-dir {tmp_path} --batch-size 8", capsys)
    assert "40 examples to train, 30 to validate" in out
    assert "published" not in out


def test_a_folder_without_images_is_refused(tmp_path, capsys):
    assert planned(f"imagenet --data-dir {tmp_path}", capsys, 2).startswith("DataError: ")


EXAMPLES = {
    "synthetic, a tenth to validate": ("synthetic --examples 1280", "1,280 examples to train, 128 to validate"),
    "digits": ("digits --examples 64000", "64,000 examples to train, 360 to validate"),
    "linear, before the recipe": ("--examples=200 --ranks 2 linear", "200 examples to train, 1,000 to validate"),
    "your own, not read": (
        "linear --dataset not.there:data --loss mse --examples 300",
        "300 examples to train, an unknown number to validate",
    ),
    "your own, both": (
        "linear --dataset not.there:data --loss mse --examples 300 --valid-examples 20",
        "300 examples to train, 20 to validate",
    ),
}


@pytest.mark.parametrize(("argv", "sizes"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples(argv, sizes, capsys):
    out = planned(argv, capsys)
    assert sizes in out
    assert ("--examples is given" in out) == ("not.there" in argv)


REFUSED = {
    "fewer examples than a batch": (
        "digits --examples 8",
        "PlanError: the global batch must be at most the 8 training examples, got 64; give a smaller batch or fewer "
        "ranks than 1.\n",
    ),
    "no examples": (
        "digits --examples 0",
        "RecipeError: --examples must be greater than 0, got '0'; --help lists the flags.\n",
    ),
    "your own, read": (
        "linear --dataset not.there:data --loss mse",
        "RecipeError: dataset not.there:data: there is no module not in ",
    ),
    "misspelt": ("digits --rank 2", "RecipeError: unknown flag '--rank'. Did you mean --ranks? See "),
    "its field's word": ("digits --world-size 2", "RecipeError: unknown flag '--world-size'. Did you mean --ranks?"),
    "a run's flag before the recipe": ("--epochs 3 digits", "RecipeError: the recipe comes first, got '--epochs'"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(argv, message, capsys):
    assert planned(argv, capsys, 2).startswith(message)


def test_plans_help_has_its_own_flags_and_none_of_how_a_run_is_started(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "synthetic", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert {"--ranks", "--framework", "--examples", "--valid-examples", "--batch-size"} <= set(out.split())
    assert not {"--output", "--resume", "--engine", "--tracker", "--devices"} & set(out.split())
    assert out.count("--examples INT") == 1
    assert max(map(len, out.splitlines())) <= 80


def test_the_published_sets_are_those_whose_files_a_user_brings():
    assert {name: plan.missing(name, None) for name in ("linear", "digits", "synthetic", "a.b:c")} == dict.fromkeys(
        ("linear", "digits", "synthetic", "a.b:c"), ""
    )


@needs_torch
@pytest.mark.parametrize(
    ("oddity", "line"), [("groups", "x0.1 for 66 parameters, x1 for 13 parameters"), ("view", None)]
)
def test_groups_with_lrs_of_their_own(oddity, line, capsys):
    from odd_drawn import ODDITIES

    seed = f"seed={ODDITIES.index(oddity)}"
    out = planned(f"{SUPPORT}/odd.yaml --model-args {seed} --dataset-args {seed} --optimizer-args {seed}", capsys)
    assert [each for each in out.splitlines() if each.startswith("LR groups")] == [f"LR groups   {line}"] * bool(line)
