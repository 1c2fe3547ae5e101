# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. From a serial script to `srun`: six gaps
#
# You have a script that trains on one processor. At the end of this lab it trains on all ranks of a SLURM job,
# survives the loss of one, and writes a report.
#
# | gap | function | what it does |
# |---|---|---|
# | 1 | `prepare` | starts Horovod, one set of weights, averaged gradients |
# | 2 | `accuracy` | the accuracy over all ranks |
# | 3 | `one_epoch` | the loop with `join`: which examples, which steps, which report |
# | 4 | `begin` | checkpoints, so that a kill loses ten steps and not all |
# | 5 | `launch` | the command for this machine |
# | 6 | `job` | the script for `sbatch` |
#
# Below each gap a check runs your function on real ranks and prints that it is right, or what is wrong and why.
# `check.hint("prepare")` in a cell of your own prints a hint for gap 1, and once more the next one.
#
# The cells of the solution run in about a minute; for the exercise take an hour. Run the cells from top to bottom.
# Lab 2 explains what Horovod does; you need not have done it.

# %%
import json
import os
import shutil
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits

import hvdtrain.torch as ht
from labtools import Ranks, launched
from labtools.exercises.srun import LOADED, Check
from labtools.scale import scaled

EPOCHS = scaled(12, least=6)
BATCH = 64
ranks = Ranks(4, preload=[*LOADED, "sklearn.datasets"])  # four processes on this machine
check = Check(ranks)

# %% [markdown]
# ## The serial script
#
# 1,797 images of digits, 8 x 8 pixels, and a small network. 261 of the images are for validation.


# %%
def digits():
    """The training set, and the validation set."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    dataset = torch.utils.data.TensorDataset
    return dataset(x[:1536], y[:1536]), dataset(x[1536:], y[1536:])


def network():
    """Logits of ten digits; the same random weights in each process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def serial(epochs):
    """The script that you have."""
    train, valid = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        model.train()
        for x, y in torch.utils.data.DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = count = 0
        with torch.no_grad():
            for x, y in torch.utils.data.DataLoader(valid, batch_size=BATCH):
                right += (model(x).argmax(1) == y).sum()
                count += len(y)
        print(f"epoch {epoch + 1}: accuracy {right / count:.4f}")


serial(3)

# %% [markdown]
# # By hand, with Horovod
#
# ## Gap 1: prepare
#
# Three calls make this process one rank of a training: Horovod is started; the weights of rank 0 are broadcast to
# all; and the optimizer is wrapped, so that each `step()` first averages the gradients over the ranks.


# %%
def prepare(model, optimizer):
    """Starts Horovod, gives `model` the weights of rank 0, and returns an optimizer that averages the gradients."""
    # exercise: # Three calls of hvd, the last of them behind `return`.
    # exercise: ...
    ### BEGIN SOLUTION
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ### END SOLUTION


# %%
check.prepare(prepare)

# %% [markdown]
# ## Gap 2: accuracy
#
# Each rank validates a part of the 261 images: it counts its right answers and its images. 261 cannot be divided by 2
# or by 4, so the parts are unequal, and with many ranks one may even be empty. Every rank must get the accuracy of
# all images.


# %%
def accuracy(right, count):
    """The accuracy of all ranks' images, from this rank's right answers and the number of its images."""
    # exercise: # hvd.allreduce(tensor, op=hvd.Sum) is the sum over the ranks. What must be summed, and what divided?
    # exercise: ...
    ### BEGIN SOLUTION
    right, count = hvd.allreduce(torch.tensor([right, count], dtype=torch.float64), op=hvd.Sum)
    return (right / count).item()
    ### END SOLUTION


# %%
check.accuracy(accuracy)

# %% [markdown]
# ## What goes wrong without a sign
#
# A tempting shorter way is to average the accuracies of the ranks: it is what Horovod's callbacks and many scripts
# do. Here both are computed on 1, 2 and 4 ranks, whose parts hold 261; 200 and 61; 200, 40, 15 and 6 images.


# %%
def mean_of_means(right, count):
    """The mistake: every rank's accuracy counts alike, also that of a few images."""
    return hvd.allreduce(torch.tensor(right / count)).item()


