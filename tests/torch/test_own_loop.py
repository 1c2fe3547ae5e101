"""A loop of one's own, in one process: what it may get wrong, what a checkpoint holds of a scheduler, its settings."""

import dataclasses
import importlib
import json
import subprocess
from collections import Counter

import pytest
import warm
from paths import SUPPORT
from ranks import clean_environ, needs_torch

from hvdtrain.core import settings
from hvdtrain.core.recipe import Recipe

pytestmark = needs_torch

FORGOTTEN = (
    "LoopError: the optimizer has a scheduler that no checkpoint would hold; make it before world.run, and give it as "
    "world.run(..., scheduler=scheduler)."
)
BEGAN = "this epoch began with"
MISUSE = {
    "wrapped model": "LoopError: the model is wrapped in DataParallel: give the model itself, hvdtrain averages.",
    "no model": "LoopError: the model must be a torch.nn.Module, got a str.",
    "model elsewhere": "LoopError: weight of the model is on meta, this rank computes on cpu; call "
    "model.to(world.device) before the optimizer is made.",
    "nothing learns": "LoopError: model Linear has no parameter that learns; give one that has.",
    "optimizer of another model": "LoopError: optimizer SGD has parameters that the model has not, so no checkpoint "
    "could name its state; give each parameter of the model to one optimizer.",
    "optimizer not given": "LoopError: SGD updates bias of the model, and no checkpoint would hold its state; give "
    "world.run all optimizers, as (first, second).",
    "optimizer twice": "LoopError: the optimizer must be a torch.optim.Optimizer, got a str.",
    "no optimizer": "LoopError: the optimizer must be a torch.optim.Optimizer, got a str.",
    "scheduler of another optimizer": "LoopError: the scheduler is of another optimizer; make it of the one that is "
    "given.",
    "scheduler without a state": "LoopError: the scheduler (Stateless) has no state_dict and load_state_dict, so the "
    "run could not be resumed; give it both.",
    "scheduler with another state": "LoopError: scheduler Unsaved keeps a value of type object, which no checkpoint "
    "holds; take one of numbers and text.",
    "scheduler forgotten": FORGOTTEN,
    "scheduler made late": FORGOTTEN,
    "interval": "LoopError: keep_checkpoints must be at least 1, got 0.",
    "epochs": "LoopError: epochs and max_steps must be at least 1, got 0 and None.",
    "batch too large": "LoopError: batch_size must be at most the 32 training examples, got 64.",
    "batch of nothing": "LoopError: batch_size counts the examples of all ranks: it must be at least 1, got 0.",
    "empty data": "DataError: the data set (list) has no samples: its length is 0.",
    "iterable data": "DataError: the data set (Stream) has no samples by index, so no order of them could be the same "
    "for every number of ranks; give it __len__ and __getitem__ (a map-style data set).",
    "step forgotten": "LoopError: run.step() was not called after a batch; call it after each optimizer.step().",
    "step alone": "LoopError: run.step() comes once after each batch of run.batches(), not without one.",
    "batches outside": "LoopError: run.batches() was called outside of run.epochs(); take run.each_once() to validate.",
    "batches twice": "LoopError: run.batches() was called twice in one epoch; take run.each_once() to validate.",
    "report outside": "LoopError: run.report() was called outside of run.epochs(); call it at the end of an epoch.",
    "step before the update": "LoopError: run.step() came before optimizer.step(), which its checkpoint would not "
    "hold; call it after.",
    "schedule after the step": "LoopError: the learning rate changed after run.step(), whose checkpoint does not hold "
    "that; call scheduler.step() before it.",
    "no steps": "LoopError: epoch 0 ended without a step; train on run.batches() and call run.step().",
    "two runs": 'LoopError: the run before this one has epochs left; end it first, by run.stop("why") in its last '
    "epoch or by break, or train both models as one Module.",
    "loss of several": "LoopError: a loss or metric must be one number, got shape [8, 1]; take its mean().",
    "loss of nothing": "LoopError: a loss or metric must be a number, got a NoneType.",
    "reported name": "LoopError: a reported number must not be called epoch, which each record has; take another name.",
    "best without report": "LoopError: accuracy decides on the best checkpoint, but run.report() got train_loss, acc; "
    "report it.",
    "diverging": "DivergedError: the training loss is inf at step 2; lower the learning rate (now 1e+30), warm it up, "
    "or clip the gradients.",
    "another batch": f"LoopError: {BEGAN} batch_size 8, got 4; it can change only between epochs, or in another "
    "folder.",
    "other classes": "CheckpointError: class 0 is 'pear' in the data, 'apple' in the checkpoint of step 2 (2 classes "
    "now, 2 then): the network has learned other labels; restore the class folders, or give world.run another "
    "folder.",
    "another seed": "LoopError: the run began with seed=0, got 1; give that, or another folder.",
    "a scheduler since": "LoopError: the checkpoint of step 2 has 0 schedulers, this program has 1; make them alike, "
    "or give another folder.",
    "another model": "CheckpointError: another-model holds checkpoints of another model (Linear, 2 parameters, SGD), "
    "this run trains Linear, 1 parameters, SGD; give world.run another folder.",
    "unwritable": "OutputError: cannot write to the run folder /proc/runs: No such file or directory; give world.run a "
    "writable folder.",
    "engine": "LoopError: engine must be one of auto, horovod, local, ddp, got 'mirrored'.",
    "device": "LoopError: device must be one of auto, cpu, cuda, got 'gpu'.",
    "compression": "LoopError: compression must be one of none, fp16, fp64 with engine local, got 'zip'.",
    "variable": "LoopError: engine must be one of auto, horovod, local, ddp, got 'nccl'.",
}


