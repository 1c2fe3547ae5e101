# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. A language model on several ranks: six gaps
#
# A language model learns from texts of unequal length. A batch of images has as many losses as images; a batch of
# texts has as many as **tokens**, and every rank has another number of them. That one difference breaks most
# hand-written training loops, without a sign. In this lab you train a small GPT on the source of Python's standard
# library, byte by byte, on one rank and on several, and get the same model.
#
# | gap | name | what it is |
# |---|---|---|
# | 1 | `micro_batches` | the global batch in tokens |
# | 2 | `mean_per_token` | the loss over all ranks |
# | 3 | `ragged` | a batch of yours that shows the usual mistake |
# | 4 | `accumulate` | several micro-batches for one update |
# | 5 | `reduce` | one gradient for all ranks, and its norm |
# | 6 | `predicted` | how long an update takes on N ranks |
#
# Below each gap a check prints that it is right, or what is wrong and why. `check.hint("ragged")` in a cell of your own
# prints a hint for gap 3, and once more the next one.
#
# The cells of the solution run in some five minutes on two cores, most of them training; for the exercise take an hour
# and a half. Run the cells from top to bottom. Lab 6 explains `join`; you need not have done it.

# %%
import contextlib
import io
import math
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hvdtrain.torch as ht
from labtools import Ranks, style, text
from labtools.exercises.language import LOADED, Check
from labtools.scale import counted, machine, scaled
from labtools.text import END, VOCABULARY

style.use()
torch.set_num_threads(1)  # as each rank has
ranks = Ranks(4, preload=LOADED)  # four processes on this machine
check = Check(ranks)

# %% [markdown]
# ## The text
#
# A **token** is here a byte: 256 of them, and one more, `END`, which stands before and behind each piece of text. (Large
# models have tokens of several letters; nothing else changes.) A piece is what stands between two blank lines in a
# source file of Python's own library, or some lines of that, at most 128 bytes. Some files are held out for validation.

# %%
LENGTH = 128  # bytes of a piece, at most
train_set, valid_set = text.pieces(LENGTH, train=40_000, valid=512)
lengths = [len(piece) for piece in train_set]
print(f"{len(train_set):,} pieces of {min(lengths)} to {max(lengths)} bytes, {np.mean(lengths):.0f} on average;")
print(f"{len(valid_set)} others for validation. The first one:\n")
print(text.shown(train_set[0]))

# %% [markdown]
# A batch is a rectangle of numbers, and pieces are not equally long. So the shorter ones are **padded**, and a target
# of -100 says that at this place nothing is predicted. The model reads `END d e f` and predicts `d e f END`: each token
# from those before it.


# %%
def padded(pieces):
    """Inputs and targets [pieces, longest], where the targets are -100 behind the end of a piece."""
    rows = [torch.tensor([END, *piece, END]) for piece in pieces]
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad([row[:-1] for row in rows], batch_first=True, padding_value=END)
    return inputs, pad([row[1:] for row in rows], batch_first=True, padding_value=-100)


x, y = padded([b"def f(x):", b"pass"])
print(x, y, sep="\n")

# %% [markdown]
# ## The model
#
# A GPT, in miniature: each block lets every token look at those before it (`is_causal`), then thinks about what it has
# seen. GPT-2 has twelve blocks, eight times as wide.


# %%
class Block(torch.nn.Module):
    """Attention and two dense layers, each added to what was there."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.queries_keys_values, self.mix = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.think = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, h):  # [pieces, tokens, width]
        split = self.queries_keys_values(self.before(h)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*split, is_causal=True)  # [pieces, heads, tokens, width / heads]
        h = h + self.mix(seen.transpose(1, 2).flatten(2))
        return h + self.think(self.between(h))


class GPT(torch.nn.Module):
    """Tokens [pieces, tokens] -> logits [pieces, tokens, VOCABULARY]; the same random weights in each process."""

    def __init__(self, width=96, heads=4, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(LENGTH + 1, width)
        self.blocks = torch.nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, VOCABULARY)
        for embedding in (self.tokens, self.places):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        h = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(h)))


def loss_sum(model, x, y):
    """The sum of the losses of all tokens; those of -100 count nothing."""
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)


def tokens_of(y):
    """How many tokens count."""
    return (y != -100).sum().item()


print(f"{sum(weight.numel() for weight in GPT().parameters()):,} weights")

# %% [markdown]
# ## The serial script
#
# AdamW, clipped gradients, and the loss per token: what you find in any script for one GPU.

# %%
LR, MOST = 3e-3, 1.0  # the learning rate, and the norm to which a gradient is clipped
GLOBAL, LOCAL = 32, 8  # pieces in an update of all ranks, and in a micro-batch of one rank


def global_batch(step):
    """The pieces of an update: the same, whatever the number of ranks."""
    return [train_set[(step * GLOBAL + number) % len(train_set)] for number in range(GLOBAL)]


def serial(steps):
    """The script that you have."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(steps):
        x, y = padded(global_batch(step))
        loss = loss_sum(model, x, y) / tokens_of(y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"update {step:3}: {loss:.2f} nats a token, perplexity {loss.exp():.0f}")
    return model


