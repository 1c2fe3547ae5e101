# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 9. Sharding: a model that no rank holds whole
#
# In data-parallel training every rank holds the same weights, the same gradient and the same state of the optimizer.
# With 64 ranks that is 64 times the same. **ZeRO** (Rajbhandari et al. 2020,
# [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)) gives each rank its part of it; PyTorch's FSDP does the same. You
# write its three stages by hand, on four ranks, and each makes the very update that the replicated training makes.
#
# | gap | function | what it does |
# |---|---|---|
# | 1 | `states` | the bytes of weights, gradients and Adam's state |
# | 2 | `held` | what a rank holds of them, by stage |
# | 3 | `zero_1` | Adam's state in parts |
# | 4 | `zero_2` | the gradients too |
# | 5 | `zero_3` | the weights too |
# | 6 | `sent` | what it costs: the bytes that a rank sends, by stage |
#
# Below each gap a check prints that it is right, or what is wrong and why. `check.hint("zero_2")` in a cell of your own
# prints a hint, and once more the next one. Lab 3 explains the two collectives that all of this is made of; you need not
# have done it. The cells take about a minute. The ranks are processes of this machine.

# %%
import matplotlib.pyplot as plt
import numpy as np

from labtools import Ranks, sharding, style
from labtools.exercises.sharding import Check
from labtools.scale import counted, scaled

style.use()
ranks = Ranks(4, preload=sharding.LOADED)
check = Check(ranks)

# %% [markdown]
# # What a model weighs
#
# ## Gap 1: states
#
# Adam keeps two numbers for each weight: the mean of its gradients, and the mean of their squares. In **float32** every
# number has 4 bytes. In **mixed precision** weights and gradients have 2 bytes (float16 or bfloat16), with which forward
# and backward compute; the optimizer works in float32, and so it keeps three numbers for each weight. Which is the third?
# An update of a thousandth of a weight is lost in 2 bytes.


# %%
def states(parameters, mixed):
    """Bytes of the weights, of the gradients, and of what the optimizer Adam keeps besides."""
    # exercise: # Three numbers. `mixed` is True for mixed precision, False for float32.
    # exercise: ...
    ### BEGIN SOLUTION
    if mixed:
        return 2 * parameters, 2 * parameters, 12 * parameters
    return 4 * parameters, 4 * parameters, 8 * parameters
    ### END SOLUTION


# %%
check.states(states)

# %%
check.needs("states")
for name, parameters in (("GPT-2", 1.5e9), ("a model of 7.5 billion", 7.5e9), ("Llama 3.1", 405e9)):
    print(f"{name:24}{sum(states(parameters, mixed=True)) / 1e9:8,.0f} GB")

# %% [markdown]
# Both ways come to 16 bytes a weight (section 3.1 of the paper). Mixed precision does not make these smaller; it halves
# activations and messages, and the units that compute with 2 bytes are fast. The whole batch adds activations, which this
# lab leaves out: a GPU of 80 GB has no room for the second model, whatever the batch.
#
# ## Gap 2: held
#
# The stages divide one thing after the other among the ranks. **Stage 1**: the optimizer's state. **Stage 2**: the
# gradients too. **Stage 3**: the weights too. Stage 0 is replication.


# %%
def held(weights, gradients, optimizer, ranks, stage):
    """Bytes that a rank holds, from the bytes of the three."""
    # exercise: # One number.
    # exercise: ...
    ### BEGIN SOLUTION
    if stage >= 1:
        optimizer = optimizer / ranks
    if stage >= 2:
        gradients = gradients / ranks
    if stage >= 3:
        weights = weights / ranks
    return weights + gradients + optimizer
    ### END SOLUTION


# %%
check.held(held)

# %%
check.needs("states", "held")
figure, axes = plt.subplots()
counts = 2 ** np.arange(11)
for stage in range(4):
    look = style.of_rank(stage)
    gigabytes = [held(*states(7.5e9, mixed=True), n, stage) / 1e9 for n in counts]
    axes.loglog(counts, gigabytes, look.linestyle, marker=look.marker, color=look.colour, label=f"stage {stage}")
    print(f"stage {stage}: {gigabytes[6]:6.1f} GB on each of 64 ranks")
