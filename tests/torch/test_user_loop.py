"""A user's own loop in one process: its mistakes, changed data and code, and what a checkpoint holds of a scheduler."""

import contextlib
import copy
import gc
import importlib
import inspect
import io
import itertools
import json
import math
import os
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from marks import marked
from ranks import needs_torch, wait_until

from hvdtrain.core.recipe import Recipe, of_program
from hvdtrain.run.session import INTERVALS
from hvdtrain.terminal import END_SIGNALS

pytestmark = needs_torch

FORGOTTEN = "LoopError: the optimizer has a scheduler that no checkpoint would hold; make it before world.run, "
NO_BATCH = "LoopError: run.step() comes once after each batch of run.batches(), not without one; in place of a Data"
NO_UPDATE = "LoopError: a batch got no update; leave it out by run.skip(), on all ranks; for an update of k batches "
BESIDE = "LoopError: a run.batches() beside another gives one batch for each update, and the epoch ends with it; "
MISUSE = {  # by case of own_loop_misuse.py: how its line begins
    "wrapped model": "LoopError: the model is wrapped in DataParallel: give the model itself, hvdtrain averages.",
    "no model": "LoopError: the model must be a torch.nn.Module, got a str.",
    "model elsewhere": "LoopError: weight of the model is on meta, this rank computes on cpu; call model.to(",
    "nothing learns": "LoopError: model Linear has no parameter that learns; ",
    "optimizer of another model": "LoopError: optimizer SGD has parameters that the model has not, so no checkpoint ",
    "optimizer not given": "LoopError: SGD updates bias of the model, and no checkpoint would hold its state; ",
    "optimizer with a closure": "LoopError: LBFGS keeps lists of steps, which no checkpoint holds; ",
    "optimizer of lists": "CheckpointError: optimizer Listing keeps a list as steps.weight, which no checkpoint ",
    "state that is a number": "LoopError: state 'best' is a float, which no resume could give back to the program; ",
    "state without a name": "LoopError: state has the name 'a b'; ",
    "state that is not given": "CheckpointError: the checkpoint holds state 'best', which world.run does not get ",
    "a layer since": "CheckpointError: run holds checkpoints of another model (Sequential, 4 parameters, SGD), "
    "this run trains Sequential, 2 parameters, SGD; build all its layers before the start, or give ",
    "optimizer twice": "LoopError: the optimizer must be a torch.optim.Optimizer, got a str.",
    "scheduler of another optimizer": "LoopError: the scheduler is of another optimizer; ",
    "scheduler without a state": "LoopError: the scheduler (Stateless) has no state_dict and load_state_dict, ",
    "scheduler with another state": "LoopError: scheduler Unsaved keeps a value of type object, which no checkpoint ",
    "scheduler forgotten": FORGOTTEN,
    "scheduler made late": FORGOTTEN,
    "interval": "LoopError: keep_checkpoints must be at least 1, got 0.",
    "epochs": "LoopError: epochs and max_steps must be at least 1, got 0 and None.",
    "batch too large": "LoopError: batch_size must be at most the 32 training examples, got 64.",
    "batch of nothing": "LoopError: batch_size counts the examples of all ranks: it must be at least 1, got 0.",
    "empty data": "DataError: the data set (list) has no samples: its length is 0.",
    "iterable data": "DataError: the data set (Stream) has no samples by index, so no order of them could be the same ",
    "step forgotten": "LoopError: run.step() was not called after a batch; ",
    "step alone": NO_BATCH,
    "loader of its own": NO_BATCH,
    "prefetched": "LoopError: a batch was read before run.step() of the one before, as a prefetcher does: give ",
    "update every fourth": NO_UPDATE,
    "batch left out": NO_UPDATE,
    "sampler": "LoopError: run.batches() and run.each_once() take no sampler: give them the data set itself, ",
    "loader given": "LoopError: run.batches() and run.each_once() take no DataLoader: give them the data set itself, ",
    "second set cycled": BESIDE,
    "second set again": BESIDE,
    "second set faster": BESIDE,
    "batches outside": "LoopError: run.batches() was called outside of run.epochs(); ",
    "batches twice": "LoopError: run.batches() was called twice in one epoch; ",
    "report outside": "LoopError: run.report() was called outside of run.epochs(); ",
    "step before the update": "LoopError: run.step() came before optimizer.step(), which its checkpoint would not "
    "hold; call it after; leave an update out by run.skip(), on all ranks, or by a GradScaler, as world.run(..., sc",
    "schedule after the step": "LoopError: the learning rate changed after run.step(), whose checkpoint does not ",
    "no steps": "LoopError: epoch 0 ended without a step; ",
    "two runs": "LoopError: the run before this one has epochs left; end it first, ",
    "loss of several": "LoopError: a loss or metric must be one number, got shape [8, 1]; ",
    "loss of nothing": "LoopError: a loss or metric must be a number, got a dict.",
    "loss unseen": "LoopError: run.step() needs a loss where no backward() under run.accumulating() began at one.",
    "reported name": "LoopError: a reported number must not be called epoch, ",
    "best without report": "LoopError: accuracy decides on the best checkpoint, but run.report() got train_loss, acc; ",
    "diverging": "DivergedError: the training loss is inf at step 2; lower the learning rate (now 1e+30), ",
    "another batch": "LoopError: this epoch began with batch_size 8, got 4; ",
    "other classes": "CheckpointError: class 0 is 'pear' in the data, 'apple' in the checkpoint of step 2 ",
    "another seed": "LoopError: the run began with seed=0, got 1; ",
    "a scheduler since": "LoopError: the checkpoint of step 2 has 0 schedulers, this program has 1; ",
    "another model": "CheckpointError: run holds checkpoints of another model (Linear, 2 parameters, SGD), "
    "this run trains Linear, 1 parameters, SGD; build all its layers before the start, or give another "
    "folder to world.run.",
    "unwritable": "OutputError: cannot write to the run folder /proc/runs: No such file or directory; give a writable "
    "folder to world.run.",
    "engine": "LoopError: engine must be one of auto, horovod, local, ddp, got 'mirrored'.",
    "device": "LoopError: device must be one of auto, cpu, cuda, got 'gpu'.",
    "compression": "LoopError: compression must be one of none, fp16, fp64 with engine local, got 'zip'.",
    "variable": "LoopError: engine must be one of auto, horovod, local, ddp, got 'nccl'.",
}


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """A look at what a program keeps goes through all objects of the process, but for those that are frozen."""
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def handlers():
    """What ends a process sets its signals' handlers."""
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("case", MISUSE)
def test_what_a_program_gets_wrong_is_one_line(case, tmp_path, monkeypatch):
    from own_loop_misuse import CASES, ended

    monkeypatch.chdir(tmp_path)
    if case == "variable":
        monkeypatch.setenv("HVDTRAIN_ENGINE", "nccl")
    assert CASES.keys() == MISUSE.keys()
    code, err = ended(CASES[case], "run")
    assert code == (1 if case == "diverging" else 2)
    assert err.startswith(MISUSE[case]) and err.count("\n") == 1