def by_hand(epochs):
    """Trains on all ranks; the exact accuracy, and the mean of the ranks' accuracies."""
    train, valid = digits()
    model = network()
    optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    mine = torch.arange(hvd.rank(), len(train), hvd.size())
    for _ in range(epochs):
        for batch in mine.split(BATCH // hvd.size()):
            x, y = train[batch]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    parts = torch.arange(len(valid)).tensor_split({1: [], 2: [200], 4: [200, 240, 255]}[hvd.size()])
    x, y = valid[parts[hvd.rank()]]
    right = (model(x).argmax(1) == y).sum().item()
    return accuracy(right, len(y)), mean_of_means(right, len(y))


check.needs("prepare", "accuracy")
print("ranks   exact accuracy   mean of the ranks' accuracies")
for size in (1, 2, 4):
    exact, wrong = ranks.run(by_hand, 3, ranks=size)[0]
    print(f"{size:5}   {exact:14.4f}   {wrong:29.4f}")

# %% [markdown]
# The exact accuracy is the same for every number of ranks. The other one changes with it, because the parts are of
# unequal size, although the model is the same. Nothing fails, and no line warns.
#
# What the hand-written program still lacks: it cannot continue after a crash; if one rank dies, the others wait for
# it until the time limit; and an order of examples that depends on the number of ranks changes the curve.

# %% [markdown]
# # With `join`
#
# `hvdtrain.torch.join` does this for a loop of your own. Model, loss and optimizer stay what they are:
#
# ```python
# with ht.join() as world:  # joins the ranks that the launcher started, or is alone
#     run = world.run("runs/digits", model, optimizer)  # rank 0's weights; or those of the last checkpoint
#     for epoch in run.epochs(30):  # the epochs that are left
#         ...
# ```
#
# | call | what it does |
# |---|---|
# | `run.batches(train, batch_size=B)` | this rank's part of each global batch of B examples |
# | `run.step(loss)` | after the update: counts the step, writes a checkpoint when due |
# | `run.each_once(valid, batch_size=B)` | for validation: each example on exactly one rank |
# | `world.mean(total, count)` | the sum of all ranks' totals, divided by that of their counts |
# | `run.report(name=number)` | numbers of the epoch, the same on all ranks |
#
# `loss.backward()` leaves gradients that are averaged over the ranks.
#
# ## Gap 3: one_epoch
#
# Write one epoch of the serial script with these calls.


# %%
def one_epoch(world, run, model, optimizer, train, valid, batch_size):
    """Trains on each batch of `train`, and reports the accuracy over `valid`."""
    # exercise: # The body of the loop over epochs, from `serial` above. Four places change; `print` becomes run.report.
    # exercise: ...
    ### BEGIN SOLUTION
    model.train()
    for x, y in run.batches(train, batch_size=batch_size):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
    model.eval()
    right = count = 0
    with torch.no_grad():
        for x, y in run.each_once(valid, batch_size=batch_size):
            right += (model(x).argmax(1) == y).sum()
            count += len(y)
    run.report(accuracy=world.mean(right, count))
    ### END SOLUTION


# %%
check.one_epoch(one_epoch)

# %% [markdown]
# ## Gap 4: begin
#
# `world.run(folder, model, optimizer)` resumes from the newest checkpoint in `folder`. By itself it writes one at the
# end of every epoch. An epoch of a large training takes an hour: a node that fails then costs up to an hour of all
# nodes. Ask for a checkpoint every ten steps. (`help(ht.World.run)` lists the arguments.)


# %%
def begin(world, folder, model, optimizer):
    """The run in `folder`, of which a kill loses at most ten steps."""
    # exercise: # One call of world.run.
    # exercise: ...
    ### BEGIN SOLUTION
    return world.run(folder, model, optimizer, checkpoint_every_steps=10)
    ### END SOLUTION


# %%
check.begin(begin)

# %% [markdown]
# # Launch it
#
# The functions become a script. The folder is `lab-6`, beside this notebook.


# %%
def main():
    """What each rank does."""
    with ht.join() as world:
        train, valid = digits()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = begin(world, os.environ.get("RUN", "run"), model, optimizer)
        for _ in run.epochs(EPOCHS):
            one_epoch(world, run, model, optimizer, train, valid, BATCH)


check.needs("one_epoch", "begin")
imports = "import os\n\nimport torch\nfrom sklearn.datasets import load_digits\n\nimport hvdtrain.torch as ht"
settings = f"BATCH, EPOCHS = {BATCH}, {EPOCHS}"
launched.write("lab-6/own_loop.py", imports, settings, digits, network, one_epoch, begin, main, "main()")

# %% [markdown]
# ## Gap 5: launch
#
# On one machine `horovodrun` starts the ranks. (`horovodrun --help` in a terminal lists its flags.)


# %%
def launch(ranks):
    """The command that starts own_loop.py on `ranks` ranks of this machine."""
    # exercise: # A string, as you would type it in a terminal.
    # exercise: ...
    ### BEGIN SOLUTION
    return f"horovodrun -np {ranks} python own_loop.py"
    ### END SOLUTION


# %%
check.launch(launch)

# %% [markdown]
# ## Kill a rank
#
# The training starts on two ranks. In its fourth epoch rank 1 is killed, as the kernel does when memory runs out.
# What do you expect of the other rank?

# %%
check.needs("one_epoch", "begin", "launch")
shutil.rmtree("lab-6/run", ignore_errors=True)  # of an earlier pass
code = launched.run(launch(2), "lab-6", kill=1, after="Epoch: 4, Step")
print("exit code", code)

# %% [markdown]
# Rank 0 does not wait for ever: it names the rank that was lost, and ends. Which is the newest checkpoint?

# %%
check.needs("one_epoch", "begin", "launch")
print(*sorted(path.name for path in Path("lab-6/run/checkpoints").iterdir()))

# %% [markdown]
# An epoch has 24 steps. A checkpoint is written every ten steps and at an epoch's end; the two newest are kept. **The
# same command** resumes:

# %%
check.needs("one_epoch", "begin", "launch")
code = launched.run(launch(2), "lab-6")
print("exit code", code)

# %% [markdown]
# ## Read the report
#
# Every run ends with a report, a page without any address in it. Answer from it:
#
# 1. How many launches were there, and how did the first one end?
# 2. How many steps were done twice, and how much of the time was useful?
# 3. Which accuracy has the last epoch? Which epoch had the best?

# %%
check.needs("one_epoch", "begin", "launch")
launched.page("lab-6/run/report.html")

# %% [markdown]
# The answers from the run's own files, for comparison:

# %%
check.needs("one_epoch", "begin", "launch")
records = [json.loads(text) for text in Path("lab-6/run/metrics.jsonl").read_text().splitlines()]
epochs = {each["epoch"]: each["accuracy"] for each in records if each["kind"] == "epoch"}
best = max(epochs, key=epochs.get)
print(
    f"accuracy {epochs[max(epochs)]:.4f} after epoch {max(epochs)}; the best is {epochs[best]:.4f}, after epoch {best}"
)

# %% [markdown]
# # On a cluster
#
# A cluster's login node trains nothing. You hand a **job script** to SLURM with `sbatch`; when enough nodes are free,
# it runs once, on the first of them. `srun` in it starts the same command on all **tasks** of the job; one task is
# one rank.
#
# ## Gap 6: job


# %%
def job(nodes, ranks_per_node):
    """The script for sbatch: `ranks_per_node` ranks on each of `nodes` nodes, for at most ten minutes."""
    # exercise: # A text: the shell's line, the #SBATCH lines (nodes, tasks, time, a warning before the limit), one command.
    # exercise: ...
    ### BEGIN SOLUTION
    return f"""#!/bin/bash
#SBATCH --job-name=lab-6
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks_per_node}
#SBATCH --time=00:10:00
#SBATCH --signal=USR2@120
#SBATCH --output=job.out

srun --kill-on-bad-exit=1 python own_loop.py
"""
    ### END SOLUTION


# %%
check.job(job)

# %% [markdown]
# `slurm/minicluster` of this repository is a real SLURM of several nodes on one machine. Where one is up, the job
# runs there; where none is, you see what it printed on another machine, and how to bring one up.

# %%
check.needs("one_epoch", "begin", "job")
launched.write("lab-6/job.sh", job(2, 2))
recorded = """
Submitted batch job 2
INFO - run         on_nodes: Sequential, 4,810 parameters, SGD
INFO - ranks       4 ranks, srun, horovod on cpu (torch)
INFO - output      on_nodes
INFO - Epoch: 1, Step: 24/288, loss: 1.1407, gradient_norm: 0.88037, LR: 0.1, Time left: 10 s, Avg examples/sec: 1424.6
INFO - Epoch: 1, train_loss: 1.8643, accuracy: 0.75479 (1.1 sec)
INFO - Epoch: 2, Step: 48/288, loss: 0.26577, LR: 0.1, Time left: 11 s, Avg examples/sec: 2517.7
INFO - Epoch: 2, train_loss: 0.4217, accuracy: 0.85441 (0.9 sec)
  ... (nine epochs more)
INFO - Epoch: 12, Step: 288/288, loss: 0.040962, LR: 0.1, Time left: 0 s, Avg examples/sec: 1947.1
INFO - Epoch: 12, train_loss: 0.040044, accuracy: 0.91571 (1.0 sec)
INFO - finished at step 288; everything is in on_nodes
INFO - report: on_nodes/report.html
"""
shutil.rmtree("lab-6/on_nodes", ignore_errors=True)
launched.on_minicluster("sbatch --wait --export=ALL,RUN=on_nodes job.sh", "lab-6", "job.out", recorded)

# %% [markdown]
# The script did not change between two ranks here and four ranks on two nodes, and neither did the curve: compare the
# accuracy of the first epochs. The global batch and the order of the examples are the same.
#
# On your own cluster, `python -m hvdtrain slurm --site NAME` prints a script with what that site needs: modules,
# GPUs, the MPI of `srun`, and a supervisor that starts again when a node is lost.