small = serial(scaled(100, least=20))

# %% [markdown]
# A model that knows nothing needs $\ln 257 = 5.55$ nats a token. The **perplexity** is $e$ to the loss: between how many
# tokens the model hesitates.
#
# # The global batch
#
# ## Gap 1: micro_batches
#
# What decides how a language model learns is how many **tokens** there are in an update. GPT-2 and its like took 524,288
# (half a million): 512 sequences of 1,024 tokens. A GPU's memory holds perhaps 8 of these sequences. That is a
# **micro-batch**. All ranks compute one at the same time; if that is not enough, each computes several, one after the
# other, and adds their gradients up: **gradient accumulation**.


# %%
def micro_batches(tokens, sequences, length, ranks):
    """How many micro-batches each rank computes for an update of `tokens` tokens on all ranks.

    A micro-batch has `sequences` sequences of `length` tokens. It fits without a rest.
    """
    # exercise: # One line, and a whole number.
    # exercise: ...
    ### BEGIN SOLUTION
    return tokens // (sequences * length * ranks)
    ### END SOLUTION


# %%
check.micro_batches(micro_batches)

# %%
check.needs("micro_batches")
print("ranks   micro-batches a rank, for 524,288 tokens")
for n in (1, 4, 16, 64):
    print(f"{n:5}{micro_batches(524_288, 8, 1024, n):8}")

# %% [markdown]
# Whoever changes the number of ranks and not that of the micro-batches trains with another global batch, and needs
# another learning rate (lab 4).
#
# # The loss of all ranks
#
# ## Gap 2: mean_per_token
#
# Each rank has a sum of losses and a number of tokens, and these differ, for its pieces are longer or shorter than
# those of another rank. Every rank must get the loss per token **of all tokens**. `world` is what `ht.join()` gives:
# `world.sum(number)` is the sum over the ranks, on every rank.


# %%
def mean_per_token(world, total, count):
    """The mean loss over the tokens of all ranks, from the sum of this rank's losses and its number of tokens."""
    # exercise: # What must be summed, and what divided?
    # exercise: ...
    ### BEGIN SOLUTION
    return world.sum(total) / world.sum(count)
    ### END SOLUTION


# %%
check.mean_per_token(mean_per_token)

# %% [markdown]
# ## Gap 3: ragged: your own batch
#
# The tempting shorter way is `loss = model(...).loss` on each rank, the mean over the rank's own tokens, and then the
# mean over the ranks: the **mean of means**. How wrong can it be? Find a batch that shows it: texts for rank 0 and texts
# for rank 1, for which the two means lie 0.3 nats or more apart. The model is the one that the serial script has just
# trained: which texts does it know well, and which not at all? (128 characters a text at most.)

# %%
# exercise: ragged = [...], [...]
### BEGIN SOLUTION
ragged = ["        self.assertEqual(self.", "        return self.name"], ["~Qz^"]
### END SOLUTION


# %%
def losses(texts):
    """The sum of the model's losses over these texts, and their number of tokens."""
    x, y = padded([each.encode()[:LENGTH] for each in texts])
    with torch.no_grad():
        return loss_sum(small, x, y).item(), tokens_of(y)


check.ragged(ragged, losses)

