# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. SGD on four ranks: five gaps
#
# Lab 1 fitted the line $y = mx + n$ with one process. Here four processes fit it together, over
# [Horovod](https://arxiv.org/abs/1802.05799). Five small functions turn the one into the other:
#
# | gap | function | what it does |
# |---|---|---|
# | 1 | `init` | makes the processes ranks of one training |
# | 2 | `shard` | gives each its local batch |
# | 3 | `scale` | fits the learning rate (LR) to the larger batch |
# | 4 | `wrap` | averages the gradients |
# | 5 | `broadcast` | lets all start from the same weights |
#
# In the exercise you fill them. Below each one a check runs your function on four real ranks and prints that it is
# right, or what is wrong and why. (Stuck? `check.hint("shard")` in a cell of your own prints a hint for gap 2, and once
# more the next one.) Then the ranks train while you watch, and two figures show what four ranks change and what they
# do not.
#
# The cells of the solution run in under a minute; for the exercise take half an hour. Run the cells from top to
# bottom.

# %%
import time

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.core.progress import Epoch
from hvdtrain.core.schedule import peak_lr
from labtools import Ranks, line, style, tell
from labtools.exercises.horovod import Check
from labtools.live import LivePaths, beside, progress
from labtools.scale import scaled

style.use()
EPOCHS = scaled(6)
x, y = line.points()  # 1,000 points of y = 2x + noise
X, Y = torch.from_numpy(x), torch.from_numpy(y)
ranks = Ranks(4, preload=["torch._dynamo"])  # four processes on this machine, with what PyTorch's optimizers load
check = Check(ranks)

# %% [markdown]
# ## One process
#
# This is what one process does:
#
# ```python
# model = torch.nn.Linear(1, 1)  # a slope and an intercept, random
# optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
# for epoch in range(EPOCHS):
#     order = Epoch.shuffled(len(X), seed=0, epoch=epoch, draws=0).order  # 0 … 999, shuffled
#     for start in range(0, len(X), 50):
#         batch = order[start : start + 50]
#         optimizer.zero_grad()
#         torch.nn.functional.mse_loss(model(X[batch]), Y[batch]).backward()
#         optimizer.step()
# ```
#
# In **data-parallel** training every rank holds the whole model and a part of each batch, its **local batch**. It
# computes the gradient over its local batch; an *allreduce* averages the gradients over the ranks; and every rank makes
# the same update. The local batches of all ranks together are the **global batch**.

# %% [markdown]
# ## Gap 1: init
#
# A process does not know of the others by itself. Once Horovod has been started in each of them, `hvd.size()`
# is their number $N$, and `hvd.rank()` is a process's own number, from 0 to $N - 1$.


# %%
def init():
    """Starts Horovod in this process."""
    # exercise: # One call.
    # exercise: ...
    ### BEGIN SOLUTION
    hvd.init()
    ### END SOLUTION


# %%
check.init(init)

# %% [markdown]
# ## Gap 2: shard
#
# `batch` holds the numbers of the examples of one global batch, in the same order on every rank. Each rank takes its
# local batch, so that every example is on exactly one rank and all local batches have one size. Then the mean of the
# ranks' gradients is the gradient over the whole batch. (The length of `batch` is a multiple of the number of ranks.
# Which rank takes which examples does not matter.)


# %%
def shard(batch):
    """This rank's local batch: some of the numbers in `batch`, a NumPy array."""
    # exercise: # Use hvd.rank() and hvd.size(). A slice will do.
    # exercise: ...
    ### BEGIN SOLUTION
    return batch[hvd.rank() :: hvd.size()]
    ### END SOLUTION


# %%
check.shard(shard)

# %% [markdown]
# ## Gap 3: scale the LR
#
# An LR belongs to a batch size: `base_lr` was found for a **global** batch of `base_batch` examples. Now each of
# `hvd.size()` ranks takes `local_batch_size` examples. By the *linear rule* ([Goyal et al.
# 2017](https://arxiv.org/abs/1706.02677)) the LR grows with the global batch $B$:
#
# $$\mathrm{LR} = \mathrm{base\_lr} \cdot \frac{B}{\mathrm{base\_batch}}$$
#
# With a batch of `base_batch` on **every** rank this is `base_lr` times $N$. Where the ranks **share** a batch of
# `base_batch`, it is `base_lr`: the global batch is what it was.


# %%
def scale(base_lr, base_batch, local_batch_size):
    """The LR where each rank takes `local_batch_size` examples a step."""
    # exercise: # How large is the global batch here? (hvdtrain.core.schedule.peak_lr knows the rule too.)
    # exercise: ...
    ### BEGIN SOLUTION
    return peak_lr(base_lr, base_batch, local_batch_size * hvd.size(), "linear")
    ### END SOLUTION


# %%
check.scale(scale)

# %% [markdown]
# ## Gap 4: wrap the optimizer
#
# Up to here each rank would follow its own gradient. Horovod wraps the optimizer of PyTorch in one whose `step()`
# first averages every gradient over the ranks.


# %%
def wrap(optimizer, model):
    """An optimizer that does as `optimizer`, with the mean of the gradients over the ranks."""
    # exercise: # See hvd.DistributedOptimizer.
    # exercise: ...
    ### BEGIN SOLUTION
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ### END SOLUTION


# %%
check.wrap(wrap)

# %% [markdown]
# ## Gap 5: broadcast
#
# Each rank has made random weights of its own. The same updates never make different weights equal, so all ranks
# take over what rank 0 has. This is also how a checkpoint, which rank 0 alone has read, reaches them: its weights, and
# the state of its optimizer, here the momentum.


