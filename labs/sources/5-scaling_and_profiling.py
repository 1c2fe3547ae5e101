# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Scaling and profiling
#
# How much faster is a training on more ranks, where does the time go that is lost, and what would you request next:
# more GPUs, a faster network, faster storage? You train a small ResNet on 1, 2 and 4 ranks of this machine, take the
# time of every part of its step, read Horovod's own record of it, fit a model of the step to what you measured, and
# then put the same model to published runs, up to 1,024 GPUs. On the way you fill four gaps:
#
# | gap | name | what it is |
# |---|---|---|
# | 1 | `efficiency` | what N ranks are worth |
# | 2 | `computing` | a heat map: which rank computes how long |
# | 3 | `limits` | what limits three slow runs |
# | 4 | `prefetch` | the repair of one of them |
#
# Below each one a check prints that it is right, or what is wrong and why. Stuck? `check.hint("limits")` in a cell of
# your own prints a hint, and once more the next one.
#
# The cells take about a minute, without a GPU.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from labtools import Ranks, profiling, scaling, style
from labtools.exercises.profiling import ARRANGED, Check
from labtools.scale import counted, machine, scaled

style.use()
check = Check()
ranks = Ranks(4, preload=["torch._dynamo", "torchvision.models", "sklearn.datasets"])

# %% [markdown]
# ## 1. A training loop with a clock
#
# This is an ordinary Horovod loop. What is new are the lines with `now()`: a stamp between any two parts of a step.
# Note three things.
#
# - `loss.backward()` already **starts** the allreduce: as soon as the gradient of a layer is there, Horovod starts
#   to communicate it, while the layers before it are still being computed. `optimizer.synchronize()` then **waits** for
#   what is not complete. So the part that we call `allreduce` is not how long the communication takes, but how long the
#   rank waits for it.
# - That includes waiting for a slower rank: no sum is complete before its last term.
# - Each rank computes with one thread, so that 4 ranks use 4 cores, if there are as many.

# %%
BATCH = 16  # images a rank and step


def as_they_come(batches):
    """Reads a batch when it is needed."""
    yield from batches


