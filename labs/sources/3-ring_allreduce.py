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
# **allreduce**, and its algorithm decides how many ranks are worth having. You write the one that Horovod made popular,
# the **ring**, in NumPy over MPI:
#
# | gap | function | what it does |
# |---|---|---|
# | 1 | `neighbours` | the ranks to the left and to the right |
# | 2 | `reduce_scatter` | the first half: every rank ends with one finished chunk |
# | 3 | `allgather` | the second half: every rank gets all chunks |
# | 4 | `bytes_sent` | the bound: what a rank sends, however many ranks there are |
#
# In the exercise you fill them. Below each one a check prints that it is right, or what is wrong and why. Stuck?
# `check.hint("reduce_scatter")` in a cell of your own prints a hint, and once more the next one. Then you see each step
# of your ring, count its bytes, and race it against MPI's own, against Horovod, and against the obvious way to do it.
#
# The cells take about a minute. The ranks are processes of this machine.

# %%
from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np

from labtools import LabError, Ranks, ring, run_mpi, style
from labtools.exercises.ring import Check
from labtools.scale import Progress, machine, scaled

style.use()
check = Check()

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
# ## Gap 1: the ring
#
# The ranks sit in a ring, and each talks to its two neighbours only: it sends to the right and receives from the left.
# The last rank's right neighbour is rank 0.


# %%
def neighbours(rank, size):
    """The ranks to the left and to the right of `rank`, among `size` ranks."""
    # exercise: # Two numbers: first left, then right.
    # exercise: ...
    ### BEGIN SOLUTION
    return (rank - 1) % size, (rank + 1) % size
    ### END SOLUTION


# %%
check.neighbours(neighbours)

# %% [markdown]
# ## Gap 2: reduce-scatter
#
# Every rank cuts its array into $N$ chunks. In each of $N - 1$ steps it sends one chunk on, and adds what arrives to
# its own chunk of the same number. So every chunk goes around the ring and grows by one summand a step:
#
# | | rank 0 sends | rank 1 sends | rank 2 sends | rank 3 sends |
# |---|---|---|---|---|
# | step 0 | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
# | step 1 | chunk 3 | chunk 0 | chunk 1 | chunk 2 |
# | step 2 | chunk 2 | chunk 3 | chunk 0 | chunk 1 |
#
# At the end rank $r$ holds chunk $r + 1$ finished (the last rank chunk 0).
#
# `comm.Sendrecv(sendbuf, dest, recvbuf=..., source=...)` sends one array and receives another at the same time. Chunks
# may differ in length by one: `arrived[: len(chunk)]` is room for as much as `chunk` has.
#
# (Patarasuk and Yuan 2009, [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002); Horovod:
# Sergeev and Del Balso 2018, [arXiv:1802.05799](https://arxiv.org/abs/1802.05799).)


# %%
def reduce_scatter(chunks, comm):
    """Leaves the sum over all ranks in chunk rank + 1. `chunks` are views: change them in place."""
    rank, size = comm.rank, comm.size
    left, right = neighbours(rank, size)
    arrived = np.empty_like(chunks[0])
    # exercise: # In each step: which chunk goes, which one grows? Send and receive, then add.
    # exercise: ...
    ### BEGIN SOLUTION
    for step in range(size - 1):
        going, growing = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        comm.Sendrecv(going, right, recvbuf=arrived[: len(growing)], source=left)
        growing += arrived[: len(growing)]
    ### END SOLUTION


# %%
check.needs("neighbours")
check.reduce_scatter(reduce_scatter)

# %% [markdown]
# ## Gap 3: allgather
#
# The finished chunks go around once more, $N - 1$ steps, and are copied: rank $r$ begins with chunk $r + 1$, and then
# passes on what has just arrived.


# %%
def allgather(chunks, comm):
    """Brings the finished chunk rank + 1 of every rank to all."""
    rank, size = comm.rank, comm.size
    left, right = neighbours(rank, size)
    # exercise: # In each step: which chunk goes, and where does the one belong that arrives?
    # exercise: ...
    ### BEGIN SOLUTION
    for step in range(size - 1):
        going, coming = chunks[(rank - step + 1) % size], chunks[(rank - step) % size]
        comm.Sendrecv(going, right, recvbuf=coming, source=left)
    ### END SOLUTION


# %%
check.needs("neighbours")
check.allgather(allgather)

# %% [markdown]
# The two together are the ring allreduce:


# %%
def ring_allreduce(array, comm):
    """Leaves the sum over all ranks in `array`, of any length."""
    chunks = np.array_split(array, comm.size)  # views: what is added to them is added to `array`
    reduce_scatter(chunks, comm)
    allgather(chunks, comm)


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


check.needs("neighbours", "reduce_scatter", "allgather")
ring.draw_steps(run_mpi(watch_the_ring, ranks=4))
plt.show()

# %% [markdown]
# In every step all four ranks send and all four receive: no link waits for another. Follow chunk 0 from rank 0 down:
# after three steps it is complete on rank 3, and three more bring it to everybody.

