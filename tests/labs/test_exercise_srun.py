"""Lab 6: each gap filled right, and wrong in the usual ways: a message names what is wrong, and why."""

import re
import sys

import pytest
from marks import marked, rows

from labtools import LabError, Ranks
from labtools.exercises import srun
from labtools.exercises.srun import Check

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
hvd = pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

right_prepare, right_epoch = srun._prepare, srun._one_epoch


@pytest.fixture(scope="module")
def check():
    ranks = Ranks(4, preload=srun.LOADED)
    yield Check(ranks)
    ranks.close()


def empty(*arguments): ...


def wrapped(optimizer, model, **settings):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **settings)


def no_broadcast(model, optimizer):
    hvd.init()
    return wrapped(optimizer, model)


def no_wrap(model, optimizer):
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return optimizer


def no_return(model, optimizer):
    right_prepare(model, optimizer)


def from_rank_1(model, optimizer):
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    return wrapped(optimizer, model)


def summed(model, optimizer):
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return wrapped(optimizer, model, op=hvd.Sum)


def no_init(model, optimizer):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return wrapped(optimizer, model)


PREPARE = {
    "empty": (empty, "Gap 1, prepare, is still empty"),
    "no init": (no_init, "stopped:.*Horovod has not been initialized"),
    "no broadcast": (no_broadcast, "leaves each rank weights of its own"),
    "no wrap": (no_wrap, "does not average the gradients: after 3 steps"),
    "no return": (no_return, "gives back no optimizer: a `return` is missing"),
    "from rank 1": (from_rank_1, "does not give all ranks the weights of rank 0"),
    "summed": (summed, "makes larger steps than the mean of the gradients"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("filling", "message"), PREPARE.values(), ids=PREPARE)
def test_mistakes_of_prepare(check, filling, message):
    refused(check.prepare, filling, message)


def added(value, op=hvd.Sum):
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), op=op).item()


def on_rank_0(right, count):
    return added(right) / added(count) if hvd.rank() == 0 else 0.0


def divided_early(right, count):
    return added(right / count * count) / added(count)


ACCURACY = {
    "empty": (empty, "Gap 2, accuracy, is still empty"),
    "its own": (
        lambda right, count: right / max(1, count),
        "gives every rank the accuracy of its own part: 0.90, 0.50",
    ),
    "mean of means": (
        lambda right, count: added(right / max(1, count), hvd.Average),
        "takes the mean of the ranks' accuracies, as though all had as many examples: 0.64, .* are 0.75",
    ),
    "sum of means": (lambda right, count: added(right / max(1, count)), "adds up the ranks' accuracies: 2.55"),
    "own count": (
        lambda right, count: added(right) / max(1, count),
        "divides all ranks' right answers by this rank's examples alone",
    ),
    "own right": (
        lambda right, count: right / added(count),
        "divides this rank's right answers by all ranks' examples",
    ),
    "never divided": (lambda right, count: added(right), "gives back the right answers, which nothing divides"),
    "rank 0 alone": (on_rank_0, "is not for some ranks only: 1, 2, 3 of 4 went past it"),
    "divided early": (divided_early, "stopped:.*ZeroDivisionError"),
}


@pytest.mark.parametrize(("filling", "message"), marked(rows(ACCURACY), slow={"rank 0 alone"}))
def test_mistakes_of_accuracy(check, filling, message):
    refused(check.accuracy, filling, message)