def train(batch, steps, reading=0.0, slowness=0.0, read=as_they_come, small=False):
    """Trains on this rank; its stamps [steps, parts + 1], in seconds since 1970.

    `reading` seconds go by in each read, as with slow storage, and `slowness` in each forward of rank 1.
    A `small` network computes in no time.
    """
    from time import sleep
    from time import time as now

    import horovod.torch as hvd
    import torch
    from torchvision.models import resnet18

    from hvdtrain.core.progress import Epoch
    from hvdtrain.datasets import load

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load("digits").train
    order = Epoch.shuffled(len(digits), seed=0, epoch=0, draws=0)
    global_batch = batch * hvd.size()

    if small:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 512), torch.nn.Linear(512, 10))
    else:
        model = resnet18(num_classes=10)
        model.maxpool = torch.nn.Identity()  # the digits have only 8 x 8 pixels
        model.conv1.stride = (1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def batches():
        for step in range(steps):
            sleep(reading)
            start = step * global_batch % (len(digits) - global_batch)
            x, y = digits.read(order.local_batch(start, global_batch, hvd.rank(), hvd.size()), None)
            yield torch.from_numpy(x).permute(0, 3, 1, 2) / 255, torch.from_numpy(y)

    stamps, times = [], [now()]
    for x, y in read(batches()):
        times.append(now())  # data

        sleep(slowness * (hvd.rank() == 1))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        times.append(now())  # forward

        loss.backward()
        times.append(now())  # backward

        optimizer.synchronize()
        times.append(now())  # allreduce

        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        times.append(now())  # update

        stamps.append(times)
        times = [now()]
    return np.array(stamps)


# %% [markdown]
# ## Gap 1: throughput and efficiency
#
# We keep the batch **of each rank** and take more ranks: every step does more work in, one hopes, the same time. That
# is **weak scaling**. (**Strong scaling** keeps the global batch: every rank has less and less to do in a step, while
# the gradients stay as large as they were. It is the harder of the two.) With $B$ images a rank and $t(N)$ seconds a
# step on $N$ ranks,
#
# $$\text{throughput}(N) = \frac{N B}{t(N)}$$
#
# images a second. The **efficiency** is the part of $N$ times one rank's throughput that is reached: 1 is perfect.


# %%
def efficiency(throughput):
    """The efficiency by number of ranks, from the images a second by number of ranks: {1: 100.0, 2: 180.0}."""
    # exercise: # A dictionary with the same keys.
    # exercise: ...
    ### BEGIN SOLUTION
    return {n: images / n / throughput[1] for n, images in throughput.items()}
    ### END SOLUTION


# %%
check.efficiency(efficiency)

# %% [markdown]
# But ranks compute on cores. Where there are fewer cores than ranks, their computation is interleaved, and no software
# makes 4 ranks on 2 cores 4 times as fast as one. The green line is the most that this machine's cores allow.

# %%
check.needs("efficiency")
ranks.run(int)  # all have started, and take no more time from what is measured
cores = machine(4)
steps = scaled(16, least=3)
NUMBERS = (1, 2, 4)

# By number of ranks, each [ranks, steps, parts + 1]:
stamps = {n: np.array(ranks.run(train, BATCH, steps, ranks=n)) for n in counted(NUMBERS, "runs")}
parts = {n: profiling.typical_step(stamps[n]) for n in NUMBERS}  # each [parts], in seconds

print(f"{cores} cores, batch {BATCH} a rank, {steps} steps")
print("ranks   images/s   efficiency   at most, with these cores")
throughput = {n: n * BATCH / parts[n].sum() for n in NUMBERS}
for n, reached in efficiency(throughput).items():
    print(f"{n:5}{throughput[n]:11.1f}{reached:12.0%}{min(1, cores / n):17.0%}")

profiling.draw_throughput(NUMBERS, list(throughput.values()), cores)
plt.show()

# %% [markdown]
# If your throughput **falls** with more ranks, that is this machine and not the method: ranks that share cores wait for
# one another's computation, and the allreduce, which adds up tens of megabytes, needs the same cores. So here is a run
# of a real cluster beside it, recorded by the Jülich Supercomputing Centre (JSC) for its course: ResNet50 on ImageNet,
# a GPU for each rank, four GPUs in a node.

# %%
figure, axes = plt.subplots()
scaling.draw_recorded(axes)
plt.show()

# %% [markdown]
# ## 2. Where a step's time goes
#
# The stamps say which part grew. On one rank there is nobody to wait for, and `allreduce` is next to nothing. On more
# ranks it appears. If forward and backward grow as well, the ranks compete with one another: for cores, where there are
# fewer than ranks, and in any case for caches and memory. Horovod's own threads need a core now and then, too.

# %%
check.needs("efficiency")
print("rank " + "".join(f"{part:>11}" for part in profiling.PARTS) + "   (ms, median step)")
for n in NUMBERS:
    for rank in range(n):
        milliseconds = 1e3 * np.median(np.diff(stamps[n][rank, 1:]), axis=0)
        print(f"{rank}/{n}  " + "".join(f"{part:11.1f}" for part in milliseconds))

figure, axes = plt.subplots()
profiling.draw_parts(axes, parts)
plt.show()

# %% [markdown]
# Look at the rows of one run: a rank that computes longer waits less, and the other way round. Together they all need
# the same, for in each step they all wait for the last.
#
# ## 3. Horovod's timeline
#
# With `HOROVOD_TIMELINE=file` in the environment, rank 0 writes down what happens to each gradient. The file is a trace
# that Chrome shows, too (`chrome://tracing`, or <https://ui.perfetto.dev>). A gradient goes through these phases:
#
# | phase | what happens |
# |---|---|
# | NEGOTIATE | one rank has the gradient, and waits for the others to have it as well |
# | QUEUE | all have it; another allreduce is running |
# | MEMCPY_IN | several gradients are copied into one buffer, **fused**: one large message is faster than many small |
# | ALLREDUCE | the buffer is communicated around the ring (here GLOO_ALLREDUCE; with MPI or NCCL the name says so) |
# | MEMCPY_OUT | the sums are copied back |

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "timeline.json")
    two_ranks = ranks.run(train, BATCH, 4, ranks=2, environ={"HOROVOD_TIMELINE": str(path)})
    groups = profiling.read_timeline(path)

