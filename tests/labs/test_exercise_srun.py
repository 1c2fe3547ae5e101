"""Lab 6: each gap filled right, and wrong in the usual ways: a message names what is wrong, and why."""

import sys

import pytest
from fillings import by_gap, check_right, check_wrong
from marks import marked

from labtools import Ranks
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


def added(value, op=hvd.Sum):
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), op=op).item()


def on_rank_0(right, count):
    return added(right) / added(count) if hvd.rank() == 0 else 0.0


def divided_early(right, count):
    return added(right / count * count) / added(count)


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


def changed(*changes):
    return lambda *shape: script(*shape, *changes)


WRONG = {
    "prepare, empty": (empty, "Gap 1, prepare, is still empty"),
    "prepare, no init": (no_init, "stopped:.*Horovod has not been initialized"),
    "prepare, no broadcast": (no_broadcast, "leaves each rank weights of its own"),
    "prepare, no wrap": (no_wrap, "does not average the gradients: after 3 steps"),
    "prepare, no return": (no_return, "gives back no optimizer: a `return` is missing"),
    "prepare, from rank 1": (from_rank_1, "does not give all ranks the weights of rank 0"),
    "prepare, summed": (summed, "makes larger steps than the mean of the gradients"),
    "accuracy, empty": (empty, "Gap 2, accuracy, is still empty"),
    "accuracy, its own": (
        lambda right, count: right / max(1, count),
        "gives every rank the accuracy of its own part: 0.90, 0.50",
    ),
    "accuracy, mean of means": (
        lambda right, count: added(right / max(1, count), hvd.Average),
        "takes the mean of the ranks' accuracies, as though all had as many examples: 0.64, .* are 0.75",
    ),
    "accuracy, sum of means": (
        lambda right, count: added(right / max(1, count)),
        "adds up the ranks' accuracies: 2.55",
    ),
    "accuracy, own count": (
        lambda right, count: added(right) / max(1, count),
        "divides all ranks' right answers by this rank's examples alone",
    ),
    "accuracy, own right": (
        lambda right, count: right / added(count),
        "divides this rank's right answers by all ranks' examples",
    ),
    "accuracy, never divided": (
        lambda right, count: added(right),
        "gives back the right answers, which nothing divides",
    ),
    "accuracy, rank 0 alone": (on_rank_0, "is not for some ranks only: 1, 2, 3 of 4 went past it"),
    "accuracy, mean of means, dividing by 0": (
        lambda right, count: added(right / count, hvd.Average),
        "takes the mean of the ranks' accuracies, as though all had as many examples: 0.64",
    ),
    "accuracy, divided early": (
        divided_early,
        "is right while each rank has examples, but a rank that has none divides by 0",
    ),
    "one_epoch, empty": (empty, "Gap 3, one_epoch, is still empty"),
    "one_epoch, no run.step": (loop(steps="none"), "stopped: LoopError: run.step.. was not called after a batch"),
    "one_epoch, a DataLoader": (loop(batches="loader"), "stopped: LoopError"),
    "one_epoch, local batch": (
        loop(divide=True),
        "makes 6 steps an epoch, where 3 are right: batch_size is that of all ranks",
    ),
    "one_epoch, no zero_grad": (loop(zero=False), "trains, but not to the weights that one process gets"),
    "one_epoch, no update": (loop(update=False), "(trains, but not|stopped)"),
    "one_epoch, validates all": (loop(validation="all"), "validates all 21 examples on every rank"),
    "one_epoch, no report": (loop(report="no"), "reports nothing: the last line is run.report"),
    "one_epoch, mean of means": (
        loop(report="mean of means"),
        "reports 0.*, where the accuracy of all 21 examples is 0.",
    ),
    "one_epoch, its own": (loop(report="own"), "stopped: AgreementError: the ranks differ in accuracy"),
    "begin, empty": (empty, "Gap 4, begin, is still empty"),
    "begin, not returned": (begin_not_returned, "is still empty: it gives back no run"),
    "begin, no checkpoints": (begins(), "killed in step 28 of 30, it loses all 28 steps"),
    "begin, by epochs": (begins(checkpoint_every_epochs=1), "it loses all 28 steps"),
    "begin, too rarely": (
        begins(checkpoint_every_steps=14),
        "loses up to 14 steps: its checkpoints are of the steps 14",
    ),
    "begin, elsewhere": (elsewhere, "a folder of its own choice: name `folder`|the ranks differ"),
    "begin, by rank": (by_rank, "a folder of its own choice|differ"),
    "begin, no optimizer": (without_optimizer, "stopped.*optimizer"),
    "launch, empty": (empty, "Gap 5, launch, is still empty"),
    "launch, alone": (
        lambda ranks: "python own_loop.py",
        "starts one process alone, without a launcher: python own_loop.py",
    ),
    "launch, no number": (lambda ranks: "horovodrun python own_loop.py", "starts no rank|starts one process alone"),
    "launch, always 3": (lambda ranks: "horovodrun -np 3 python own_loop.py", "starts 3 ranks where 2 are asked for"),
    "launch, no python": (
        lambda ranks: f"horovodrun -np {ranks} own_loop.py",
        "starts no rank. Python has to run the script",
    ),
    "launch, another name": (lambda ranks: f"horovodrun -np {ranks} python loop.py", "starts no rank. .*loop.py"),
    "launch, srun": (
        lambda ranks: f"srun --no-such-flag -n {ranks} python own_loop.py",
        "srun is for the nodes of a cluster",
    ),
    "launch, no such program": (
        lambda ranks: f"horovodrum -np {ranks} python own_loop.py",
        "no program horovodrum in the folders of the PATH",
    ),
    "launch, a quote": (
        lambda ranks: f"horovodrun -np {ranks} python 'own_loop.py",
        "is no command that a shell can read: No closing",
    ),
    "launch, blanks": (lambda ranks: "  ", "Gap 5, launch, is still empty"),
    "job, empty": (empty, "Gap 6, job, is still empty"),
    "job, no shell": (changed(("#!/bin/bash\n", "")), "does not begin with #!/bin/bash"),
    "job, a comment": (changed(("#SBATCH --nodes", "# SBATCH --nodes")), "lines that sbatch takes for comments"),
    "job, too late": (
        changed(("#SBATCH --time", "cd lab-6\n#SBATCH --time")),
        "#SBATCH lines behind the first command",
    ),
    "job, no nodes": (changed(("#SBATCH --nodes=2\n", "")), "requests no number of nodes where 2 are wanted"),
    "job, one a node": (changed(("#SBATCH --ntasks-per-node=2\n", "")), "requests 1 task a node where 2 ranks"),
    "job, in all": (changed(("--ntasks-per-node=2", "--ntasks=2")), "requests 2 in all tasks where 2 ranks a node"),
    "job, no limit": (changed(("#SBATCH --time=00:10:00\n", "")), "has no time limit"),
    "job, no warning": (changed(("#SBATCH --signal=USR2@120\n", "")), "has no warning before the time limit"),
    "job, to the shell": (changed(("USR2@120", "B:USR2@120")), "warns the script's shell alone"),
    "job, no srun": (changed(("srun python", "python")), "runs own_loop.py once, on the first node"),
    "job, horovodrun": (
        changed(("srun python", "horovodrun -np 4 python")),
        "starts the ranks with horovodrun, by ssh",
    ),
    "job, no python": (changed(("srun python", "srun")), "Python has to run it"),
    "job, one task": (changed(("srun python", "srun -n1 python")), "gives srun -n1: it takes the job"),
    "job, nothing": (changed(("srun python own_loop.py", "")), "never starts own_loop.py"),
}
FAST = {name for name in WRONG if name.startswith(("accuracy, ", "job, ")) and "rank 0 alone" not in name}


@pytest.mark.parametrize(("gap", "filling", "message"), marked(by_gap(WRONG), fast=FAST))
def test_mistakes_of_lab_6(check, gap, filling, message):
    check_wrong(check, message, gap, filling)


def test_numbers_that_are_fixed_are_seen():
    check_wrong(Check(None), "requests 2 nodes where 3 are wanted", "job", lambda *_: script(2, 2))


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
        changed(("srun python", "srun --kill-on-bad-exit=1 \\\n  python")),
        lambda nodes, each: script(nodes, each, (f"--ntasks-per-node={each}", f"--ntasks={nodes * each}")),
    ],
}


@pytest.mark.parametrize("gap", RIGHT)
def test_right_fillings(check, capsys, gap):
    for filling in RIGHT[gap]:
        check_right(check, capsys, gap, filling)
