# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. The ring allreduce
#
# After every step of a data-parallel training each rank has a gradient of its own, and all need the sum. That is an
# **allreduce**, and its algorithm decides how many ranks are worth having.
#
# You write the one that Horovod made popular, the **ring**, in 20 lines of NumPy over MPI; see each of its steps; count
# its bytes; and race it against MPI's own, against Horovod, and against the obvious way to do it.
#
# It takes under a minute. The ranks are processes of this machine.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

from labtools import Ranks, ring, run_mpi, style
from labtools.scale import scaled

style.use()

# %% [markdown]
# ## The obvious way
#
# Everybody sends its array to rank 0, which adds them up and sends the sum to everybody. With $N$ ranks, rank 0
# receives $N - 1$ arrays and sends as many.


# %%
def naive_allreduce(array, comm):
    """Leaves the sum over all ranks in `array`."""
    if comm.rank > 0:
        comm.Send(array, dest=0)
        comm.Recv(array, source=0)
        return
    arrived = np.empty_like(array)
    for other in range(1, comm.size):
        comm.Recv(arrived, source=other)
        array += arrived
    for other in range(1, comm.size):
        comm.Send(array, dest=other)


# %% [markdown]
# ## The ring
#
# Every rank cuts its array into $N$ chunks and talks to its two neighbours only: it sends to the right and receives
# from the left.
#
# 1. **Reduce-scatter**, $N - 1$ steps: each rank sends one chunk on and adds what arrives to its own. Every chunk goes
#    around the ring and grows by one summand a step; at the end each rank holds one finished chunk.
# 2. **Allgather**, $N - 1$ steps: the finished chunks go around once more and are copied.
#
# (Patarasuk and Yuan 2009, [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002); Horovod:
# Sergeev and Del Balso 2018, [arXiv:1802.05799](https://arxiv.org/abs/1802.05799).)


# %%
def ring_allreduce(array, comm):
    """Leaves the sum over all ranks in `array`, of any length."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = np.array_split(array, size)  # views: what is added to them is added to `array`
    arrived = np.empty_like(chunks[0])
    for step in range(size - 1):  # reduce-scatter
        going, growing = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        comm.Sendrecv(going, dest=right, recvbuf=arrived[: len(growing)], source=left)
        growing += arrived[: len(growing)]
    for step in range(size - 1):  # allgather
        going, coming = chunks[(rank - step + 1) % size], chunks[(rank - step) % size]
        comm.Sendrecv(going, dest=right, recvbuf=coming, source=left)


# %% [markdown]
# ## Every step of it
#
# `run_mpi` runs a function on the ranks of one `mpirun` and brings back what each returns. Four ranks add up an array
# of four numbers; a `Watched` communicator records what is sent, and what every rank holds afterwards. A chunk
# shows whose numbers have been added up in it. The arrows are the sends of the step: below rank 3 the ring closes.


# %%
def watch_the_ring():
    """What this rank sent in each step, and what it held after it."""
    from mpi4py import MPI

    array = np.array([2**MPI.COMM_WORLD.rank] * 4)  # powers of two: each sum shows its summands
    watched = ring.Watched(MPI.COMM_WORLD, array)
    ring_allreduce(array, watched)
    return watched.steps


ring.draw_steps(run_mpi(watch_the_ring, ranks=4))
plt.show()

# %% [markdown]
# In every step all four ranks send and all four receive: no link waits for another. Follow chunk 0 from rank 0 down:
# after three steps it is complete on rank 3, and three more bring it to everybody.

# %% [markdown]
# ## Count the bytes
#
# Each rank sends $2(N-1)$ chunks of an $N$-th of the array:
#
# $$\text{bytes sent by a rank} = \frac{2(N-1)}{N} \cdot \text{size of the array}$$
#
# This never exceeds twice the array, **however many ranks there are**. In the naive way rank 0 alone sends $N-1$ times
# the array.

# %%
ELEMENTS = 1_000_003  # a prime: no number of ranks divides it


def count_bytes(comm):
    """Bytes that this rank sends in the ring and in the naive way; and whether both sums are right."""
    values = np.random.default_rng(comm.rank).integers(0, 1000, ELEMENTS)
    right = sum(np.random.default_rng(rank).integers(0, 1000, ELEMENTS) for rank in range(comm.size))
    sent, correct = [], True
    for allreduce in (ring_allreduce, naive_allreduce):
        array = values.copy()
        watched = ring.Watched(comm, array)
        allreduce(array, watched)
        sent.append(watched.sent_bytes)
        correct &= bool((array == right).all())
    return *sent, correct


on_ranks = run_mpi(ring.on_first_ranks, (2, 4, 8), count_bytes, ranks=8)
size = ELEMENTS * 8  # bytes
print("MB sent by a rank, for an array of 8 MB")
print("ranks   2(N-1)/N x size   ring, least and most   naive, rank 0   sums right")
for count in (2, 4, 8):
    sent, naive, correct = zip(*(results[count] for results in on_ranks[:count]), strict=True)
    formula = 2 * (count - 1) / count * size / 1e6
    least, most = min(sent) / 1e6, max(sent) / 1e6
    print(f"{count:5}   {formula:15.4f}   {least:11.4f} {most:8.4f}   {naive[0] / 1e6:13.4f}   {all(correct)}")

# %% [markdown]
# Counted and computed agree up to the few bytes by which chunks differ in size. In the ring no rank is special; in the
# naive way all wait for rank 0.

# %% [markdown]
# ## The race
#
# Arrays from 1 KiB to 16 MiB, on 2, 4 and 8 ranks, five ways: the two above; `MPI_Allreduce` of the MPI library, which
# changes its algorithm with the size; and Horovod, on PyTorch tensors, over MPI and over Gloo. An allreduce is over
# when the **last** rank has its sum; of several repetitions the median counts.

# %%
SIZES = [4**k for k in range(min(8, scaled(8, least=4)))]  # KiB
REPETITIONS = scaled(5, least=2)


def race_over_mpi(comm):
    """This rank's seconds by way: [array sizes][repetitions]."""
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI

    hvd.init(comm=comm)
    ways = {
        "naive": lambda array: naive_allreduce(array, comm),
        "ring (NumPy)": lambda array: ring_allreduce(array, comm),
        "MPI_Allreduce": lambda array: comm.Allreduce(MPI.IN_PLACE, array),
        "Horovod, MPI": lambda array: hvd.allreduce_(torch.from_numpy(array), op=hvd.Sum, name=f"{array.size}"),
    }
    seconds = {
        way: [ring.timed(allreduce, kib, comm.Barrier, REPETITIONS) for kib in SIZES] for way, allreduce in ways.items()
    }
    hvd.shutdown()
    return seconds


