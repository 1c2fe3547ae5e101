# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10. The bug hunt: ten programs that train
#
# Below are ten programs of some twenty lines. Each runs on two ranks, ends without an error, and its loss falls. Each
# has **one mistake**, of a kind that was found in a public program. Find it, and fix it in the cell. You have
# four looks, and need no debugger:
#
# | look | what it shows |
# |---|---|
# | a report | which examples each rank reads, what the network sees, how many updates there are |
# | replicas | the ranks' weights, which have to be the same at every moment |
# | one rank against two | the same global batch, so the same weights, to rounding |
# | a resume | a training with a pause in the middle ends as one without |
#
# `look(ranks, program)` makes the first three, `resumed(ranks, program)` the fourth. Below each program a check runs
# your mended one, on other data, on one rank and on two. It judges by what the program read, saw and left, not by its
# text, nor by what it prints. `check.hint("program_3")` in a cell of your own prints a hint, and once more the next one.
#
# The names of the programs are `program_1` to `program_10`. What was wrong, and where it was found, is written **below**
# each check: do not read ahead. The cells take about a minute; you, an hour and a half. Lab 2 explains Horovod.

# %%
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.distributed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from labtools import Ranks, sharding
from labtools.exercises.hunt import Check
from labtools.hunt import LOADED, look, resumed

ranks = Ranks(2, preload=LOADED)
check = Check(ranks)

# %% [markdown]
# A program is given a `task`: `task.train`, a set of 64 examples `(x, y)` of three classes; `task.valid`, one of 21; a
# fresh network by `task.network()`; and numbers, as `task.epochs` and `task.batch`, the **global** batch. It gives back
# the trained network.

# %% [markdown]
# # Program 1


# %%
def program_1(task):
    hvd.init()
    model = task.network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    # exercise: loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), shuffle=True)
    ### BEGIN SOLUTION
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    ### END SOLUTION
    # exercise: for _ in range(task.epochs):
    ### BEGIN SOLUTION
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        ### END SOLUTION
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_1)

# %%
check.program_1(program_1)

# %% [markdown]
# **What it was.** Each rank reads the whole set, and twice as many updates are made as the batch says: two ranks do
# everything twice. A `DistributedSampler`, or any rule that gives each example to one rank, was missing. Found by a
# report: [SimSiam #16](https://github.com/PatrickHua/SimSiam/issues/16), [pytorch_geometric
# #6312](https://github.com/pyg-team/pytorch_geometric/issues/6312).

# %% [markdown]
# # Program 2


# %%
def program_2(task):
    hvd.init()
    model = task.network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    # exercise: for _ in range(task.epochs):
    ### BEGIN SOLUTION
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        ### END SOLUTION
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_2)

# %%
check.program_2(program_2)

# %% [markdown]
# **What it was.** The order is the same in every epoch: the sampler draws it from its seed and the number of the epoch,
# which it gets by `set_epoch` alone. Each batch has the same companions for ever. Found by a report: [tacotron2
# #241](https://github.com/NVIDIA/tacotron2/issues/241), [KAIR #106](https://github.com/cszn/KAIR/pull/106), and others.

# %% [markdown]
# # Program 3


# %%
def program_3(task):
    hvd.init()
    torch.manual_seed(task.seed + hvd.rank())  # each rank its own random numbers
    model = task.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    ### BEGIN SOLUTION
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    ### END SOLUTION
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_3)

# %%
check.program_3(program_3)

# %% [markdown]
# **What it was.** Nothing gives the ranks the same weights at the start. They add the same updates to different
# weights, and stay apart for ever; what is saved is rank 0's. Found by a comparison of replicas: [packnet-sfm
# #172](https://github.com/TRI-ML/packnet-sfm/issues/172).

# %% [markdown]
# # Program 4
#
# A network that knew five classes is given a new head for three.


# %%
def program_4(task):
    hvd.init()
    torch.manual_seed(task.seed + hvd.rank())
    model = task.network(classes=5)
    ### BEGIN SOLUTION
    model.head = torch.nn.Linear(model.head.in_features, 3)
    ### END SOLUTION
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    # exercise: model.head = torch.nn.Linear(model.head.in_features, 3)
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_4)