def loop(batches="run", steps="run", zero=True, update=True, validation="once", report="exact", divide=False):
    """A loop with these mistakes."""

    def one_epoch(world, run, model, optimizer, train, valid, batch_size):
        loader = torch.utils.data.DataLoader
        local = batch_size // world.size if divide else batch_size
        for x, y in run.batches(train, batch_size=local) if batches == "run" else loader(train, batch_size=local):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if zero:
                optimizer.zero_grad()
            loss.backward()
            if update:
                optimizer.step()
            if steps == "run":
                run.step(loss)
        right = count = 0
        with torch.no_grad():
            for x, y in run.each_once(valid, batch_size=8) if validation == "once" else loader(valid, batch_size=8):
                right += (model(x).argmax(1) == y).sum()
                count += len(y)
        if report == "exact":
            run.report(accuracy=world.mean(right, count))
        elif report == "mean of means":
            run.report(accuracy=world.mean(right / count, 1.0))
        elif report == "own":
            run.report(accuracy=float(right / count) + world.rank)

    return one_epoch


ONE_EPOCH = {
    "empty": (empty, "Gap 3, one_epoch, is still empty"),
    "no run.step": (loop(steps="none"), "stopped: LoopError: run.step.. was not called after a batch"),
    "a DataLoader": (loop(batches="loader"), "stopped: LoopError"),
    "local batch": (loop(divide=True), "makes 6 steps an epoch, where 3 are right: batch_size is that of all ranks"),
    "no zero_grad": (loop(zero=False), "trains, but not to the weights that one process gets"),
    "no update": (loop(update=False), "(trains, but not|stopped)"),
    "validates all": (loop(validation="all"), "validates all 21 examples on every rank"),
    "no report": (loop(report="no"), "reports nothing: the last line is run.report"),
    "mean of means": (loop(report="mean of means"), "reports 0.*, where the accuracy of all 21 examples is 0."),
    "its own": (loop(report="own"), "stopped: AgreementError: the ranks differ in accuracy"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("filling", "message"), ONE_EPOCH.values(), ids=ONE_EPOCH)
def test_mistakes_of_one_epoch(check, filling, message):
    refused(check.one_epoch, filling, message)


def begins(**settings):
    return lambda world, folder, model, optimizer: world.run(folder, model, optimizer, **settings)


def by_rank(world, folder, model, optimizer):
    return world.run(f"{folder}-{world.rank}", model, optimizer, checkpoint_every_steps=10)


def elsewhere(world, folder, model, optimizer):
    import tempfile

    return world.run(tempfile.mkdtemp(), model, optimizer, checkpoint_every_steps=10)


def begin_not_returned(world, folder, model, optimizer):
    world.run(folder, model, optimizer, checkpoint_every_steps=10)


def without_optimizer(world, folder, model, optimizer):
    return world.run(folder, model)


BEGIN = {
    "empty": (empty, "Gap 4, begin, is still empty"),
    "not returned": (begin_not_returned, "is still empty: it gives back no run"),
    "no checkpoints": (begins(), "killed in step 28 of 30, it loses all 28 steps"),
    "by epochs": (begins(checkpoint_every_epochs=1), "it loses all 28 steps"),
    "too rarely": (begins(checkpoint_every_steps=14), "loses up to 14 steps: its checkpoints are of the steps 14"),
    "elsewhere": (elsewhere, "a folder of its own choice: name `folder`|the ranks differ"),
    "by rank": (by_rank, "a folder of its own choice|differ"),
    "no optimizer": (without_optimizer, "stopped.*optimizer"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("filling", "message"), BEGIN.values(), ids=BEGIN)
def test_mistakes_of_begin(check, filling, message):
    refused(check.begin, filling, message)


LAUNCH = {
    "empty": (empty, "Gap 5, launch, is still empty"),
    "alone": (lambda ranks: "python own_loop.py", "starts one process alone, without a launcher: python own_loop.py"),
    "no number": (lambda ranks: "horovodrun python own_loop.py", "starts no rank|starts one process alone"),
    "always 3": (lambda ranks: "horovodrun -np 3 python own_loop.py", "starts 3 ranks where 2 are asked for"),
    "no python": (lambda ranks: f"horovodrun -np {ranks} own_loop.py", "starts no rank. Python has to run the script"),
    "another name": (lambda ranks: f"horovodrun -np {ranks} python loop.py", "starts no rank. .*loop.py"),
    "srun": (lambda ranks: f"srun --no-such-flag -n {ranks} python own_loop.py", "srun is for the nodes of a cluster"),
    "no such program": (lambda ranks: f"horovodrum -np {ranks} python own_loop.py", "No such file or directory"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("filling", "message"), LAUNCH.values(), ids=LAUNCH)
def test_mistakes_of_launch(check, filling, message):
    refused(check.launch, filling, message)


def script(nodes, per_node, *changes):
    text = f"""#!/bin/bash
#SBATCH --job-name=lab-6
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
#SBATCH --time=00:10:00
#SBATCH --signal=USR2@120

srun python own_loop.py
"""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


JOB = {
    "empty": (None, "Gap 6, job, is still empty"),
    "no shell": ([("#!/bin/bash\n", "")], "does not begin with #!/bin/bash"),
    "a comment": ([("#SBATCH --nodes", "# SBATCH --nodes")], "lines that sbatch takes for comments"),
    "too late": ([("#SBATCH --time", "cd lab-6\n#SBATCH --time")], "#SBATCH lines behind the first command"),
    "no nodes": ([("#SBATCH --nodes=2\n", "")], "requests no number of nodes where 2 are wanted"),
    "one a node": ([("#SBATCH --ntasks-per-node=2\n", "")], "requests 1 task a node where 2 ranks"),
    "in all": ([("--ntasks-per-node=2", "--ntasks=2")], "requests 2 in all tasks where 2 ranks a node"),
    "no limit": ([("#SBATCH --time=00:10:00\n", "")], "has no time limit"),
    "no warning": ([("#SBATCH --signal=USR2@120\n", "")], "has no warning before the time limit"),
    "to the shell": ([("USR2@120", "B:USR2@120")], "warns the script's shell alone"),
    "no srun": ([("srun python", "python")], "runs own_loop.py once, on the first node"),
    "horovodrun": ([("srun python", "horovodrun -np 4 python")], "starts the ranks with horovodrun, by ssh"),
    "no python": ([("srun python", "srun")], "Python has to run it"),
    "one task": ([("srun python", "srun -n1 python")], "gives srun -n1: it takes the job"),
    "nothing": ([("srun python own_loop.py", "")], "never starts own_loop.py"),
}


@pytest.mark.parametrize(("changes", "message"), JOB.values(), ids=JOB)
def test_mistakes_of_job(changes, message):
    check = Check.__new__(Check)
    filling = empty if changes is None else lambda *shape: script(*shape, *changes)
    refused(check.job, filling, message)


def test_numbers_that_are_fixed_are_seen():
    refused(Check.__new__(Check).job, lambda *_: script(2, 2), "requests 2 nodes where 3 are wanted")


RIGHT = {
    "prepare": [right_prepare],
    "accuracy": [
        lambda right, count: added(right) / added(count),
        lambda r, c: added(r, hvd.Average) / added(c, hvd.Average),
    ],
    "one_epoch": [right_epoch, loop()],
    "begin": [begins(checkpoint_every_steps=10), begins(checkpoint_every_steps=4)],
    "launch": [lambda ranks: f"horovodrun -np {ranks} python own_loop.py"],
    "job": [
        script,
        lambda *shape: script(*shape, ("srun python", "srun --kill-on-bad-exit=1 \\\n  python")),
        lambda nodes, each: script(nodes, each, (f"--ntasks-per-node={each}", f"--ntasks={nodes * each}")),
    ],
}


@pytest.mark.parametrize("gap", RIGHT)
def test_right_fillings(check, capsys, gap):
    for filling in RIGHT[gap]:
        getattr(check, gap)(filling)
        assert "Right: " in capsys.readouterr().out


def refused(check, filling, message):
    with pytest.raises(LabError) as caught:
        check(filling)
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert re.match(r"Gap \d, ", text)
    assert "Traceback" not in text