def flat(of):
    import torch

    return torch.cat([torch.as_tensor(each, dtype=torch.float64).detach().flatten() for each in of()])


def resumed(make, folder, cut):
    """What a program has in the end that is cut after this step, then resumed, and what it has without that; and the
    lines that name what no checkpoint holds."""
    import torch

    import hvdtrain.torch as ht

    def launch(name, max_steps=None):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model, optimizers, update, watch, begin, more = make()
            with ht.join(device="cpu") as world:
                run = world.run(folder / name, model, optimizers, trackers=(), checkpoint_every_steps=1, **more)
                for epoch in run.epochs(6, max_steps=max_steps):
                    begin(epoch)
                    for x, y in run.batches(own_loop_kept.data(), batch_size=16):
                        run.step(update(x, y))
            return flat(watch)
        finally:
            torch.set_default_dtype(before)

    import own_loop_kept

    whole = launch("whole")
    own_loop_kept.COMPILED = False
    launch("cut", cut)
    own_loop_kept.COMPILED = True
    return launch("cut"), whole


KEPT = (
    "sam",
    "lookahead",
    "centers",
    "thawed",
    "with_state",
    "drawn",
    "zeroed",
    "compiled",
    "scaled",
    "phases",
    "aliased",
)


@pytest.mark.parametrize("case", marked(KEPT, slow={"sam", "centers", "thawed", "zeroed", "phases"}))
def test_a_resume_gives_back_all_that_a_program_keeps(case, tmp_path, capsys):
    import own_loop_kept

    back, whole = resumed(getattr(own_loop_kept, case), tmp_path, int(np.random.default_rng().integers(3, 11)))
    np.testing.assert_allclose(back, whole, rtol=0, atol=1e-12)
    assert "no checkpoint" not in capsys.readouterr().out


def test_weights_that_are_changed_after_a_resume_are_refused_and_draws_after_a_run_follow_from_its_number(
    tmp_path, capsys
):
    import torch

    import hvdtrain.torch as ht

    def folds(*, loads=False):
        """What is drawn after each of two folds."""
        torch.manual_seed(len(drawn))
        found = []
        for fold in ("a", "b"):
            model = torch.nn.Linear(1, 1)
            run = world.run(tmp_path / fold, model, torch.optim.SGD(model.parameters(), lr=0.1), trackers=())
            if loads:
                torch.nn.init.zeros_(model.weight)
            for _ in run.epochs(3 if loads else 2):
                for x, y in run.batches((torch.ones(4, 1), torch.ones(4, 1)), 2):
                    model.zero_grad()
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                    run._order._program.optimizers[0].step()
                    run.step(loss)
            found.append(torch.rand(()).item())
        return found

    drawn = []
    for _ in range(2):  # the second time nothing is trained
        with ht.join(device="cpu") as world:
            drawn.append(folds())
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    with pytest.raises(SystemExit), ht.join(device="cpu") as world:
        folds(loads=True)
    assert "LoopError: the program has changed the weights since world.run took them from" in capsys.readouterr().err


class Warming:
    """Has a state, as a warm-up of one's own."""

    steps = 0

    def state_dict(self):
        return {"steps": self.steps}