# %% [markdown]
# In a training nobody chooses such batches, and the error is smaller. But it is there in every update, it depends on
# the number of ranks and of micro-batches, and it has a direction: tokens of short texts count more than those of long
# ones.
#
# # One gradient
#
# ## Gap 4: accumulate
#
# Now the training by hand. The gradient of the mean per token is
#
# $$\nabla \frac{1}{C} \sum_{\text{all tokens}} \text{loss}
# = \sum_{\text{ranks}} \; \sum_{\text{micro-batches}} \frac{1}{C} \nabla\, \text{loss\_sum},
# \qquad C = \text{the tokens of all micro-batches on all ranks.}$$
#
# Your function computes the inner sum: this rank's **share**. `backward()` adds to the gradients that are there, so
# micro-batches add up by themselves. The difficulty is $C$: it must be known before the first `backward()`.


# %%
def accumulate(world, model, parts):
    """Leaves this rank's share of the gradient in the parameters; `parts` are its micro-batches, pairs (x, y).

    The shares of all ranks add up to the gradient of the mean loss per token of all ranks.
    """
    # exercise: # loss_sum(model, x, y) and tokens_of(y) are of one micro-batch.
    # exercise: ...
    ### BEGIN SOLUTION
    count = world.sum(sum(tokens_of(y) for _, y in parts))
    for x, y in parts:
        (loss_sum(model, x, y) / count).backward()
    ### END SOLUTION


# %%
check.accumulate(accumulate)

# %% [markdown]
# ## Gap 5: reduce
#
# The shares become the gradient: their sum over the ranks. Then it is **clipped**: where its norm, over all numbers of
# all tensors, is above a limit, it is shortened to that norm. Texts have rare batches with a huge gradient, and one
# unclipped step can ruin a day's training. The norm is the one place in the loop where a gradient is not simply added
# or averaged: the norm of a sum is not the sum of norms, nor their mean.


# %%
def reduce(world, model, most):
    """Makes the ranks' shares the gradient of all, of norm `most` at most; returns the norm that it had before."""
    # exercise: # world.sum(tensor), torch.nn.utils.clip_grad_norm_(parameters, most): in which order?
    # exercise: ...
    ### BEGIN SOLUTION
    for weight in model.parameters():
        weight.grad = world.sum(weight.grad)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), most).item()
    ### END SOLUTION


# %%
check.reduce(reduce)

# %% [markdown]
# ## The same model on 1, 2 and 4 ranks


# %%
def by_hand(steps, accumulate, reduce):
    """Trains on all ranks; the loss of each update's global batch, before the update."""
    with ht.join() as world:
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        measured = []
        for step in range(steps):
            mine = global_batch(step)[world.rank :: world.size]
            parts = [padded(mine[at : at + LOCAL]) for at in range(0, len(mine), LOCAL)]
            with torch.no_grad():
                total = sum(loss_sum(model, x, y).item() for x, y in parts)
            measured.append(mean_per_token(world, total, sum(tokens_of(y) for _, y in parts)))
            optimizer.zero_grad()
            accumulate(world, model, parts)
            reduce(world, model, MOST)
            optimizer.step()
    return np.array(measured)


check.needs("mean_per_token", "accumulate", "reduce")
STEPS = scaled(24, least=4)
ranks.run(int)  # all have started
curves = {n: ranks.run(by_hand, STEPS, accumulate, reduce, ranks=n, seconds=300)[0] for n in counted((1, 2, 4), "runs")}
print("update   1 rank, 4 micro-batches   2 ranks, 2 each   4 ranks, 1 each")
for step in (0, 1, 2, STEPS - 1):
    print(f"{step:6}" + "".join(f"{curves[n][step]:{width}.6f}" for n, width in ((1, 26), (2, 18), (4, 18))))

# %% [markdown]
# The first losses agree in six digits, which is what float32 has; training then makes rounding larger. The global batch
# is the same, the loss is per token, and the norm is that of the gradient of all.
#
# ## What goes wrong without a sign
#
# Two mistakes that are found in many scripts, and in libraries as well. Neither fails, and no line warns.


# %%
def mean_of_means(world, model, parts):
    """The mistake: each micro-batch's own mean, and the mean of these over micro-batches and ranks."""
    for x, y in parts:
        (loss_sum(model, x, y) / tokens_of(y) / len(parts) / world.size).backward()