last_step = two_ranks[0][-1]  # of rank 0, which wrote the timeline
profiling.draw_timeline(groups, last_step)
plt.show()

# %% [markdown]
# How to read it: the grey bars on top are rank 0's own stamps. Below them, each row is a group of gradients that
# were communicated together: the largest one's name, how many others, and their size. From top to bottom they are in
# the order of communication, which is that of backward: from the network's last layer to its first.
#
# - **Overlap with backward.** What is left of the dashed line happens while backward still computes: it costs
#   nothing, at least where somebody else than the computing cores does it (a GPU's copy engines, a network adapter).
#   What is right of it, the rank waits for: that is the part `allreduce` of the bars above.
# - **Fusion.** Groups of many small tensors make one message. Horovod collects what has become ready every
#   `HOROVOD_CYCLE_TIME` milliseconds (1, where it is not set), up to `HOROVOD_FUSION_THRESHOLD` bytes.
# - **Long NEGOTIATE** is no fault of the network: another rank has come late.
#
# ## Gap 2: a heat map of the ranks
#
# With many ranks nobody reads a table of stamps. A **heat map** has a row a rank and a column a step. But of what? Not
# of the step: in an allreduce all wait for the last, so that all steps are equally long. What differs is how long a
# rank needs until it is **ready for the allreduce**: data, forward and backward.


# %%
def computing(stamps):
    """Milliseconds [ranks, steps] from the begin of a step to the end of its backward.

    stamps [ranks, steps, 6] are in seconds: begin, data, forward, backward, allreduce, update.
    """
    # exercise: # One line.
    # exercise: ...
    ### BEGIN SOLUTION
    return 1000 * (stamps[:, :, 3] - stamps[:, :, 0])
    ### END SOLUTION


# %%
check.computing(computing)

# %% [markdown]
# ## Gap 3: what goes wrong: three slow runs
#
# Two ranks train three times, and something is wrong with each run. (We have arranged it: in one, Horovod is set up
# badly, one has slow storage, and in one another program takes the processor from a rank.) Which is which? First look,
# then decide. (The network is a small one here, so that computing takes next to nothing.)


# %%
def run_slow(name, read=as_they_come, small=True):
    """Stamps [ranks, steps, parts + 1] of one of the runs, without its first step."""
    reading, slowness, environ = ARRANGED[name]  # no peeping
    both = ranks.run(train, BATCH, 6, reading, slowness, read, small, ranks=2, environ=environ)
    return np.array(both)[:, 1:]


check.needs("computing")
slow = {name: run_slow(name) for name in counted("ABC", "runs")}
profiling.draw_heat({f"Run {name}": computing(each) for name, each in slow.items()})
plt.show()

figure, axes = plt.subplots()
profiling.draw_parts(axes, {f"Run {name}": profiling.typical_step(each) for name, each in slow.items()})
plt.show()

# %% [markdown]
# Name what limits each run: `"computing"`, `"data"`, `"communication"` or `"slow rank"`.

# %%
# exercise: limits = {"A": ..., "B": ..., "C": ...}
### BEGIN SOLUTION
limits = {"A": "slow rank", "B": "data", "C": "communication"}
### END SOLUTION

# %%
check.needs("computing")
check.limits(limits, slow)

# %% [markdown]
# The allreduce's bar is tall in A **and** in C, and only C is slow in communicating: Horovod's threads there look for
# new gradients every 500 ms only (`HOROVOD_CYCLE_TIME`; 1 where it is not set). In A the fast rank waits for the slow
# one. Who buys a faster network for A has wasted the money.
#
# ## Gap 4: repair run B
#
# Reading and computing need different things: a disk and a processor. So let a **thread** read the next batch while
# this one is being computed. (PyTorch's `DataLoader` does so with `num_workers`, `tf.data` with `prefetch`.)