# %%
check.program_4(program_4)

# %% [markdown]
# **What it was.** The head was replaced behind the optimizer's back: the optimizer has the weights of the old one. The
# new one is never broadcast, never averaged and never updated. Found by a comparison of replicas; on one rank nothing but
# a bad loss shows it. With DDP the same: [pytorch #12603](https://github.com/pytorch/pytorch/issues/12603).

# %% [markdown]
# # Program 5
#
# This one uses PyTorch's DDP. `sharding.join()` opens `torch.distributed` over Gloo.


# %%
def program_5(task):
    rank, size = sharding.join()
    model = torch.nn.parallel.DistributedDataParallel(task.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    sampler = DistributedSampler(task.train, size, rank)
    loader = DataLoader(task.train, batch_size=task.batch // size, sampler=sampler)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            # exercise: loss = cross_entropy(model.module(x), y)
            ### BEGIN SOLUTION
            loss = cross_entropy(model(x), y)
            ### END SOLUTION
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"loss {loss:.3f}")
    return model.module


# %%
look(ranks, program_5)

# %%
check.program_5(program_5)

# %% [markdown]
# **What it was.** `model.module` is the network without DDP: whoever calls it goes around the averaging. Each rank
# trained alone, from the same start. Found by a comparison of replicas: [minimind
# #853](https://github.com/jingyaogong/minimind/issues/853).

# %% [markdown]
# # Program 6
#
# `task.scheduler(optimizer)` is PyTorch's `ReduceLROnPlateau`: it halves the learning rate when the number that it is
# given has not fallen for four updates.


# %%
def program_6(task):
    hvd.init()
    model = task.network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    scheduler = task.scheduler(plain)
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            # exercise: scheduler.step(loss.item())
            ### BEGIN SOLUTION
            scheduler.step(hvd.allreduce(loss.detach()).item())
            ### END SOLUTION
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_6)

# %%
check.program_6(program_6)

# %% [markdown]
# **What it was.** Each rank asked its **own** loss whether to halve the learning rate, and so the ranks took steps of
# different lengths along one gradient. Whatever decides about all (a rate, an early stop, the best checkpoint) has to be
# the same number on all ranks. Found by a comparison of replicas: [DALLE-pytorch
# #268](https://github.com/lucidrains/DALLE-pytorch/issues/268).

# %% [markdown]
# # Program 7
#
# In this set four labels of ten are missing; `cross_entropy` leaves out the examples whose label is -100.


# %%
def program_7(task):
    hvd.init()
    model = task.network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = DistributedSampler(task.partly_labelled, hvd.size(), hvd.rank())
    loader = DataLoader(task.partly_labelled, batch_size=task.batch // hvd.size(), sampler=sampler)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            # exercise: loss = cross_entropy(model(x), y)
            ### BEGIN SOLUTION
            count = hvd.allreduce((y != -100).sum().float())  # the mean over the ranks
            loss = cross_entropy(model(x), y, reduction="sum") / count
            ### END SOLUTION
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_7)

# %%
check.program_7(program_7)

# %% [markdown]
# **What it was.** `cross_entropy` divides by the labels of **this rank**, and Horovod takes the mean of the ranks' means:
# an example on a rank with few labels counts more. Found by one rank against two, and by nothing else: [speculators
# #942](https://github.com/vllm-project/speculators/issues/942), [prime-rl
# #2358](https://github.com/PrimeIntellect-ai/prime-rl/issues/2358). Lab 8 is about this one.

# %% [markdown]
# # Program 8
#
# Noise is added to the inputs, so that the network does not learn them by heart.


# %%
def program_8(task):
    hvd.init()
    torch.manual_seed(task.seed)
    model = task.network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    ### BEGIN SOLUTION
    torch.manual_seed(1000 + hvd.rank())
    ### END SOLUTION
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x + 0.3 * torch.randn(x.shape)), y)
            loss.backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}")
    return model


# %%
look(ranks, program_8)