def test_what_no_checkpoint_holds_is_named_once(tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    x, model, teacher = torch.ones(8, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer, warm = torch.optim.SGD(model.parameters(), lr=0.1), Warming()
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.LinearLR(optimizer)])
    average, scale = torch.optim.swa_utils.AveragedModel(model), torch.nn.Linear(1, 1)
    late, noise = torch.optim.swa_utils.AveragedModel(model), torch.Generator()
    seldom, late_noise = torch.Generator(), torch.zeros(1)
    of_scale, model.temperature = torch.optim.SGD(scale.parameters(), lr=0.1), 1.0
    with ht.join(device="cpu") as world:
        run = world.run(tmp_path, model, optimizer, scheduler=scheduler, trackers=(), checkpoint_every_steps=1)
        for _ in run.epochs(2):
            for a, b in run.batches((x, x), 2):
                loss = (scale(model(a)) - teacher(b).detach()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                of_scale.step()
                scheduler.step()
                average.update_parameters(model)
                warm.steps += 1
                model.temperature += torch.rand((), generator=noise).item()
                if run.global_step > 4:
                    late.update_parameters(model)
                    late_noise.normal_(generator=seldom)
                run.step(loss)
    out = capsys.readouterr().out
    kinds = {"average": "AveragedModel", "warm": "Warming", "scale": "Linear", "late": "AveragedModel"}
    for name, kind in (kinds | {"noise": "Generator", "seldom": "Generator"}).items():
        gives = f"world.run(..., state={{'{name}': {name}}})"
        assert out.count(f"INFO - {name} ({kind}) has changed and no checkpoint holds it: give it as {gives}\n") == 1
    assert out.count("no checkpoint holds it") == 6
    assert out.count("temperature of the model has changed, and no checkpoint holds an attribute: register a buf") == 1


def test_a_copy_that_is_another_at_a_resume_is_named(tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    x = torch.ones(8, 1)
    for steps, is_named in ((2, False), (4, True)):
        model, teacher = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        torch.nn.init.ones_(teacher.weight)
        torch.nn.init.ones_(teacher.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ht.join(device="cpu") as world:
            run = world.run(tmp_path, model, optimizer, trackers=(), checkpoint_every_steps=1)
            reference = copy.deepcopy(model)
            for _ in run.epochs(1, max_steps=steps):
                for a, b in run.batches((x, x), 2):
                    loss = (model(a) - teacher(b) + reference(b).detach()).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.step(loss)
        out = capsys.readouterr().out
        assert ("reference is not what it was at the run's first start, and no checkpoint holds it" in out) == is_named
        assert "teacher" not in out


@pytest.mark.parametrize("case", ["compiled", "centers"])
def test_a_model_is_exported_under_its_own_names(case, tmp_path):
    import own_loop_kept

    from hvdtrain.record.checkpoint import newest
    from hvdtrain.torch.state import weights

    resumed(getattr(own_loop_kept, case), tmp_path, 4)
    found, _ = weights(newest(tmp_path / "cut" / "checkpoints")[0])
    own_loop_kept.net().load_state_dict(found)


def train_in(world, folder, x, batch_size=8, epochs=1, max_steps=None, stop=None, leave=None):
    """The epochs and the examples on which a run in this folder trains, which is stopped or left in these epochs."""
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, trained, seen = world.run(folder, model, optimizer, checkpoint_every_steps=1, trackers=()), [], []
    for epoch in run.epochs(epochs, max_steps=max_steps):
        trained.append(epoch)
        for a, b in run.batches((x, x), batch_size):
            loss = (model(a) - b).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += a
            run.step(loss)
        if epoch == stop:
            run.stop("no better")
        if epoch == leave:
            break
    return trained, seen


def test_another_program_in_the_folder_of_a_finished_run_is_refused(tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    def start(lr=0.1, epochs=1, batch_size=8):
        with ht.join(device="cpu") as world:
            model = torch.nn.Linear(1, 1)
            groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}]
            optimizer = torch.optim.SGD(groups, lr=lr)
            run = world.run(tmp_path, model, optimizer, trackers=())
            for _ in run.epochs(epochs):
                for (a,) in run.batches((torch.ones(8, 1),), batch_size):
                    loss = model(a).mean()
                    loss.backward()
                    optimizer.step()
                    run.step(loss)
        return capsys.readouterr().out

    assert "LR (first of 2 groups): 0.1," in start()
    assert "finished at step 1 before: nothing was trained; everything is in" in start()
    with pytest.raises(SystemExit):
        start(lr=0.2)
    text = (
        "LoopError: nothing would be trained, as another run has finished in this folder: optimizer: the program gives "
    )
    assert f"{text}group 0 lr=0.2, this run began with group 0 lr=0.1" in capsys.readouterr().err
    assert "finished at step 2; everything" in start(lr=0.2, epochs=2)


def test_the_best_weights_come_back_after_the_last_epoch(tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    def start(epochs, **more):
        """The weight after each epoch, and the best one."""
        with ht.join(device="cpu") as world:
            model, made, average = torch.nn.Linear(1, 1), [], torch.zeros(1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = world.run(tmp_path, model, optimizer, trackers=(), state={"average": average}, lowest="cells")
            for epoch in run.epochs(epochs):
                for (a,) in run.batches((torch.ones(8, 1),), 8):
                    loss = model(a).mean()
                    loss.backward()
                    optimizer.step()
                    average.add_(1)
                    run.step(loss)
                made.append(model.weight.item())
                run.report(cells=abs(epoch - 1))
                if more.get("early"):
                    run.best()
            step = run.best()
            return (
                made,
                step,
                model.weight.item(),
                average.item(),
                sum(1 for _ in run.each_once((torch.ones(8, 1),), 8)),
            )

    made, step, weight, average, batches = start(4)
    assert (step, weight, average, batches) == (2, made[1], 2, 1)
    assert "the weights are those of the best checkpoint, of step 2, from now on" in capsys.readouterr().out
    assert start(4)[:3] == ([], 2, weight)  # a later start tests again
    made, step, weight, *_ = start(5)  # and trains on from the newest
    assert (len(made), step) == (1, 2)
    assert made[0] < start(4)[2]
    with pytest.raises(SystemExit):
        start(6, early=True)
    assert "LoopError: run.best() was called before the run's end; call it after the loop" in capsys.readouterr().err


def train(*given, **more):
    """The same in a world of its own."""
    import hvdtrain.torch as ht

    with ht.join(device="cpu") as world:
        return train_in(world, *given, **more)


def test_a_program_is_over_when_a_number_it_reports_is_no_better(tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    x, values = torch.ones(8, 1), [None, 9.0, 0.5, 0.7, 0.75, 0.6, 0.74, 0.5, 0.4]

    def start(epochs, **rule):
        trained = []
        with ht.join(device="cpu") as world:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = world.run(tmp_path, model, optimizer, highest="f1", trackers=(), checkpoint_every_epochs=9)
            if rule:
                run.stop_when(**rule)
            for epoch in run.epochs(epochs):
                trained.append(epoch)
                for (a,) in run.batches((x,), 8):
                    model(a).mean().backward()
                    optimizer.step()
                    run.step(0.0)
                if (value := values[epoch]) is not None:
                    run.report(f1=value)
        return trained

    rule = {"min_delta": 0.1, "after_epoch": 2}
    assert start(4, patience=2, **rule) == [0, 1, 2, 3]
    assert start(9, patience=2, **rule) == [4, 5]
    out = capsys.readouterr().out
    line = "f1 has not been above 0.7 by more than 0.1 since epoch 4; best is kept"
    assert f"stopped early at epoch 6: {line}" in out
    assert "run.stop_when: epoch 1 does not count, as it has no f1" in out
    assert (tmp_path / "checkpoints/step-00000004").exists()
    assert start(9, patience=2, **rule) == []
    text = f"this folder's run was stopped ({line}; a larger patience trains on): it is finished at epoch 6, step 6"
    assert text in capsys.readouterr().out
    assert start(9, patience=3, **rule) == [6]
    assert start(9) == [7, 8]  # without the rule
    for given, text in (
        ({"patience": 0}, "patience of run.stop_when() must be a whole number of at least 1, got 0."),
        ({"patience": 1, "min_delta": math.nan}, "min_delta of run.stop_when() must be at least 0, got nan."),
        ({"patience": 1, "metric": "cells"}, "metric of run.stop_when() must say whether higher or lower is better"),
    ):
        with pytest.raises(SystemExit):
            start(9, **given)
        assert f"LoopError: {text}" in capsys.readouterr().err


def test_a_signal_in_a_validation_stops_a_program_at_the_epochs_end(tmp_path):
    import torch

    import hvdtrain.torch as ht

    x, called = torch.arange(8.0)[:, None] / 8, []

    def exits(number, _):
        called.append(number)
        raise SystemExit(3)

    def folds(*names, signalled=None):
        """The weights and the epochs of these runs of one step an epoch, of which one is signalled in its validation,
        and the exit code."""
        found, code = {}, 0
        try:
            with ht.join(device="cpu") as world:
                for name in names:
                    torch.manual_seed(0)
                    model, trained = torch.nn.Linear(1, 1), []
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                    run = world.run(tmp_path / name, model, optimizer, checkpoint_every_epochs=9, trackers=())
                    found[name] = model, trained
                    for epoch in run.epochs(3):
                        trained.append(epoch)
                        for (a,) in run.batches((x,), 8):
                            loss = (model(a) - a).square().mean()
                            optimizer.zero_grad()
                            loss.backward()
                            optimizer.step()
                            run.step(loss)
                        for _ in run.each_once((x,), 8):
                            if (name, epoch) == signalled:
                                os.kill(os.getpid(), signal.SIGUSR1)
                                wait_until(lambda: world._runs._process.world.stop.signal and called)
        except SystemExit as error:
            code = error.code
        return {name: (model.weight.item(), trained) for name, (model, trained) in found.items()}, code

    before = signal.signal(signal.SIGUSR1, exits)
    try:
        whole, code = folds("whole")
        assert (whole["whole"][1], code) == ([0, 1, 2], 0)
        stopped, code = folds("first", signalled=("first", 1))
        assert (stopped["first"][1], code) == ([0, 1], 138)
        assert json.loads((tmp_path / "first/status.json").read_text())["error"].startswith(
            "SIGUSR1: stopped after step 2"
        )
        resumed, code = folds("first", "second", signalled=("first", 2))
        assert resumed["first"] == (whole["whole"][0], [2])
        assert (resumed["second"][1], code) == ([0], 138)
        assert called == [signal.SIGUSR1] * 2
        assert signal.getsignal(signal.SIGUSR1) is exits
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_two_sets_are_read_side_by_side_in_the_documented_order(tmp_path):
    import torch

    import hvdtrain.torch as ht

    def read(world, max_steps):
        """The rows of both sets in each step, and how many batches of each were left."""
        model = torch.nn.Linear(1, 1)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        run = world.run(tmp_path, model, optimizer, seed=3, trackers=(), highest="even")
        for epoch in run.epochs(3, max_steps=max_steps):
            first, second = (run.batches((x,), size, workers=int(max_steps == 6)) for size in (8, 4))
            for (a,), (b,) in zip(first, second, strict=False):
                seen.append((a[:, 0].tolist(), b[:, 0].tolist(), len(first), len(second)))
                model(a).mean().backward()
                optimizer.step()
                run.step(0.0)
            run.report(**({"odd": 1} if epoch % 2 else {"even": epoch}))
        return seen

    x = torch.arange(32.0)[:, None]
    rows = []
    for max_steps in (6, None):
        with ht.join(device="cpu") as world:
            rows += read(world, max_steps)
    assert len(rows) == 12
    for step, (a, b, *left) in enumerate(rows):
        epoch, number = divmod(step, 4)
        assert left == [min(each - number, 6 - step if step < 6 else 9) for each in (4, 8)]
        for own, size, batch, seed in ((a, 32, 8, 3), (b, 32, 4, 4)):
            order = np.random.default_rng([seed, epoch, 0]).permutation(size)
            assert own == order[batch * number :][:batch].tolist(), (step, batch)


CHANGED = {  # by name: how many examples, what the line says of them, batches
    "more": (40, "40 examples, 32 before", 5),
    "fewer": (24, "24 examples, 32 before", 3),
    "others": (32, "another list of examples", 4),
    "the same": (32, "", 2),
}


@pytest.mark.parametrize("case", CHANGED)
def test_an_epoch_whose_data_have_changed_begins_anew(case, tmp_path, capsys):
    import torch

    count, change, batches = CHANGED[case]
    x = torch.arange(40.0)[:, None] / 40
    train(tmp_path, x[:32], max_steps=2)
    assert "the data have changed" not in capsys.readouterr().out
    _, seen = train(tmp_path, 1 - x[:count] if case == "others" else x[:count])
    out = capsys.readouterr().out
    assert ("the data have changed since the checkpoint of step 2" in out) == bool(change)
    assert len(seen) == len(torch.cat(seen).unique()) == 8 * batches
    if change:
        assert f"({change}): this epoch begins anew with them" in out.replace("then", "before")


class Rows:
    """Examples whose labels are numbered as `order` has it; no attribute shows them. Counts what is read."""

    def __init__(self, count=32, order="abc", shift=0.0, reverse=False, fails=()):
        self.rows = [{"row": row, "name": "abc"[row % 3]} for row in range(count)]
        self.rows = self.rows[::-1] if reverse else self.rows
        self.order, self.shift, self.fails, self.read = order, shift, fails, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        import torch

        self.read.append(index)
        if index in self.fails:
            raise ValueError("damaged")
        item = self.rows[index]
        return torch.full((2,), item["row"] / 32) + self.shift, self.order.index(item["name"])


def trained(folder, sets, batch_size=4, max_steps=None, **more):
    """What a run prints that trains on a set in each epoch: its log, and the line with which it ends, or ""."""
    import torch

    import hvdtrain.torch as ht

    out, err = io.StringIO(), io.StringIO()
    printed = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with printed[0], printed[1], contextlib.suppress(SystemExit), ht.join(device="cpu") as world:
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = world.run(folder, model, optimizer, checkpoint_every_steps=1, trackers=(), **more)
        for epoch in run.epochs(len(sets), max_steps=max_steps):
            for a, b in run.batches(sets[epoch], batch_size):
                loss = torch.nn.functional.cross_entropy(model(a), b)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
    return out.getvalue(), err.getvalue()


LABEL, PICTURE = "CheckpointError: the data set: example ", "; training goes on\n"
RESUMED = {  # by what the second start has: its set, what it prints as its last line, a part of its log
    "the same": ({}, "", ""),
    "other labels": ({"order": "cab"}, LABEL, ""),
    "other pictures": ({"shift": 0.5}, "", PICTURE),
    "another order": ({"reverse": True}, LABEL, ""),
    "more examples": ({"count": 40, "order": "cab"}, "", "40 examples, 32 then"),
    "other labels, not checked": ({"order": "cab", "sample_check": "off"}, "", ""),
}


@pytest.mark.parametrize("case", RESUMED)
def test_an_example_that_has_another_label_since_the_checkpoint_ends_the_start(case, tmp_path):
    given, ends, says = RESUMED[case]
    more = {"sample_check": "off"} if "sample_check" in given else {}
    assert trained(tmp_path, [Rows()], max_steps=3)[1] == ""
    out, err = trained(tmp_path, [Rows(**{k: v for k, v in given.items() if k not in more})], **more)
    assert err.startswith(ends) and bool(err) == bool(ends) and err.count("\n") <= 1
    assert ("finished" in out) != bool(ends)
    assert says in out and (PICTURE in out) == (says == PICTURE)


def test_sets_that_a_program_draws_are_no_news_and_no_other_labels(tmp_path):
    drawn = [Rows(reverse=epoch % 2) for epoch in range(4)]
    for max_steps in (24, None):  # resumed between epochs
        out, err = trained(tmp_path, drawn, max_steps=max_steps)
        assert err == "" and "finished" in out
        assert "changed" not in out and PICTURE not in out


class Renewed:
    """The sets of a program's epochs: one, whose labels it numbers anew in each."""

    def __init__(self, *orders):
        self.orders, self.data = orders, Rows()

    def __len__(self):
        return len(self.orders)

    def __getitem__(self, epoch):
        self.data.order = self.orders[epoch]
        return self.data


RENEWED = {  # by name: the orders of both starts, the step of the checkpoint, how the second ends
    "in each epoch": (("abc", "bca", "cab"), ("abc", "bca", "cab"), 18, ""),
    "at the restart": (("abc",) * 3, ("cab",) * 3, 8, LABEL),
    "at a later restart": (("abc",) * 3, ("cab",) * 3, 18, LABEL),
}


@pytest.mark.parametrize("case", RENEWED)
def test_labels_that_a_program_renews_are_told_from_those_that_a_restart_makes_anew(case, tmp_path):
    first, second, step, ends = RENEWED[case]
    assert trained(tmp_path, Renewed(*first), max_steps=step)[1] == ""
    out, err = trained(tmp_path, Renewed(*second))
    assert err.startswith(ends) and bool(err) == bool(ends) != ("finished" in out)


def test_few_examples_are_read_before_the_first_batch_and_errors_are_left_to_training(tmp_path):
    for check, fails in itertools.product(("on", "off"), ((), tuple(range(16, 32)))):
        data = Rows(fails=fails)
        _, err = trained(tmp_path / f"{check} {len(fails)}", [data], batch_size=32, sample_check=check)
        most = 8 if check == "on" else 0
        assert ("sample " in err and "damaged" in err) == bool(fails)
        if not fails:
            assert most - 1 <= len(data.read) - 32 <= most


def test_modules_that_have_changed_since_the_checkpoint_are_named(tmp_path, capsys, monkeypatch):
    import torch

    module = tmp_path / "my_nets.py"
    module.write_text("WIDTH = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_nets")
    for step, changes in enumerate([False, False, True, False]):
        if changes:
            module.write_text("WIDTH = 3\n")
        train(tmp_path / "run", torch.ones(8, 1), 2, max_steps=step + 1)
        out = capsys.readouterr().out
        assert (f"the code of my_nets has changed since the checkpoint of step {step}\n" in out) == changes
        assert ("the code of" in out) == changes


def test_batch_norms_that_see_their_own_rank_alone_are_named():
    import torch
    from torch import nn

    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.models import curve_line, with_sync_batch_norm

    def line(model):
        assert curve_line(model, 1, "world.sync_batch_norm") == ""
        return curve_line(model, 2, "world.sync_batch_norm")

    begins, ends = "depends on the number of ranks: ", " makes it equal)"
    norms = f"normalises by each rank's part of the batch (world.sync_batch_norm{ends}"
    dropout = f"dropout draws its random numbers on each rank (a model without it{ends}"
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm3d(2, track_running_stats=False))
    assert line(nn.Linear(1, 1)) == ""
    assert line(model) == f"{begins}BatchNorm (1 and 1 more) {norms}"
    assert line(model.eval()) == f"{begins}BatchNorm (2) {norms}"
    assert line(nn.Sequential(nn.BatchNorm2d(2), nn.Dropout())) == f"{begins}BatchNorm (0) {norms}; {dropout}"
    assert line(nn.BatchNorm2d(2)) == f"{begins}BatchNorm (the model) {norms}"
    assert line(with_sync_batch_norm(model.train(), LocalEngine(torch.device("cpu")))) == ""
    for random in (nn.Dropout(0.1), nn.LSTM(2, 2, 2, dropout=0.1), nn.TransformerEncoderLayer(2, 1)):
        assert line(nn.Sequential(random)) == f"{begins}{dropout}"
    assert line(nn.Sequential(nn.Dropout(0), nn.LSTM(2, 2), nn.Linear(2, 2))) == ""


def test_a_set_that_is_read_twice_in_a_row_has_its_first_reader():
    """Sets of other shapes, which a program gives as new tuples of the same tensors."""
    import torch
    from torch.utils.data import default_collate

    from hvdtrain.run.samples import Samples
    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.user_loop.run import MOST_KEPT, _Reading

    run, program = SimpleNamespace(samples=Samples("off")), SimpleNamespace(seed=0)
    reading = _Reading(SimpleNamespace(engine=LocalEngine(torch.device("cpu")), run=run, program=program), None)
    tensors = [(torch.ones(size, 2), torch.ones(size)) for size in range(4, 6 + MOST_KEPT)]
    first = [reading.reader_of((x, y), default_collate, 0) for x, y in tensors]
    for index in (-1, -1, -3, -2, -2):
        assert reading.reader_of((*tensors[index],), default_collate, 0) == first[index]
    assert reading.reader_of(tensors[0], default_collate, 0) != first[0]  # not kept so long
    assert reading.reader_of(tensors[-1], default_collate, 1) != first[-1]


def test_a_schedulers_state_survives_json():
    from hvdtrain.torch.resumable import packed, unpacked

    state = {"milestones": Counter({30: 1, 60: 2}), "best": float("inf"), "betas": (0.9, 0.99), 3: [None, True, {}]}
    back = unpacked(packed(state, "a scheduler"))
    assert back == state
    assert isinstance(back["milestones"], Counter)
    assert isinstance(back["betas"], tuple)


def test_a_scheduler_that_holds_others_resumes():
    import torch
    from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR

    from hvdtrain.torch.resumable import packed, unpacked
    from hvdtrain.torch.user_loop.kept import load_scheduler, of_scheduler

    class Warmup(LRScheduler):
        def __init__(self, optimizer):
            self.after, self.others = ExponentialLR(optimizer, 0.5), [StepLR(optimizer, 3)]
            super().__init__(optimizer)

        def step(self):
            for each in (self.after, *self.others):
                each.step()
            self.last_epoch += 1

    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, Warmup(optimizer)

    (first, whole), (second, resumed) = made(), made()
    for step in range(8):
        if step == 4:
            second.load_state_dict(first.state_dict())
            load_scheduler(resumed, unpacked(packed(of_scheduler(whole), "a scheduler")))
        for optimizer, scheduler in ((first, whole), (second, resumed)):
            if scheduler is whole or step >= 4:
                optimizer.step()
                scheduler.step()
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    assert (resumed.after.last_epoch, resumed.others[0].last_epoch, resumed.last_epoch) == (9, 9, 8)


def test_the_best_checkpoint_has_the_lowest_loss_unless_a_metric_is_named():
    from hvdtrain.torch.user_loop.program import score

    values = {"train_loss": 1.0, "valid_loss": 2.0, "accuracy": 3.0}
    named = [(None, None), ("accuracy", None), (None, "accuracy")]
    assert [score(values, best) for best in named] == [-2.0, 3.0, -3.0]
    assert score({"train_loss": 1.0}, (None, None)) == -1.0
    assert score({"train_loss": 1.0}, (None, None), is_validated=True) is None


def test_what_scalers_leave_out_and_what_lies_within_an_epoch_ends_and_names_nothing(tmp_path, capsys):
    """Two scalers of which one overflows, a batch whose loss is infinite, a validation within each epoch and a
    valid_loss of one epoch alone, in two starts; an attribute that weight_norm computes."""
    import torch

    import hvdtrain.torch as ht

    x, scales = torch.ones(8, 1), []
    x[3] = float("inf")
    for epochs in (2, 5):
        model = torch.nn.utils.weight_norm(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-30) for _ in range(2)]
        with ht.join(device="cpu") as world:
            run = world.run(tmp_path, model, optimizer, scaler=scalers, trackers=())
            scales.append(scalers[1].get_scale())
            for epoch in run.epochs(epochs):
                for (a,) in run.batches((x,), 2):
                    loss = 9 * (model(a) - 3).square().mean()
                    optimizer.zero_grad()
                    scalers[1].scale(loss).backward()
                    scalers[1].step(optimizer)
                    scalers[1].update()
                    run.step(loss, near=loss < 1)
                    with torch.no_grad():
                        assert [len(model(each)) for (each,) in run.each_once((x[:3],), 2)] == [2, 1]
                if epoch == 2:
                    run.report(valid_loss=1e9)
    assert scales == [2.0**126, 2.0**36]
    out = capsys.readouterr().out
    assert out.count("train_loss: ") == 5 and not any(
        each in out for each in ("loss: inf", "loss: nan", "register", "was left")
    )
    assert json.loads((tmp_path / "best.json").read_text()) == {"checkpoint": "checkpoints/step-00000012"}


def made(lr=0.1, scheduler=None, groups=1, **more):
    """What a program gives of its optimizer and scheduler."""
    import torch

    from hvdtrain.torch.user_loop.program import given_settings

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
    from hvdtrain.torch.user_loop.program import changed_settings

    assert changed_settings(made(**now), made(**began)) == (f"{kinds}: {GIVES.format(*values)}" if kinds else "")
    assert changed_settings(made(**now), {}) == ""


def test_without_a_recipe_its_defaults_hold():
    from hvdtrain.torch.user_loop.world import World

    program, arguments = of_program(workers=2), inspect.signature(World.run).parameters
    for name in {*INTERVALS, "device", "compression", "reduction", "autotune", "profile", "data_on_device"}:
        default = Recipe.model_fields[name].default
        assert getattr(program, name) == default, name
        assert name not in arguments or arguments[name].default == default, name
    assert program.workers == 2


def test_a_run_is_stopped_for_good_left_or_refused_a_folder(tmp_path, capsys):
    import torch

    import hvdtrain.torch as ht

    stopped, left, fold, x = tmp_path / "stopped", tmp_path / "left", tmp_path / "fold", torch.ones(8, 1)
    assert train(stopped, x, 4, epochs=5, stop=1)[0] == [0, 1]
    assert "ended after epoch 2: no better" in capsys.readouterr().out
    assert train(stopped, x, 4, epochs=5, stop=1)[0] == []
    out = capsys.readouterr().out
    assert "this folder's run was stopped (no better): it is finished at epoch 2, step 4, and" in out
    status = json.loads((stopped / "status.json").read_text())
    assert (status["state"], status["ended"]) == ("finished", "no better")
    assert train(tmp_path / "at the end", x, 4, epochs=2, stop=1)[0] == [0, 1]
    assert "ended" not in json.loads((tmp_path / "at the end" / "status.json").read_text())
    assert train(left, x, 4, epochs=5, leave=1)[0] == [0, 1]
    assert "left at step 4 with epochs to go: the same command continues." in capsys.readouterr().out
    assert train(left, x, 4, epochs=5)[0] == [2, 3, 4]
    with pytest.raises(SystemExit) as ended, ht.join(device="cpu") as world:
        assert train_in(world, fold, x, 4, epochs=5)[0] == [0, 1, 2, 3, 4]
        train_in(world, fold, x, 4, epochs=5)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"LoopError: {fold} is the folder of another model's run in this program, which it would continue; give each "
        "run a folder of its own, as of each fold.\n"
    )


def test_losses_whose_graphs_show_that_they_are_no_means(monkeypatch):
    import torch
    from torch import nn
    from torch.nn import functional as F

    from hvdtrain.torch.objective.means import before_backward, no_means

    looked, plain = [], torch.autograd.backward
    restore = before_backward(looked.append)
    torch.ones(1, requires_grad=True).sum().backward()
    restore()
    assert len(looked) == 1 and torch.autograd.backward is plain
    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "backward", looked.append)  # the program's own
        restore()
        assert torch.autograd.backward == looked.append
    torch.manual_seed(0)
    model, y, t, w = nn.Linear(4, 3), torch.randint(3, (8,)), torch.randn(8, 3), torch.tensor([1.0, 2, 3])
    scale, wide = nn.Parameter(torch.zeros(())), nn.Linear(3, 8)
    out, ignored = model(torch.randn(8, 4)), torch.cat([torch.tensor([-100]), y[1:]])
    per_example, p = F.cross_entropy(out, y, reduction="none"), t.sigmoid()
    means = {
        "cross entropy": F.cross_entropy(out, y), "smoothed": F.cross_entropy(out, y, label_smoothing=0.1),
        "of probabilities": F.cross_entropy(out, t.softmax(1), weight=w), "mse": F.mse_loss(out, t),
        "weights that do not divide": F.binary_cross_entropy_with_logits(out, p, weight=w), "mean": per_example.mean(),
        "batchmean": F.kl_div(out, t.softmax(1), reduction="batchmean"), "sum / n": per_example.sum() / 8,
        "1/n * sum": per_example.sum() * (1 / 8), "switched": F.mse_loss(out, t) * True,
        "none ignored": F.cross_entropy(out, y, ignore_index=7),
        "penalty": F.mse_loss(out, t) + 1e-4 * sum(each.square().sum() for each in model.parameters()),
        "of a total": 3 * (per_example / 8).sum(), "of weights": out.mean() + 2 * (wide.weight - t).square().sum(),
        "of a weight": F.mse_loss(out, t) + F.mse_loss(wide.bias, t[:, 0], reduction="sum"),
        "small factors": (out * (t.sigmoid() / 8)).sum(), "by a count": F.mse_loss(out, t, reduction="sum") / 24,
        "features": wide(out).square().mean(0).sum(), "gathered": torch.cat([out, t]).square().sum(1).sum() / 16,
        "a mean of sums": out.square().sum(1).mean(), "not of the batch": F.mse_loss(out, t) + out[:4].square().sum(),
    }  # fmt: skip
    counted = {
        "weights": F.cross_entropy(out, y, weight=w), "module": nn.CrossEntropyLoss(w)(out, y),
        "smoothed": F.cross_entropy(out, y, weight=w, label_smoothing=0.1),
        "ignored": F.nll_loss(out, ignored), "of a total": F.cross_entropy(out, ignored) / 2 + out.mean(),
        "of pixels": F.cross_entropy(out.t()[None, :, :, None], ignored[None, :, None]),
        "stacked": torch.stack([F.cross_entropy(out, y, weight=w), F.mse_loss(out, t)]).mean(),
    }  # fmt: skip
    sums = {
        "cross entropy": F.cross_entropy(out, y, reduction="sum"), "mse": F.mse_loss(out, t, reduction="sum"),
        "l1": F.l1_loss(out, t, reduction="sum"), "kl": F.kl_div(out, t.softmax(1), reduction="sum"),
        "bce": F.binary_cross_entropy_with_logits(out, p, reduction="sum"), "per example": per_example.sum(),
        "twice": out.square().sum(1).sum(), "scaled": torch.tensor(65536.0) * per_example.sum(),
        "in a total": F.mse_loss(out, t) + per_example.sum(), "negative": -per_example.neg().sum(),
        "vae": F.mse_loss(out, t) - 0.5 * torch.sum(1 + out - out.exp()), "halved": per_example.sum() / 2,
        "tokens": (rows := wide(out).log_softmax(1)).flatten().sum(), "tokens first": out.square().t().sum(),
        "learned": (-scale).exp() * per_example.sum() + scale, "masked": (per_example * (y > 0)).sum(),
        "one-hot": -(F.one_hot(y, 3) * out.log_softmax(1)).sum(), "dimensions": rows.sum((0, 1)),
    }  # fmt: skip
    by_all = {"by all": per_example.sum() / 16, "summed by all": F.cross_entropy(out, y, reduction="sum") * (1 / 16)}
    ends = "is no mean over examples: the result depends on the number of ranks; divide"
    for losses, what in (
        (means, None),
        (counted, "cross_entropy with weights or labels that are left out"),
        (sums, "a sum over the batch"),
        (by_all, "a sum over the batch divided by all ranks' 16 examples"),
    ):
        for name, loss in losses.items():
            assert no_means(loss, 8, "mine", "divide", 16) == ([f"mine: {what} {ends}"] if what else []), name


def test_gather_without_ranks_and_on_one_is_told_or_the_same(monkeypatch):
    import torch

    import hvdtrain.torch as ht
    from hvdtrain.errors import LoopError
    from hvdtrain.torch.engines.local import LocalEngine
    from hvdtrain.torch.user_loop import gather

    monkeypatch.setattr(gather, "JOINED", [])
    with pytest.raises(LoopError, match=r"has no ranks here; call it within join\(\) or in the step of a recipe\."):
        ht.gather(1)
    gather.JOINED.append(engine := LocalEngine(torch.device("cpu")))
    own = torch.arange(6.0, requires_grad=True)
    joined = ht.gather(own.view(2, 3).t())
    joined[0] = 0  # as the own part is put back
    (joined * torch.arange(6.0).view(3, 2)).sum().backward()
    assert own.grad.tolist() == [0, 2, 4, 0, 3, 5]
    with torch.inference_mode():
        assert ht.gather({"x": own})["x"].tolist() == own.tolist()
        monkeypatch.setattr(engine, "size", 2)
        with pytest.raises(LoopError, match="was called in a validation, where ranks may differ by a batch; call it "):
            ht.gather(own)