def clipped_first(world, model, most):
    """The mistake: each rank clips its own share, and the shares are added up then."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), most / world.size)
    for weight in model.parameters():
        weight.grad = world.sum(weight.grad)


check.needs("mean_per_token", "accumulate", "reduce")
wrong = {"mean of means": (mean_of_means, reduce), "clipped first": (accumulate, clipped_first)}
for name, (first, then) in counted(wrong.items(), "mistakes"):
    for n in (1, 2):
        curves[name, n] = ranks.run(by_hand, STEPS, first, then, ranks=n, seconds=300)[0]

figure, axes = plt.subplots()
axes.semilogy(np.abs(curves[2] - curves[1]) + 1e-9, "k-", label="right")
for number, name in enumerate(wrong):
    look = style.of_rank(number)
    difference = np.abs(curves[name, 2] - curves[name, 1]) + 1e-9
    axes.semilogy(difference, look.linestyle, marker=look.marker, color=look.colour, label=name)
axes.set(xlabel="Update", ylabel="Loss on 2 ranks - loss on 1 / nats")
figure.legend(loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# Each curve compares a program with itself, on another number of ranks. Where it is right, rounding is all that remains.
# With a mistake the ranks train another model than one rank does, from the second update on. Both models learn. That is
# what makes it hard to find: compare the **first updates** on 1 and on 2 ranks, in every program that you bring to
# a cluster.
#
# # With `join`'s run
#
# `world.run` does by itself what you have written. `backward()` leaves the gradients of all ranks, so `clip_grad_norm_`
# behind it has the right norm; `run.loss(total, count)` divides by the tokens of all ranks; and `run.accumulating()`
# keeps all but the last `backward()` of an update from communicating.


# %%
def update(run, model, optimizer, parts):
    """One update; the rank's part of its loss."""
    count = sum(tokens_of(y) for _, y in parts)
    loss = 0.0
    for number, (x, y) in enumerate(parts, 1):
        with run.accumulating(number < len(parts)):
            share = run.loss(loss_sum(model, x, y), count)
            share.backward()
        loss += share.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(updates, pieces):
    """Trains with so many pieces an update: weights, the seconds of each update, and the loss on other text."""
    from time import perf_counter

    def warm_up_and_cosine(step):
        return min((step + 1) / 40, 0.55 + 0.45 * math.cos(math.pi * step / updates))

    with tempfile.TemporaryDirectory() as own, ht.join() as world:
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine)
        folder = world.gather(own)[0]  # that of rank 0
        run = world.run(folder, model, optimizer, scheduler=schedule, trackers=(), log_every_steps=50)
        seconds = []
        for _ in run.epochs(updates, max_steps=updates):  # as many epochs as that needs
            for x, y in run.batches(train_set, batch_size=pieces, collate=padded):
                began = perf_counter()
                loss = update(run, model, optimizer, list(zip(x.split(LOCAL), y.split(LOCAL), strict=True)))
                seconds.append(perf_counter() - began)
                schedule.step()
                run.step(loss)
        total = count = 0
        with torch.no_grad():
            for x, y in run.each_once(valid_set, batch_size=LOCAL * world.size, collate=padded):
                total += loss_sum(model, x, y).item()
                count += tokens_of(y)
        return model.state_dict(), np.array(seconds), world.mean(total, count)


# %% [markdown]
# # How fast is it?
#
# ## Gap 6: predicted
#
# Two ranks share the micro-batches of an update, and add their gradients up **once**, after the last one: that is what
# accumulation is worth on a slow network. On $N$ ranks an update takes
#
# - the time of its micro-batches, of which as many are computed at a time as there are ranks, but not more than there
#   are cores;
# - the ring of lab 3, $2\,\frac{N-1}{N}$ times what it takes to send a gradient once, `adding`.


# %%
def predicted(ranks, micro_batches, micro, adding, cores):
    """Seconds of an update with `micro_batches` in all, each of `micro` seconds; `adding` is for the ring's formula."""
    # exercise: # Two terms.
    # exercise: ...
    ### BEGIN SOLUTION
    return micro_batches / min(ranks, cores) * micro + 2 * (ranks - 1) / ranks * adding
    ### END SOLUTION


# %%
check.predicted(predicted)

# %% [markdown]
# Two short measurements give the two numbers: one micro-batch on one rank, and one on each of two ranks. From them you
# predict updates of eight micro-batches, **before** they are measured.

# %%
cores = machine(4)
NO_REPORT = {"HVDTRAIN_REPORT": "off"}