# %%
check.program_8(program_8)

# %% [markdown]
# **What it was.** All ranks draw the same random numbers: two examples of each batch have the same noise, always.
# The seed that makes the **weights** alike has to differ by rank for what is drawn of the **examples**: noise, masks,
# crops, dropout. Found by a report of what the network sees: [lingbot-vla-v2
# #41](https://github.com/Robbyant/lingbot-vla-v2/issues/41), [mlcommons/training
# #844](https://github.com/mlcommons/training/pull/844).

# %% [markdown]
# # Program 9
#
# At the end it reports the accuracy on the 21 examples of validation.


# %%
def program_9(task):
    hvd.init()
    model = task.network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    # exercise: sampler = DistributedSampler(task.valid, hvd.size(), hvd.rank(), shuffle=False)
    ### BEGIN SOLUTION
    sampler = range(hvd.rank(), len(task.valid), hvd.size())
    ### END SOLUTION
    right = count = 0
    with torch.no_grad():
        for x, y in DataLoader(task.valid, batch_size=4, sampler=sampler):
            right += (model(x).argmax(1) == y).sum().item()
            count += len(y)
    right, count = (hvd.allreduce(torch.tensor(float(each)), op=hvd.Sum).item() for each in (right, count))
    if hvd.rank() == 0:
        print(f"loss {loss:.3f}, accuracy {right / count:.3f}")
    return model, right / count


# %%
look(ranks, program_9)

# %%
check.program_9(program_9)

# %% [markdown]
# **What it was.** 21 examples do not divide by two: the sampler gives one of them twice, so that each rank has as many,
# and 22 are counted. Which one, and so the accuracy, depends on the number of ranks. That is right for training, where a
# rank with no batch would be waited for, and wrong for a result. Found by a report, and by one rank against two, when the
# example happens to matter: [rf-detr #1507](https://github.com/roboflow/rf-detr/issues/1507); the accuracy of each rank's
# own part: [pytorch/examples #905](https://github.com/pytorch/examples/issues/905).

# %% [markdown]
# # Program 10
#
# It writes a checkpoint after each epoch, and resumes from the one that it finds.


# %%
def program_10(task):
    hvd.init()
    model = task.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    path, begun = Path(task.folder) / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        ### BEGIN SOLUTION
        optimizer.load_state_dict(state["optimizer"])
        ### END SOLUTION
        begun = state["epoch"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = DistributedSampler(task.train, hvd.size(), hvd.rank())
    loader = DataLoader(task.train, batch_size=task.batch // hvd.size(), sampler=sampler)
    for epoch in range(begun, task.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
            # exercise: torch.save({"model": model.state_dict(), "epoch": epoch + 1}, path)
            ### BEGIN SOLUTION
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, path)
            ### END SOLUTION
    return model


# %%
look(ranks, program_10)
resumed(ranks, program_10)

# %%
check.program_10(program_10)

# %% [markdown]
# **What it was.** The checkpoint lacks the optimizer's state: the momentum begins again from nothing. The loss goes on
# falling, with a dent at each resume that nobody looks for. Found by a resume: [OneVision-Encoder
# #65](https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/65), [stylegan2-ada-pytorch
# #108](https://github.com/NVlabs/stylegan2-ada-pytorch/issues/108).
#
# # What finds what
#
# | mistake | found by |
# |---|---|
# | 1 data not split | report; 1 against 2 |
# | 2 one order for all epochs | report |
# | 3 no broadcast | replicas; 1 against 2 |
# | 4 a layer replaced | replicas; 1 against 2 |
# | 5 forward around DDP | replicas; 1 against 2 |
# | 6 a rank decides alone | replicas; 1 against 2 |
# | 7 a mean of unequal means | 1 against 2 |
# | 8 the same noise | report |
# | 9 an example counted twice | report; sometimes 1 against 2 |
# | 10 a checkpoint without momentum | resume |
#
# No single look finds all of them, and none costs more than some seconds. Make them in the first minute of a new program,
# before its first long run.
#
# **To try:** write one of your own, and give it to your neighbour.
