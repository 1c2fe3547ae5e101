# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Keras and TensorFlow: the same model, the same numbers: five gaps
#
# A colleague has a network in PyTorch; you have Keras. You write "the same" network, train it, and get another
# accuracy. Is it chance, or a mistake? Only one thing decides it: **the same weights and the same examples must give
# the same numbers.**
#
# | gap | function | what it does |
# |---|---|---|
# | 1 | `batch_norm` | a layer whose statistics are PyTorch's |
# | 2 | `convolution` | a convolution's weights, in Keras's order |
# | 3 | `dense` | a dense layer's weights, behind flattened images |
# | 4 | `settings` | the optimizer and the loss |
# | 5 | `distribute` | the same on two ranks, with `fit` |
#
# Below each gap a check compares both frameworks and prints that it is right, or what is wrong and why.
# `check.hint("dense")` in a cell of your own prints a hint for gap 3, and once more the next one.
#
# The cells of the solution run in under a minute; for the exercise take three quarters of an hour. Run the cells from
# top to bottom. The first one loads both frameworks, which takes some seconds.

# %%
from hvdtrain.tensorflow import without_banner
from labtools import Ranks, needs, style

with without_banner():  # TensorFlow prints a page about this machine's processors otherwise
    needs.tensorflow(horovod=True)
    import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from labtools.exercises.frameworks import LOADED, Check
from labtools.scale import scaled

style.use()
BATCH, LR, MOMENTUM = 64, 0.05, 0.9
STEPS = scaled(40, least=20)
x, y = load_digits(return_X_y=True)
x = (x.reshape(-1, 1, 8, 8) / 16).astype("float32")  # [examples, channels, height, width], as PyTorch wants images
torch_process = Ranks(1, preload=["torch._dynamo"])  # PyTorch in one process, as TensorFlow may abort beside it
ranks = Ranks(2, preload=LOADED)  # two processes with Keras
check = Check(ranks)

# %% [markdown]
# ## The network in PyTorch
#
# PyTorch has the channels of an image **first**, Keras has them **last**: `[height, width, channels]`.


# %%
def torch_network():
    """Logits of ten digits."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, bias=False),  # to 8 channels of 6 x 6 pixels
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),  # to 288 numbers
        torch.nn.Linear(8 * 6 * 6, 10),
    )


def torch_state():
    """The network's weights, as NumPy arrays by name."""
    return {name: value.numpy() for name, value in torch_network().state_dict().items()}


state = torch_process.run(torch_state)[0]
for name, weight in state.items():
    print(f"{name:22} {weight.shape}")

# %% [markdown]
# ## Gap 1: batch_norm
#
# BatchNorm subtracts the batch's mean and divides by the root of its variance plus a small number. It also keeps
# running statistics for validation. The frameworks' defaults differ in two numbers, and the same word means the
# opposite of itself:
#
# | | PyTorch | Keras |
# |---|---|---|
# | small number | `eps=1e-5` | `epsilon=1e-3` |
# | running mean | `momentum=0.1`: (1 - 0.1) old + 0.1 new | `momentum=0.99`: 0.99 old + (1 - 0.99) new |


# %%
def batch_norm():
    """A layer of Keras's that does as torch.nn.BatchNorm2d(8)."""
    # exercise: # keras.layers.BatchNormalization, with two arguments.
    # exercise: ...
    ### BEGIN SOLUTION
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)
    ### END SOLUTION


# %%
check.batch_norm(batch_norm)

# %% [markdown]
# ## Gap 2: convolution
#
# PyTorch keeps a convolution's weight as `[out, in, height, width]`, Keras its kernel as `[height, width, in, out]`.


# %%
def convolution(weight):
    """Keras's kernel, from PyTorch's weight; both are NumPy arrays."""
    # exercise: # np.transpose(weight, (...)): where does each new axis come from?
    # exercise: ...
    ### BEGIN SOLUTION
    return np.transpose(weight, (2, 3, 1, 0))
    ### END SOLUTION