# %%
def broadcast(model, optimizer):
    """Gives all ranks the weights and the state of the optimizer that rank 0 has."""
    # exercise: # Two calls: one for the weights, one for the momentum. See hvd.broadcast_parameters.
    # exercise: ...
    ### BEGIN SOLUTION
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    ### END SOLUTION


# %%
check.broadcast(broadcast)

# %% [markdown]
# ## All five together
#
# The loop from above, with the five functions in it (marked by their numbers). `tell` sends the weights to this
# notebook after every step.

# %%
BASE_LR, BASE_BATCH = 0.1, 50


def train(local_batch_size, scale, broadcast, pause=0.0):
    """This rank's path [steps + 1, 2]: slope and intercept at the start and after each step."""
    init()  # 1
    torch.manual_seed(hvd.rank())  # every rank has its own random weights
    model = torch.nn.Linear(1, 1)
    torch.nn.init.uniform_(model.weight, 0.0, 1.0)  # somewhere on our map
    torch.nn.init.uniform_(model.bias, -0.4, 0.4)
    lr = scale(BASE_LR, BASE_BATCH, local_batch_size)  # 3
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), model)  # 4
    broadcast(model, optimizer)  # 5
    path = [torch.cat([p.data.ravel() for p in model.parameters()]).numpy()]
    global_batch = local_batch_size * hvd.size()
    for epoch in range(EPOCHS):
        order = Epoch.shuffled(len(X), seed=0, epoch=epoch, draws=0).order
        for start in range(0, len(X), global_batch):
            local_batch = shard(order[start : start + global_batch])  # 2
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(X[local_batch]), Y[local_batch]).backward()
            optimizer.step()
            path.append(torch.cat([p.data.ravel() for p in model.parameters()]).numpy())
            tell(path[-1])
            time.sleep(pause)
    return np.array(path)


# %% [markdown]
# First without gap 5. The pause after each step gives you time to watch.


# %%
def keep_own(model, optimizer):
    """No broadcast: every rank keeps its own weights."""


check.needs("init", "shard", "scale", "wrap")
with LivePaths(x, y, 4, "No broadcast: the paths part") as live:
    ranks.run(train, 50, scale, keep_own, 0.1, watch=live.watch)

# %% [markdown]
# Four parallel paths: every update is the same on all ranks, so the distances between them stay what they were at the
# start. None ends at the minimum, and the gradients of a step were computed at four different points. Nothing crashes,
# and the loss goes down: this mistake is easily overlooked.
#
# Now with the broadcast. The four paths are one; the markers of the ranks alternate along it.

# %%
check.needs()
with LivePaths(x, y, 4, "With broadcast: one path") as live:
    ranks.run(train, 50, scale, broadcast, 0.1, watch=live.watch)

# %% [markdown]
# ## One rank or four?
#
# **One global batch.** One rank takes batches of 200; four ranks take 50 each of the same 200.

# %%
check.needs()
one_large = ranks.run(train, 200, scale, broadcast, ranks=1)[0]
four = ranks.run(train, 50, scale, broadcast)
print(f"Largest difference between the path of 1 rank and those of 4: {np.abs(np.array(four) - one_large).max():.1e}")

# %% [markdown]
# The paths coincide: what is left is the rounding of float32, because a mean of four means adds in another order. How
# many ranks share a batch makes no difference to the training.
#
# **One batch per rank.** One rank takes batches of 50, and so does each of four ranks. The global batch is then four
# times as large, and an epoch has a quarter of the steps.


# %%
def keep_lr(base_lr, base_batch, local_batch_size):
    """No rule: the LR stays, whatever the batch."""
    return base_lr


check.needs()
one_small = ranks.run(train, 50, scale, broadcast, ranks=1)[0]
unscaled = ranks.run(train, 50, keep_lr, broadcast)[0]

beside(
    x,
    y,
    {
        "One global batch of 200": {"1 rank x 200": one_large, "4 ranks x 50": four[0]},
        "A batch of 50 per rank": {
            "1 rank, LR 0.1": one_small,
            "4 ranks, LR 0.4 (scaled)": four[0],
            "4 ranks, LR 0.1 (not scaled)": unscaled,
        },
    },
)
# %% [markdown]
# On the left the two paths lie on one another. On the right they do not: four ranks at the scaled LR take another path,
# in fewer and longer steps; at the LR of one rank they have come only a part of the way when the epochs are over.

# %%
check.needs()
per_rank = {"1 rank, LR 0.1": one_small, "4 ranks, LR 0.4 (scaled)": four[0], "4 ranks, LR 0.1 (not scaled)": unscaled}
progress(per_rank, EPOCHS)

# %% [markdown]
# The linear rule says why. While the gradient changes little, $N$ steps along gradients $g_1 \ldots g_N$ of small
# batches go as far as one step of $N$ times the length along their mean:
#
# $$\mathrm{LR} \cdot (g_1 + \ldots + g_N) = N \cdot \mathrm{LR} \cdot \frac{g_1 + \ldots + g_N}{N}$$
#
# So over **epochs** (left) the scaled path of four ranks gets about as far as that of one rank, in a quarter of
# the **steps** (right). Without scaling each step is as long as before, and there are four times fewer.
#
# The rule has an end. On this line SGD with momentum 0.5 is stable up to an LR of about 1.5 (the curvature in $n$ is
# 2, and LR times curvature must stay below $2 \cdot (1 + 0.5)$). Sixteen ranks with 50 examples each would train at
# 1.6, and diverge. Lab 4 shows what helps on the way there (warm-up) and what a large batch costs.