def race_over_gloo():
    """The same for Horovod over Gloo."""
    import horovod.torch as hvd
    import torch

    hvd.init()

    def allreduce(array):
        hvd.allreduce_(torch.from_numpy(array), op=hvd.Sum, name=f"{array.size}")

    return {"Horovod, Gloo": [ring.timed(allreduce, kib, hvd.barrier, REPETITIONS) for kib in SIZES]}


over_mpi = run_mpi(ring.on_first_ranks, (2, 4, 8), race_over_mpi, ranks=8)
ranks = Ranks(8)
times = {}
for count in (2, 4, 8):
    times[count] = ring.until_the_last([results[count] for results in over_mpi[:count]])
    times[count] |= ring.until_the_last(ranks.run(race_over_gloo, ranks=count))
ranks.close()

# %% [markdown]
# ## The alpha-beta model
#
# A message of $n$ bytes takes $\alpha + n\beta$ seconds: $\alpha$ to get going, $\beta$ for each byte. Then
#
# $$T_\text{ring} = 2(N-1)\left(\alpha + \frac{n}{N}\beta\right), \qquad
#   T_\text{naive} = 2(N-1)\left(\alpha + n\beta\right).$$
#
# Small arrays cost $\alpha$ alone, large ones $\beta$. For each number of ranks we fit $\alpha$ and $\beta$ to the
# **ring's** points (dashed line). The solid line is the naive way over the same links, as the model has it.

# %%
sizes = np.array(SIZES) * 1024
links = {count: ring.fit_to_ring(count, sizes, seconds["ring (NumPy)"]) for count, seconds in times.items()}
for count, link in links.items():
    print(f"{count} ranks: alpha {1e6 * link.alpha:8.1f} us, beta {1e9 * link.beta:7.3f} ns a byte")
ring.draw_times(times, sizes, links)
plt.show()

# %% [markdown]
# What to look for:
#
# - **Small arrays.** All is latency: the ring pays $2(N-1)$ times $\alpha$, where an algorithm with $\log_2 N$ rounds,
#   which MPI libraries have for small arrays, pays less. Horovod costs a round of negotiation besides: its ranks first
#   agree that all have the tensor. This is why it gathers many small gradients into one large array, a **fusion
#   buffer**.
# - **Large arrays.** All is bandwidth: in the model the naive way moves $N$ times the ring's bytes through one rank.
#
# And the naive **points**? On one machine they may lie far below their line, and even beat the ring: where ranks share
# cores and memory, it does not count how many bytes *a rank* sends but how many all ranks send *together*, and that is
# $2(N-1)$ times the array in both ways. (Compute it from the table above.) The ring is made for ranks that have links
# of their own, as the nodes of a cluster have.

# %%
print(f"This machine has {os.cpu_count()} cores for 2, 4 and 8 ranks.")

# %% [markdown]
# The model leaves out cores altogether. With more ranks than cores, a step waits until every rank has had a core:
# $\alpha$ and $\beta$ grow with the number of ranks, as the printed values show, and points scatter. On a cluster with
# one rank a GPU the model is good enough to plan with: lab 5 does.

# %% [markdown]
# ## To try
#
# - Let every rank send to the *left*. What changes in the drawing, and what in the result?
# - Add up in float32 with `ring_allreduce` and with `naive_allreduce`: are the sums the same to the last bit? Why is
#   that a question when two trainings are compared?
# - A ring of 1,024 ranks needs 2,046 steps. With the $\alpha$ and $\beta$ from above, from which array size on does
#   the latency no longer matter?