# %%
def prefetch(batches):
    """The same batches, one after another; the next one is read in a thread while the loop uses this one."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as reader:
        # exercise: # reader.submit(next, batches, None).result() is the next batch, or None behind the last one.
        # exercise: yield ...
        ### BEGIN SOLUTION
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch
        ### END SOLUTION


# %%
check.prefetch(prefetch)

# %%
check.needs("prefetch")
# The larger network again: its computing is what the read can hide behind.
repaired = {"before": run_slow("B", small=False), "after": run_slow("B", prefetch, small=False)}
figure, axes = plt.subplots()
profiling.draw_parts(axes, {f"Run B, {name}": profiling.typical_step(each) for name, each in repaired.items()})
plt.show()

# %% [markdown]
# What is left of `data` is the part of the read that takes longer than the rest of the step. One reader can hide no
# more than that; several would have to read at the same time.
#
# ## 4. A model of the step
#
# With a few parameters one can say what was not measured. Forward, backward and update take `compute` seconds;
# the ring allreduce of $n$ bytes among $N$ ranks sends $2(N-1)$ messages of $n/N$ bytes, one after another:
#
# $$t(N) = \underbrace{\text{compute}}_{\times \max(1,\,N/\text{cores})} +
# \max\big(0,\; \text{allreduce}(N) - \text{what backward hides}\big),
# \qquad \text{allreduce}(N) = 2(N-1)\,\alpha + 2\,\frac{N-1}{N}\,n\,\beta .$$
#
# On this machine, nothing is hidden: the cores that compute are those that add up the gradients. The messages are
# large, so $\alpha$ does not matter. Two parameters remain: `compute`, which is the step on one rank, and $\beta$,
# fitted to the steps on 2 and on 4.

# %%
check.needs("efficiency")
gradient_bytes = sum(group.nbytes for group in groups) // 4  # the timeline holds 4 steps
step_seconds = [parts[n].sum() for n in NUMBERS]
laptop = scaling.fit_laptop(NUMBERS, step_seconds, gradient_bytes, cores)
print(f"compute {1e3 * laptop.compute:.0f} ms; a gradient of {gradient_bytes / 1e6:.1f} MB")
if laptop.byte_seconds:
    print(f"a ring at {1e-9 / laptop.byte_seconds:.2f} GB/s")
print("ranks   measured/ms   model/ms")
for n, seconds in zip(NUMBERS, step_seconds, strict=True):
    print(f"{n:5}{1e3 * seconds:14.0f}{1e3 * laptop.step(n):11.0f}")

figure, axes = plt.subplots()
scaling.draw_laptop(axes, laptop, NUMBERS, step_seconds)
plt.show()

# %% [markdown]
# How far the points lie from the blue line is how well two parameters describe your machine. Everything the model
# does not know, such as the caches that the ranks share, has gone into $\beta$: do not take it for the speed of
# anything else. The green line is a forecast that nobody has tested: the same ring, and a core for each rank.
#
# ## 5. To 1,024 GPUs
#
# JSC has published how long ResNet50 takes for 10 epochs of ImageNet on A100s, four
# in a node:

# %%
print("GPUs   batch a GPU   seconds   step/ms   efficiency")
for run in (scaling.JSC_ONE, scaling.JSC_NODE, scaling.JSC_NODES):
    reached = scaling.JSC_ONE.image_seconds / run.image_seconds
    print(f"{run.gpus:4}{run.batch:14}{run.seconds:10.0f}{1e3 * run.step_seconds:10.1f}{reached:13.1%}")

# %% [markdown]
# Between 4 GPUs (one node) and 16 (four nodes), which have the same batch, a step becomes some 24 ms longer. Why?
# There are at least two stories:
#
# - **The network's fault.** The allreduce between nodes takes longer than backward can hide, and what is left over, we
#   wait for. The ring's $2\frac{M-1}{M}n\beta$ among $M$ nodes hardly grows any more with $M$: the efficiency stays.
# - **The fixed part's fault.** A run also does things that take as long on 1,000 GPUs as on one: start, find the
#   files, start the readers anew in each epoch, save. Spread over fewer and fewer steps, that is a term `drag`
#   $\times N$: the efficiency falls and falls. (A straggler, or storage that cannot keep up, lies somewhere between
#   the two.)
#
# Both stories, and every mixture of them, pass **exactly** through the two points. So the honest answer is a band:

# %%
figure, axes = plt.subplots(figsize=(12, 7))
scaling.draw_published(axes)
plt.show()

print("GPUs   efficiency, lowest to highest of the models that fit")
for gpus in (16, 64, 256, 1024):
    lowest, highest = scaling.jsc_band(gpus)
    print(f"{gpus:4}{lowest:10.0%} to {highest:.0%}")

# %% [markdown]
# Two points cannot pin a curve with three unknowns, and the band does not even count that each run was measured once.
# (The other points are other networks on other machines: they lie there for comparison, nothing was fitted to them.)
# Yet the model is useful: it says what to look at next.

# %%
for name, model in (
    ("the network's", scaling.through_jsc(1, scaling.BACKWARD)),
    ("the fixed part's", scaling.through_jsc(0, scaling.BACKWARD)),
):
    print(f"If it is {name} fault, one GPU alone needs {1e3 * model.step(1):.1f} ms for a batch of 128,")
    if model.byte_seconds:
        print(f"   and the network between the nodes carries {1e-9 / model.byte_seconds:.1f} GB/s.")
    if model.drag:
        fixed = model.drag * scaling.IMAGES / scaling.JSC_NODE.batch
        print(f"   and {fixed:.0f} s of each run do not shrink with more GPUs.")
print(f"One GPU needs {1e3 * 128 * scaling.JSC_ONE.image_seconds:.1f} ms for 128 images when its batch is 256.")

# %% [markdown]
# Each line is a cheap experiment: a few minutes on **one** GPU with batch 128; the bandwidth test of the network; the
# time until a run's first step, and between its epochs. And the network of the first story would be a slow one: a
# single InfiniBand adapter of 200 Gbit/s carries up to 25 GB/s. A run on 64 GPUs, of an hour or less, would tell the
# stories apart: look at the band there. Request that before you request a thousand.
#
# ## 6. What to request next
#
# Amdahl's law: if a part takes the fraction $f$ of a step, then a part twice as fast makes the training $\frac{1}{1 -
# f/2}$ times as fast, and no improvement of this part alone ever makes it more than $\frac{1}{1 - f}$ times as fast.

# %%
REMEDY = {
    "data": "faster storage, more readers, data kept in memory",
    "forward": "faster GPUs, or more of them; lower precision",
    "backward": "faster GPUs, or more of them; lower precision",
    "allreduce": "a faster network, a larger batch a rank, fp16 compression",
    "update": "a fused optimizer",
}
check.needs("efficiency")
gains = {n: scaling.gain_of_halving(parts[n]) for n in NUMBERS}
print("halve        " + "".join(f"{n:>3} rank{'s' if n > 1 else ' '}" for n in NUMBERS) + "   which takes")
for index, (part, remedy) in enumerate(REMEDY.items()):
    print(f"{part:13}" + "".join(f"{gains[n][index]:+8.1%}" for n in NUMBERS) + f"   {remedy}")

# %% [markdown]
# Read a column from top to bottom: the largest number is the part to work on.
#
# - If **forward and backward** dominate, the ranks compute, as they should: faster GPUs help, and so do more of them.
#   (Here, with more ranks than cores, "a faster GPU" means: more cores.)
# - If **allreduce** dominates, more ranks make it worse. A larger batch on each rank computes longer for the same
#   gradient, `compression=hvd.Compression.fp16` halves the bytes, a faster network halves the seconds. But look at the
#   table of the ranks first: if one rank hardly waits and all others wait for it, the network is not to blame.
# - If **data** dominates, GPUs are waiting for storage: buy none. (Digits in memory cost nothing; a
#   million photographs on a shared file system do.)
#
# **Try:** `BATCH = 4` and `BATCH = 64` above. Which columns change, and why? Then give the timeline's run
# `"HOROVOD_CYCLE_TIME": "50"` as well: how many groups are there now, and are they left or right of the
# dashed line?