# %% [markdown]
# ## Gap 4: count the bytes
#
# What does **one rank** send in the whole ring, of an array of so many bytes? Count the steps of both phases, and the
# size of a chunk. (Look at what happens with very many ranks: this is why the ring became popular.)


# %%
def bytes_sent(array_bytes, size):
    """Bytes that one of `size` ranks sends in reduce-scatter and allgather together."""
    # exercise: # One number.
    # exercise: ...
    ### BEGIN SOLUTION
    return 2 * (size - 1) * array_bytes / size
    ### END SOLUTION


# %%
check.bytes_sent(bytes_sent)

# %% [markdown]
# This never exceeds twice the array, **however many ranks there are**, and no allreduce can do with less (Patarasuk and
# Yuan). In the naive way rank 0 alone sends $N-1$ times the array. Now count, on real ranks:

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


check.needs()
on_ranks = run_mpi(ring.on_first_ranks, (2, 4, 8), count_bytes, ranks=8)
size = ELEMENTS * 8  # bytes
print("MB sent by a rank, for an array of 8 MB")
print("ranks   your formula      ring, least and most   naive, rank 0   sums right")
for count in (2, 4, 8):
    sent, naive, correct = zip(*(results[count] for results in on_ranks[:count]), strict=True)
    formula = bytes_sent(size, count) / 1e6
    least, most = min(sent) / 1e6, max(sent) / 1e6
    print(f"{count:5}   {formula:15.4f}   {least:11.4f} {most:8.4f}   {naive[0] / 1e6:13.4f}   {all(correct)}")

# %% [markdown]
# Counted and computed agree up to the few bytes by which chunks differ in size. In the ring no rank is special; in the
# naive way all wait for rank 0.

# %% [markdown]
# ## What goes wrong: everybody sends first
#
# `Sendrecv` looks like a luxury: why not `Send`, and then `Recv`? Think before you run the cell: when does a `Send`
# come back, if the neighbour is sending as well, and nobody receives?


# %%
def send_first(elements):
    """One exchange with the neighbours, each rank sending before it receives."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    left, right = neighbours(comm.rank, comm.size)
    arrived = np.empty(elements)
    comm.Send(np.ones(elements), dest=right)
    comm.Recv(arrived, source=left)
    return True


check.needs("neighbours")
for elements in (100, 1_000_000):
    try:
        run_mpi(send_first, elements, ranks=2, seconds=5)
        print(f"{elements:9,} numbers: all have arrived.")
    except LabError as error:
        print(fill(f"{elements:9,} numbers: {error}", 80))

# %% [markdown]
# Small messages fit into MPI's own buffers, and `Send` returns at once; a large one waits until the other side
# receives, which here it never does. So the mistake passes every test with small arrays, and hangs in the first real
# training. (The cell gives up after 5 seconds; a job would wait until its time is over.) Horovod's ranks agree on the
# order of all messages beforehand: this is the *negotiation* that the race below shows as latency.

# %% [markdown]
# ## The race
#
# Arrays from 1 KiB to 16 MiB, on 2, 4 and 8 ranks, five ways: the two above; `MPI_Allreduce` of the MPI library, which
# changes its algorithm with the size; and Horovod, on PyTorch tensors, over MPI and over Gloo. An allreduce is over
# when the **last** rank has its sum; of several repetitions the median counts.

# %%
SIZES = [4**k for k in range(min(8, scaled(8, least=4)))]  # KiB
REPETITIONS = scaled(5, least=2)
cores = machine(8)


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


check.needs("neighbours", "reduce_scatter", "allgather")
progress, done = Progress("races", 6), iter(range(1, 4))
over_mpi = run_mpi(ring.on_first_ranks, (2, 4, 8), race_over_mpi, ranks=8, watch=lambda *_: progress.show(next(done)))
ranks = Ranks(8)
times = {}
for number, count in enumerate((2, 4, 8), 3):
    progress.show(number)
    times[count] = ring.until_the_last([results[count] for results in over_mpi[:count]])
    times[count] |= ring.until_the_last(ranks.run(race_over_gloo, ranks=count))
ranks.close()
progress.close()

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
check.needs("neighbours", "reduce_scatter", "allgather")
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
#
# The model leaves out cores altogether. With more ranks than cores, a step waits until every rank has had a core:
# $\alpha$ and $\beta$ grow with the number of ranks, as the printed values show, and points scatter. On a cluster with
# one rank a GPU the model is good enough to plan with: lab 5 does.

# %% [markdown]
# ## To try
#
# - Let every rank send to the *left*: swap what `neighbours` gives back, and run "Every step of it" again.
# - Add up in float32 with `ring_allreduce` and with `naive_allreduce`: are the sums the same to the last bit? Why is
#   that a question when two trainings are compared?
# - A ring of 1,024 ranks needs 2,046 steps. With the $\alpha$ and $\beta$ from above, from which array size on does
#   the latency no longer matter?