def timed(updates, pieces):
    """The seconds of each update of a training whose log is not shown."""
    with contextlib.redirect_stdout(io.StringIO()):
        return train(updates, pieces)[1]


def seconds_of(n, pieces):
    """The seconds of a typical update on n ranks: the slowest rank's, without the first updates."""
    seconds = ranks.run(timed, scaled(14, least=6), pieces, ranks=n, environ=NO_REPORT, seconds=300)
    return np.median(np.max(seconds, axis=0)[4:])


check.needs("predicted")
micro = seconds_of(1, LOCAL)
adding = max(0.0, seconds_of(2, 2 * LOCAL) - micro)
forecast = {n: predicted(n, 8, micro, adding, cores) for n in (1, 2, 4)}
measured = {n: seconds_of(n, 8 * LOCAL) for n in counted((1, 2, 4), "runs")}

print(f"a micro-batch of {LOCAL} pieces takes {1e3 * micro:.0f} ms, adding up {1e3 * adding:.0f} ms")
print("ranks   micro-batches   predicted/ms   measured/ms   efficiency, predicted and measured")
for n in (1, 2, 4):
    reached = [times[1] / n / times[n] for times in (forecast, measured)]
    print(f"{n:5}{8 // n:16}{1e3 * forecast[n]:15.0f}{1e3 * measured[n]:14.0f}{reached[0]:13.0%} and {reached[1]:.0%}")

# %% [markdown]
# The prediction knows nothing of caches and memory that ranks share, of what else runs on this machine, nor of
# waiting for the rank that has the longest pieces in this update: a batch is as wide as its longest piece. Padding is
# lost time, which is why large trainings **pack** documents into windows without any.
#
# What would a cluster of such cores do, with GPT-2's update of 64 micro-batches?

# %%
check.needs("micro_batches", "predicted")
print("ranks   micro-batches a rank   efficiency")
for n in (1, 4, 16, 64):
    each = micro_batches(524_288, 8, 1024, n)
    print(f"{n:5}{each:23}{predicted(1, 64, micro, adding, 64) / n / predicted(n, 64, micro, adding, 64):13.0%}")

# %% [markdown]
# With many micro-batches the one sum hardly counts; with one it counts in full. More ranks than 64 find no micro-batch
# at all: then only a larger global batch (lab 4), or smaller micro-batches, would keep them busy.
#
# # Train it
#
# The rest of the time is for a model that can write. Two ranks, the same loop.

# %%
updates = scaled(500, least=10)
weights, seconds, loss = ranks.run(train, updates, GLOBAL, ranks=2, environ=NO_REPORT, seconds=3600)[0]
tokens, text_bytes = sum(map(len, valid_set)) + len(valid_set), sum(map(len, valid_set))
print(f"{updates} updates in {seconds.sum():.0f} s")
print(f"on other text: {loss:.3f} nats a token, perplexity {math.exp(loss):.1f}, ", end="")
print(f"{loss * tokens / text_bytes / math.log(2):.2f} bits a byte")

# %% [markdown]
# **Bits a byte** is what a compressor would need that asks this model; it can be compared between models whose tokens
# differ. `xz` needs 1.5 to 2.2 bits a byte for a source file of this library.
#
# The model writes: it gives probabilities for the next token, one is drawn by them, and it becomes the last one of the
# input.

# %%
model = GPT()
model.load_state_dict(weights)


def write(prompt, seed, temperature=0.7):
    """The prompt, and how the model goes on until it says END."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [END, *prompt.encode()]
    with torch.no_grad():
        while len(tokens) <= LENGTH and (len(tokens) == 1 or tokens[-1] != END):
            logits = model(torch.tensor([tokens]))[0, -1]
            tokens.append(torch.multinomial((logits / temperature).softmax(0), 1, generator=draw).item())
    return text.shown(tokens)


for seed, prompt in enumerate(("def ", "class ", "    if ", "import ")):
    print(f"--- {prompt!r}, seed {seed}")
    print(write(prompt, seed))

# %% [markdown]
# Some minutes on two cores: it has learned indentation, names that occur often, and to close most of what it opens. The
# same loop on a cluster, with more blocks, more text and tokens of several letters, is how larger ones are trained.
#
# **Try:** `temperature=0.2` and `1.5`. Then `LOCAL = 4`: which of the numbers above change, and which must not?