@pytest.fixture(scope="module")
def misuse(tmp_path_factory):
    """What each case ended with; all in one process."""
    done = subprocess.run(
        warm.command("torch", SUPPORT / "own_loop_misuse.py"), cwd=tmp_path_factory.mktemp("misuse"),
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", MISUSE)
def test_what_a_program_gets_wrong_is_one_line(misuse, case):
    assert misuse[case] == [1 if case == "diverging" else 2, f"{MISUSE[case]}\n"]


CHANGED = {
    "more": (40, "40 examples, 32 before", 5),
    "fewer": (24, "24 examples, 32 before", 3),
    "others": (32, "another list of examples", 4),
    "the same": (32, "", 2),
}


@pytest.mark.parametrize("case", CHANGED)
def test_an_epoch_whose_data_have_changed_begins_anew(case, tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    def train(x, max_steps=None):
        seen = []
        with ht.join(device="cpu") as world:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = world.run(tmp_path / "run", model, optimizer, checkpoint_every_steps=1)
            for _ in run.epochs(1, max_steps=max_steps):
                for a, b in run.batches((x, x), 8):
                    loss = (model(a) - b).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    seen.append(a)
                    run.step(loss)
        return torch.cat(seen)

    count, change, batches = CHANGED[case]
    x = torch.arange(40.0)[:, None] / 40
    train(x[:32], max_steps=2)
    assert "the data have changed" not in capsys.readouterr().out
    seen = train(1 - x[:count] if case == "others" else x[:count])
    out = capsys.readouterr().out
    assert ("the data have changed since the checkpoint of step 2" in out) == bool(change)
    assert len(seen) == len(seen.unique()) == 8 * batches
    if change:
        assert f"({change}): this epoch begins anew with them" in out.replace("then", "before")


def test_modules_that_have_changed_since_the_checkpoint_are_named(tmp_path, capsys, monkeypatch):
    import torch

    import hvdtrain.torch as ht

    def train(max_steps):
        with ht.join(device="cpu") as world:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = world.run(tmp_path / "run", model, optimizer)
            for _ in run.epochs(1, max_steps=max_steps):
                for a, b in run.batches((torch.ones(8, 1),) * 2, 2):
                    (loss := (model(a) - b).square().mean()).backward()
                    optimizer.step()
                    run.step(loss)
        return capsys.readouterr().out

    (tmp_path / "my_nets.py").write_text("WIDTH = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_nets")
    assert "the code of" not in train(1)
    assert "the code of" not in train(2)
    (tmp_path / "my_nets.py").write_text("WIDTH = 3\n")
    assert "the code of my_nets has changed since the checkpoint of step 2\n" in train(3)
    assert "the code of" not in train(4)


def test_all_that_a_program_gets_wrong_is_tried(misuse):
    assert misuse.keys() == MISUSE.keys()


def test_batch_norms_that_see_their_own_rank_alone_are_named():
    import torch
    from torch import nn

    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.models import with_sync_batch_norm
    from hvdtrain.torch.user_loop.program import of_batch_norms

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm3d(2, track_running_stats=False))
    assert of_batch_norms(nn.Linear(1, 1)) is None
    assert of_batch_norms(model) == (
        "BatchNorm (1 and 1 more) normalises by each rank's part of the batch, so the curve depends on the number of "
        "ranks; for the whole batch's, take model = world.sync_batch_norm(model) before the optimizer is made"
    )
    assert of_batch_norms(model.eval()).startswith("BatchNorm (2) ")
    assert of_batch_norms(nn.BatchNorm2d(2)).startswith("BatchNorm (the model) ")
    assert of_batch_norms(with_sync_batch_norm(model.train(), LocalEngine(torch.device("cpu")))) is None


def test_a_schedulers_state_survives_json():
    from hvdtrain.torch.resumable import packed, unpacked

    state = {"milestones": Counter({30: 1, 60: 2}), "best": float("inf"), "betas": (0.9, 0.99), 3: [None, True, {}]}
    back = unpacked(packed(state, "a scheduler"))
    assert back == state
    assert isinstance(back["milestones"], Counter)
    assert isinstance(back["betas"], tuple)


def test_the_best_checkpoint_has_the_lowest_loss_unless_it_is_told():
    from hvdtrain.torch.user_loop.run import score

    values = {"train_loss": 1.0, "valid_loss": 2.0, "accuracy": 3.0}
    told = [(None, None), ("accuracy", None), (None, "accuracy")]
    assert [score(values, best) for best in told] == [-2.0, 3.0, -3.0]
    assert score({"train_loss": 1.0}, (None, None)) == -1.0


def made(lr=0.1, scheduler=None, groups=1, **more):
    """What a program gives of its optimizer and scheduler."""
    import torch

    from hvdtrain.torch.resumable import given_settings

    parameters = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(groups)]
    optimizer = torch.optim.AdamW(parameters, lr=lr, **more)
    return given_settings([optimizer], [scheduler(optimizer)] if scheduler else [])