axes.axhline(80, color="black", linewidth=1)
axes.text(1024, 84, "a GPU of 80 GB", ha="right")
axes.set(xlabel="Ranks", ylabel="Held by a rank / GB", title="7.5 billion weights")
axes.set_xscale("log", base=2)
figure.legend(loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# The four numbers are those of figure 1 of the paper. Stages 1 and 2 approach a bound, for the weights stay whole; stage
# 3 has none.
#
# # By hand
#
# `comm` has the collectives, which `labtools.sharding` makes of lab 3's ring:
#
# | call | gives | a rank sends |
# |---|---|---|
# | `comm.part(array)` | this rank's part of an array that it holds: a view | nothing |
# | `comm.reduce_scatter(array)` | this rank's part of the **sum** of all ranks' arrays | $(N-1)/N$ of the array |
# | `comm.allgather(part)` | the whole array, of all ranks' parts | $(N-1)/N$ of the array |
# | `comm.allreduce(array)` | the whole sum: the two above, one after the other | twice that |


# %%
def collectives():
    """What each gives on this rank."""
    comm = sharding.Comm()
    array = np.arange(8.0) + 10 * comm.rank
    return comm.part(array), comm.reduce_scatter(array), comm.allgather(comm.part(array))


for rank, (part, reduced, gathered) in enumerate(ranks.run(collectives)):
    print(f"rank {rank}: part {part}, reduce_scatter {reduced}, allgather {gathered}")

# %% [markdown]
# The network has eight layers. `weights[number]` are those of a layer, as one flat array.
# `gradients(weights_of)` runs forward and backward on this rank's examples. It calls `weights_of(number)` whenever it
# needs a layer's weights, once in forward and once in backward, and yields `(number, gradient)` as backward gets there,
# the last layer first. The ranks' gradients **add up** to that of the global batch.
# `adam.update(number, weights, gradient)` changes weights in place, and keeps a state as long as what it is given.
#
# An update as Horovod and DDP do it, on every rank alike:


# %%
def replicated(comm, weights, adam, gradients):
    """One update."""
    whole = {number: comm.allreduce(gradient) for number, gradient in gradients(lambda number: weights[number])}
    for number, gradient in whole.items():
        adam.update(number, weights[number], gradient)


# %% [markdown]
# ## Gap 3: zero_1
#
# All ranks compute the same update. Let each compute a quarter: a rank needs the sum of the gradients for **its part**
# alone, and Adam's state of its part alone. Then every rank needs all new weights.


# %%
def zero_1(comm, weights, adam, gradients):
    """One update, with Adam's state in parts."""
    whole = dict(gradients(lambda number: weights[number]))
    # exercise: # For each layer: this rank's part of the weights and of the gradient; then the weights of all.
    # exercise: ...
    ### BEGIN SOLUTION
    for number, gradient in whole.items():
        mine = comm.part(weights[number])
        adam.update(number, mine, comm.reduce_scatter(gradient))
        weights[number][:] = comm.allgather(mine)
    ### END SOLUTION


# %%
check.zero_1(zero_1)

# %% [markdown]
# ## Gap 4: zero_2
#
# Above, every rank held the whole gradient of all layers until backward was over, and used a quarter of it. Now a rank
# keeps its part alone: reduce each gradient **as it comes**.


# %%
def zero_2(comm, weights, adam, gradients):
    """One update, with Adam's state and the gradients in parts."""
    # exercise: # No rank holds more than one layer's whole gradient at a time.
    # exercise: ...
    ### BEGIN SOLUTION
    parts = {n: comm.reduce_scatter(gradient) for n, gradient in gradients(lambda number: weights[number])}
    for number, gradient in parts.items():
        mine = comm.part(weights[number])
        adam.update(number, mine, gradient)
        weights[number][:] = comm.allgather(mine)
    ### END SOLUTION


# %%
check.zero_2(zero_2)

# %% [markdown]
# ## Gap 5: zero_3
#
# Now a rank has a quarter of the weights, too: `parts[number]` is its part of a layer. Forward and backward need whole
# layers, one at a time: collect each **when it is needed**, and let it go. So a layer comes twice in an update.


# %%
def zero_3(comm, parts, adam, gradients):
    """One update, with everything in parts."""
    # exercise: # What does gradients() call for the weights of a layer?
    # exercise: ...
    ### BEGIN SOLUTION
    mine = {n: comm.reduce_scatter(g) for n, g in gradients(lambda number: comm.allgather(parts[number]))}
    for number, gradient in mine.items():
        adam.update(number, parts[number], gradient)
    ### END SOLUTION


# %%
check.zero_3(zero_3)

# %% [markdown]
# # What it costs
#
# ## Gap 6: sent
#
# Count the collectives of one update: those of a gradient, and those of weights. Each moves $(N-1)/N$ of the whole
# through every rank.


# %%
def sent(weights, ranks, stage):
    """Bytes that one rank sends in an update, from the bytes of all weights, which the gradient has too."""
    # exercise: # One number. Stage 0 is an allreduce.
    # exercise: ...
    ### BEGIN SOLUTION
    collectives = 3 if stage == 3 else 2
    return collectives * (ranks - 1) / ranks * weights
    ### END SOLUTION


# %%
check.sent(sent)

# %% [markdown]
# ## Measured
#
# Eight layers of 256 x 256 in float32. Bytes **held** are what NumPy has allocated as Adam begins; the **peak** is the
# most within an update. Bytes **sent** are what the kernel has counted of this process. All for one weight.

# %%
check.needs()
SHAPE, EXAMPLES = (8, 256), 32  # layers and their width; examples of all ranks
UPDATES = scaled(4, least=2)
STEPS = {"replicated": replicated, "ZeRO 1": zero_1, "ZeRO 2": zero_2, "ZeRO 3": zero_3}

found = {}
for name, step in counted(STEPS.items(), "stages"):
    found[name] = ranks.run(sharding.measured, step, step is zero_3, SHAPE, EXAMPLES, UPDATES)

print("bytes for a weight  held, computed  measured    peak  sent, computed  measured  weights as replicated")
for stage, (name, results) in enumerate(found.items()):
    most = [max(each) for each in zip(*((r.held, r.peak, r.sent) for r in results), strict=True)]
    apart = max(np.abs(r.weights - found["replicated"][0].weights).max() for r in results)
    print(f"{name:16}{held(*states(1, mixed=False), 4, stage):18.2f}{most[0]:10.2f}{most[1]:8.2f}", end="")
    print(f"{sent(4, 4, stage):16.2f}{most[2]:10.2f}  {f'within {apart:.0e}' if apart else 'the same bits'}")

figure, axes = plt.subplots()
for number, (name, results) in enumerate(found.items()):
    look = style.of_rank(number)
    axes.plot(results[0].sent, results[0].held, look.marker, color=look.colour, markersize=16, label=name)
axes.set(xlim=(0, 12), ylim=(0, 18), xlabel="Sent by a rank / bytes for a weight", ylabel="Held / bytes for a weight")
figure.legend(loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# In the paper's words, with $\Psi$ weights: replication, stage 1 and stage 2 send $2\Psi$ numbers in an update, and stage
# 3 sends $3\Psi$ (section 7; for large $N$). **Stages 1 and 2 cost nothing**: an allreduce has always been a
# reduce-scatter and an allgather, and now the update happens between the two, on a quarter of the numbers.
# Stage 3 costs half as much again, for a layer has to come once more in backward.
#
# The peak is higher than what is held by about one layer, which passes whole: with more and smaller layers it is lower.
#
# # What goes wrong: the norm of a part
#
# Large models clip the gradient to a norm. With ZeRO a rank has its part of the gradient, and `norm(parts)` looks
# right. Before you run it: which of these shows the mistake? The loss; a comparison of the ranks' weights; one rank
# against four?


# %%
def norm_of_part(comm, parts):
    """The mistake."""
    return np.sqrt(sum((part**2).sum() for part in parts.values()))


def norm_of_all(comm, parts):
    """The squares of all ranks added up first."""
    squares = sum((part**2).sum() for part in parts.values())
    return np.sqrt(comm.allreduce(np.full(comm.size, squares))[0])


def clipping(norm_of):
    """ZeRO 2 with gradients clipped to a norm."""

    def step(comm, weights, adam, gradients):
        parts = {n: comm.reduce_scatter(gradient) for n, gradient in gradients(lambda number: weights[number])}
        factor = min(1, 6 / norm_of(comm, parts))
        for number, gradient in parts.items():
            mine = comm.part(weights[number])
            adam.update(number, mine, factor * gradient)
            weights[number][:] = comm.allgather(mine)

    return step


updates = scaled(60, least=4)
print("the norm of   first and last loss of 1 rank, and of 4   ranks apart   1 rank and 4 apart")
for name, norm_of in (("a part", norm_of_part), ("all", norm_of_all)):
    one, *four = (
        result
        for n in (1, 4)
        for result in ranks.run(sharding.measured, clipping(norm_of), False, (4, 64), 32, updates, ranks=n)
    )
    of_4 = np.sum([each.losses for each in four], axis=0)
    among = max(np.abs(each.weights - four[0].weights).max() for each in four)
    apart = np.abs(four[0].weights - one.weights).max()
    print(
        f"{name:9}{one.losses[0]:16.2f} {one.losses[-1]:6.2f}{of_4[0]:12.2f} {of_4[-1]:6.2f}{among:14.1g}{apart:21.1g}"
    )

# %% [markdown]
# Both train. All ranks have the same weights, since each part is gathered from the rank that owns it: a comparison of
# replicas finds nothing. But each part was shortened by a factor of its own, and the result depends on the number of
# ranks. Only **one rank against four** shows it. Real programs have had it: [pytorch
# #72548](https://github.com/pytorch/pytorch/issues/72548), [AReaL
# #312](https://github.com/areal-project/AReaL/issues/312).
#
# # Where each stage pays
#
# Stage 3 sends $3 \cdot 2$ bytes for a weight and update, in mixed precision. Computing takes $6$ operations for a weight
# and **token** (forward 2, backward 4). So what counts is how many tokens a rank has in an update, and nothing else of
# the model:

# %%
check.needs("sent")
SPEED = 400e12  # operations a second that a GPU reaches: some 40 % of what an H100 has in bfloat16
print("tokens of a rank in an update, with which sending takes as long as computing")
for name, bandwidth in (
    ("NVLink, 400 GB/s", 400e9),
    ("a 400 Gb/s port each, 50 GB/s", 50e9),
    ("Ethernet, 3 GB/s", 3e9),
):
    tokens = [sent(2, 1024, stage) / bandwidth / (6 / SPEED) for stage in (2, 3)]
    print(f"{name:32} stages 0 to 2 {tokens[0]:8,.0f}, stage 3 {tokens[1]:8,.0f}")

# %% [markdown]
# With ten times as many tokens sending can be hidden behind computing, in every stage. With as many, stage 3 is slower
# than stage 2 by a quarter or more.
#
# - **All fits on every rank**: stay with replication, as Horovod and DDP do it. Stage 1 costs nothing more, and gives
#   room for a larger batch.
# - **Adam's state does not fit**: stage 1 or 2. With accumulated gradients (lab 8), stage 2 must reduce each micro-batch,
#   and stage 1 the last one only: then stage 1 sends less.
# - **The weights do not fit**: stage 3 inside a node, over its fast links, and replication between nodes ("hybrid").
# - A model so large, or a batch so small, that none of this is enough, needs its layers cut up: tensor and pipeline
#   parallelism.
#
# # The same in PyTorch: FSDP
#
# `fully_shard` does stage 3 to each module that it is given. Below, the same network and the same batches.


# %%
def with_fsdp(shape, examples, updates):
    """The weights after the updates, whole; weights that this rank holds; bytes sent for a weight in an update."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    comm, (count, width) = sharding.Comm(), shape
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(count)]
    for number, layer in enumerate(layers):
        layer.weight.data = torch.from_numpy(sharding.draw(number, width).reshape(width, width).T.copy())
    model = torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.Tanh())))

    mesh = init_device_mesh("cpu", (comm.size,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for step in range(updates):
        if step == 1:
            before = sharding.written()
        x, y = (torch.from_numpy(each[comm.rank :: comm.size]) for each in sharding.batch(step, examples, width))
        loss = comm.size * (model(x) - y).square().sum() / examples  # FSDP takes the mean over the ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    bytes_sent = (sharding.written() - before) / (updates - 1) / (count * width**2)
    mine = sum(layer.weight.to_local().numel() for layer in layers)
    whole = [layer.weight.full_tensor().detach().numpy().T.ravel() for layer in layers]
    return np.array(whole), mine, bytes_sent


check.needs()
weights, mine, fsdp_sent = ranks.run(with_fsdp, SHAPE, EXAMPLES, UPDATES, seconds=120)[0]
print(f"a rank holds {mine:,} of {weights.size:,} weights, and sends {fsdp_sent:.2f} bytes for each in an update")
print(
    f"the weights differ from replicated ones by {np.abs(weights - found['replicated'][0].weights).max():.0e} at most"
)

# %% [markdown]
# The same update, to rounding. It sends 12 bytes for a weight and not 9: over **Gloo** PyTorch's reduce-scatter is an
# allreduce of which each rank keeps its part. NCCL, on GPUs, has a reduce-scatter. Count before you trust a figure.
#
# # To try
#
# - 64 ranks have a batch of 64 sequences of 2,048 tokens, and 50 GB/s each. Which stage?
# - Let `zero_2` collect two layers' gradients before it reduces them: what becomes of the peak, and of the number of
#   messages? (This is DDP's bucket.)
# - `zero_3` collects a layer when it is needed, and then waits for it. Collect the next one while this one computes: what
#   does that need in memory? (FSDP calls it prefetching.)