# %%
check.convolution(convolution)

# %% [markdown]
# ## Gap 3: dense
#
# A dense layer's weight is `[out, in]` in PyTorch and `[in, out]` in Keras. Here its inputs are flattened images.
# PyTorch flattens `[channels, height, width]`: all pixels of the first channel, then all of the second. Keras
# flattens `[height, width, channels]`: all channels of the first pixel, then all of the second. So the inputs have
# another **order**.


# %%
def dense(weight, shape):
    """Keras's kernel [in, out], from PyTorch's weight [out, in]; before Flatten: shape (channels, height, width)."""
    # exercise: # reshape, transpose, reshape
    # exercise: ...
    ### BEGIN SOLUTION
    channels, height, width = shape
    maps = weight.reshape(-1, channels, height, width)
    return maps.transpose(2, 3, 1, 0).reshape(height * width * channels, -1)
    ### END SOLUTION


# %%
check.dense(dense)

# %% [markdown]
# ## Gap 4: settings
#
# PyTorch's script trains with `torch.optim.SGD(parameters, lr=lr, momentum=momentum)` and with
# `torch.nn.functional.cross_entropy(logits, labels)`.


# %%
def settings(lr, momentum):
    """The optimizer and the loss for model.compile."""
    # exercise: # Two objects of Keras's, behind one `return`.
    # exercise: ...
    ### BEGIN SOLUTION
    optimizer = keras.optimizers.SGD(lr, momentum=momentum)
    return optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ### END SOLUTION


# %%
check.settings(settings)

# %% [markdown]
# ## The network in Keras, with PyTorch's weights


# %%
def keras_network(norm, kernel_of_dense):
    """Logits of ten digits, from the weights of `torch_network`."""
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, use_bias=False),
            norm,
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    norms = [state[f"1.{name}"] for name in ("weight", "bias", "running_mean", "running_var")]
    kernel = kernel_of_dense(state["4.weight"], (8, 6, 6))
    model.set_weights([convolution(state["0.weight"]), *norms, kernel, state["4.bias"]])
    return model


def of_torch(steps):
    """The loss of each step in PyTorch."""
    import torch

    model, losses = torch_network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(steps):
        batch = np.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x[batch])), torch.from_numpy(y[batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def of_keras(steps, model, optimizer, loss):
    """The loss of each step in Keras."""
    model.compile(optimizer, loss)
    losses = []
    for step in range(steps):
        batch = np.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x[batch].transpose(0, 2, 3, 1), y[batch])))
    return np.array(losses)


check.needs("batch_norm", "convolution", "dense", "settings")
in_torch = torch_process.run(of_torch, STEPS)[0]
in_keras = of_keras(STEPS, keras_network(batch_norm(), dense), *settings(LR, MOMENTUM))
print("step     PyTorch       Keras")
for step in (0, 1, 2, 9, STEPS - 1):
    print(f"{step + 1:4}   {in_torch[step]:.6f}   {in_keras[step]:.6f}")

# %% [markdown]
# The first loss is the same in six digits, which is all that float32 has. Then rounding differs, and training makes
# small differences larger. That is what "the same numbers" can mean, and it is enough to see every real mistake.
#
# ## What goes wrong without a sign
#
# Each of these networks has one of the usual mistakes. None of them fails, and none prints a warning.


# %%
def transposed(weight, shape):
    """The mistake in gap 3: right for any other dense layer."""
    return weight.T


check.needs("batch_norm", "convolution", "dense", "settings")
defaults = keras.layers.BatchNormalization()
probabilities = keras.losses.SparseCategoricalCrossentropy()
wrong = {
    "dense layer only transposed": (batch_norm(), transposed, *settings(LR, MOMENTUM)),
    "BatchNorm's defaults": (defaults, dense, *settings(LR, MOMENTUM)),
    "no momentum": (batch_norm(), dense, *settings(LR, 0.0)),
    "no from_logits": (batch_norm(), dense, settings(LR, MOMENTUM)[0], probabilities),
}
curves = {"Keras, right": in_keras}
for name, (norm, kernel, optimizer, loss) in wrong.items():
    curves[name] = of_keras(STEPS, keras_network(norm, kernel), optimizer, loss)
    print(f"{name}: done", flush=True)

figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6))
left.plot(in_torch, color="black", linewidth=5, alpha=0.35, label="PyTorch")
for number, (name, losses) in enumerate(curves.items()):
    look = style.of_rank(number)
    every = max(1, STEPS // 8)
    line = {"color": look.colour, "linestyle": look.linestyle, "marker": look.marker, "markevery": every, "label": name}
    left.plot(losses, **line)
    right.semilogy(np.abs(losses - in_torch) + 1e-9, **line)
left.set(xlabel="Step", ylabel="Loss", yscale="log")
right.set(xlabel="Step", ylabel="Difference from PyTorch's loss")
figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# On the left three of the four wrong networks look plausible: their loss falls, and one of them alone shows nothing.
# (The fourth, without `from_logits`, does not learn here: a negative logit counts as a probability of zero.) On the
# right every mistake lies orders of magnitude above rounding within the **first** three steps. So compare the first
# steps, not the accuracy at the end: later the rounding has grown, and all networks fit the same digits.

# %% [markdown]
# ## Gap 5: distribute
#
# `hvdtrain.keras` (as `hvd` here) has Horovod's names. In `fit` three things make one process a rank of a training:
#
# - an optimizer that averages the gradients,
# - rank 0's weights on all ranks when training begins,
# - logs that hold the metrics of all ranks: callbacks such as EarlyStopping decide by them, and must decide alike.


# %%
def distribute(optimizer):
    """The optimizer for model.compile, and the list of callbacks for model.fit, on every rank."""
    import hvdtrain.keras as hvd

    # exercise: # return ..., [...]
    # exercise: ...
    ### BEGIN SOLUTION
    return hvd.DistributedOptimizer(optimizer), [hvd.BroadcastCallback(), hvd.MetricAverageCallback()]
    ### END SOLUTION


# %%
check.distribute(distribute)

# %% [markdown]
# Now the network from above on two ranks: each takes half of every global batch. BatchNorm takes its statistics over
# the global batch, with `synchronized=True`; without it the curve depends on the number of ranks.


# %%
def on_rank(steps):
    """The loss of each step, the mean over the ranks."""
    import hvdtrain.keras as hvd

    hvd.init()
    synchronized = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, synchronized=True)
    model, (optimizer, loss) = keras_network(synchronized, dense), settings(LR, MOMENTUM)
    optimizer, callbacks = distribute(optimizer)
    model.compile(optimizer, loss)
    losses = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: kept.append(logs["loss"]))
    kept = []
    order = np.arange(steps * BATCH) % len(x)
    mine = order[hvd.rank() :: hvd.size()]
    images, labels = x[mine].transpose(0, 2, 3, 1), y[mine]
    model.fit(images, labels, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0, callbacks=[*callbacks, losses])
    means = np.array(kept) * np.arange(1, steps + 1)  # Keras logs the mean from the epoch's first step on
    return np.diff(means, prepend=0)


check.needs()
both = np.mean(ranks.run(on_rank, STEPS), axis=0)
print("step     PyTorch, 1 process   Keras, 2 ranks")
for step in (0, 1, 2, 9, STEPS - 1):
    print(f"{step + 1:4}   {in_torch[step]:18.6f}   {both[step]:14.6f}")

# %% [markdown]
# PyTorch in one process and Keras on two ranks train the same network.
#
# With a recipe of hvdtrain you need none of this: `python -m hvdtrain.torch digits` and `python -m
# hvdtrain.tensorflow digits` build the same network in both frameworks, and `python -m hvdtrain convert RUN --to
# tensorflow` carries a checkpoint over. `docs/keras.md` says what else `fit` needs on many ranks: checkpoints,
# resume, lost ranks.