def warmed_up(optimizer, steps=30):
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    return SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, steps)], [5])


def cycled(optimizer):
    import torch

    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, 100)


GIVES = "the program gives {}, this run began with {} and keeps its own; for another value give another folder"


@pytest.mark.parametrize(
    ("now", "began", "kinds", "values"),
    [
        ({"lr": 0.2}, {}, "optimizer", ["lr=0.2", "lr=0.1"]),
        ({"lr": 0.2, "scheduler": warmed_up}, {"scheduler": warmed_up}, "optimizer", ["lr=0.2", "lr=0.1"]),
        ({"scheduler": warmed_up}, {}, None, []),
        ({"scheduler": cycled}, {"scheduler": cycled}, None, []),
        (
            {"scheduler": lambda optimizer: warmed_up(optimizer, 60)},
            {"scheduler": warmed_up},
            "scheduler",
            ["part 1 T_max=60", "part 1 T_max=30"],
        ),
        (
            {"betas": (0.9, 0.9), "weight_decay": 0.0, "groups": 2},
            {"groups": 2, "lr": 0.2},
            "optimizer",
            ["group 0 lr=0.1, group 0 betas=(0.9, 0.9), group 0 weight_decay=0.0, group 1 lr=0.1 and 2 more",
             "group 0 lr=0.2, group 0 betas=(0.9, 0.999), group 0 weight_decay=0.01, group 1 lr=0.2 and 2 more"],
        ),
    ],
    ids=["lr", "lr under a scheduler", "a scheduler changes it", "a cycle", "of a scheduler's part", "groups"],
)  # fmt: skip
def test_other_settings_than_the_runs_first_are_named(now, began, kinds, values):
    from hvdtrain.torch.resumable import changed_settings

    assert changed_settings(made(**now), made(**began)) == (f"{kinds}: {GIVES.format(*values)}" if kinds else "")
    assert changed_settings(made(**now), {}) == ""


@pytest.mark.parametrize("name", ["UserEngineSettings", "UserIntervals"])
def test_without_a_recipe_its_defaults_hold(name):
    for field in dataclasses.fields(getattr(settings, name)):
        assert field.default == Recipe.model_fields[field.name].default, field.name


STOPS = """
import sys, torch
import hvdtrain.torch as ht
X, Y = torch.ones(8, 1), torch.zeros(8, 1)
def train(world, folder, stop=None, leave=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, trained = world.run(folder, model, optimizer, trackers=()), []
    for epoch in run.epochs(5):
        trained.append(epoch)
        for x, y in run.batches((X, Y), batch_size=4):
            loss = (model(x) - y).square().mean()
            loss.backward(), optimizer.step(), optimizer.zero_grad(), run.step(loss)
        if epoch == stop: run.stop("no better")
        if epoch == leave: break
    print("TRAINED", folder, trained)
for _ in range(2):
    with ht.join(device="cpu") as world:
        train(world, "stopped", stop=1)
        train(world, "left", leave=1)
with ht.join(device="cpu") as world:
    train(world, "fold")
    train(world, "fold")
"""


def test_a_run_is_stopped_for_good_left_or_refused_a_folder(python):
    ended = python("-c", STOPS)
    trained = [line for line in ended.stdout.splitlines() if line.startswith("TRAINED")]
    stopped, left = "TRAINED stopped", "TRAINED left"
    assert trained == [
        f"{stopped} [0, 1]", f"{left} [0, 1]", f"{stopped} []", f"{left} [2, 3, 4]", "TRAINED fold [0, 1, 2, 3, 4]"
    ]  # fmt: skip
    assert "stopped after epoch 1: no better" in ended.stdout
    assert "this folder's run was stopped (no better): it is finished at epoch 2, step 4, and" in ended.stdout
    assert "left at step 4 with epochs to go: the same command continues." in ended.stdout
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        "fold is the folder of another model's run in this program, which it would continue; give each run a folder of "
        "its own, as of each fold.\n"
    )
