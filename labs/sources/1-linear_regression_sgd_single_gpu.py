# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Linear regression by SGD, on one device
#
# Stochastic gradient descent (SGD) trains every network in these labs. Here it fits a straight line, which has two
# parameters only: so few that you can watch the whole training as a path over a map. You write it yourself:
#
# | gap | function | what it does |
# |---|---|---|
# | 1 | `gradient` | the derivatives of the loss, by hand |
# | 2 | `update` | moves the parameters against the gradient |
# | 3 | `batches` | cuts an epoch into batches |
# | 4 | `step` | the same step in PyTorch |
#
# In the exercise you fill them. Below each one a check prints that it is right, or what is wrong and why. Stuck?
# `check.hint("gradient")` in a cell of your own prints a hint, and once more the next one.
#
# Then you see what the **batch size** does: to the path, to the loss curve, and to the cost of a step. All later labs
# are about large batches on many ranks, and this is where their questions come from.
#
# The cells run in under a minute, on a GPU or a CPU, in PyTorch or TensorFlow. Run them from top to bottom.

# %%
import os
import time

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML

from hvdtrain.core.progress import Epoch
from labtools import line, needs, style
from labtools.exercises.sgd import Check
from labtools.scale import counted, scaled

FRAMEWORK = os.environ.get("HVDTRAIN_LAB_FRAMEWORK", "torch")  # or "tensorflow": restart the kernel to change it
EPOCHS = scaled(20, least=6)
START = (0.25, -0.4)  # slope and intercept before the first step
style.use()
check = Check()
GAPS = [gap for gap in check.hints if gap != "step" or FRAMEWORK == "torch"]  # that the later cells need

# %% [markdown]
# ## The data
#
# 1,000 points of $y = 2x + \text{noise}$; $x$ and the noise are uniform in $[-\tfrac12, \tfrac12)$. We look for the
# slope $m$ and the intercept $n$ of the line $y = mx + n$ with the lowest mean squared error,
#
# $$L(m, n) = \frac{1}{1000} \sum_i (m x_i + n - y_i)^2 .$$
#
# For a line, *least squares* gives the answer at once, so we know where SGD has to arrive. The loss that is left there
# is the variance of the noise, near $1/12$: no line does better.

# %%
x, y = line.points()
best = line.least_squares(x, y)
print(f"least squares: y = {best[0]:.4f} x + {best[1]:.4f}, loss {line.loss(x, y, *best):.4f}; 1/12 = {1 / 12:.4f}")

plt.plot(x, y, ".", color=style.COLOURS["sky"], label="1,000 points")
ends = np.array([-0.5, 0.5])
plt.plot(ends, best[0] * ends + best[1], color=style.COLOURS["vermillion"], linewidth=3, label="least squares")
plt.plot(ends, START[0] * ends + START[1], "--", color="black", label="before the first step")
plt.xlabel("x")
plt.ylabel("y")
plt.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Gap 1: the gradient
#
# In every **epoch** the points are shuffled and cut into batches. A **step** computes the gradient of the loss over one
# batch, and moves $m$ and $n$ against it. The gradient is two numbers, the derivatives of
#
# $$L_\text{batch}(m, n) = \frac{1}{B} \sum_i (m x_i + n - y_i)^2$$
#
# for $m$ and for $n$. Frameworks compute them by themselves; once in a lifetime one does it by hand.


# %%
def gradient(x, y, m, n):
    """The derivatives of the loss over the points x, y (arrays [B, 1]): the one for m, the one for n."""
    # exercise: # Two numbers. NumPy has x.mean().
    # exercise: ...
    ### BEGIN SOLUTION
    error = m * x + n - y
    return 2 * (error * x).mean(), 2 * error.mean()
    ### END SOLUTION


# %%
check.gradient(gradient)

# %% [markdown]
# ## Gap 2: the update
#
# With the **learning rate** (LR) $\eta$ the new parameters are
#
# $$m - \eta \, \frac{\partial L_\text{batch}}{\partial m}, \qquad
#   n - \eta \, \frac{\partial L_\text{batch}}{\partial n} .$$


# %%
def update(m, n, gradient, lr):
    """The new m and n. `gradient` is what gap 1 gives back: two numbers."""
    # exercise: # Two numbers again.
    # exercise: ...
    ### BEGIN SOLUTION
    return m - lr * gradient[0], n - lr * gradient[1]
    ### END SOLUTION


# %%
check.update(update)

# %% [markdown]
# ## Gap 3: batches
#
# `order` holds the numbers of the points, shuffled. Cut it into batches of `batch_size`: every point is in one batch,
# and the last batch is shorter where the numbers do not divide.


# %%
def batches(order, batch_size):
    """A list of arrays: the batches of one epoch."""
    # exercise: # A loop over slices of `order`.
    # exercise: ...
    ### BEGIN SOLUTION
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    ### END SOLUTION


# %%
check.batches(batches)

# %% [markdown]
# That is all of SGD:


# %%
def shuffled(epoch):
    """The numbers 0 ... 999 in this epoch's order."""
    return Epoch.shuffled(len(x), seed=0, epoch=epoch, draws=0).order


def by_hand(batch_size, lr, epochs):
    """Slope and intercept at the start and after every step [steps + 1, 2]."""
    m, n = START
    path = [START]
    for epoch in range(epochs):
        for batch in batches(shuffled(epoch), batch_size):
            m, n = update(m, n, gradient(x[batch], y[batch], m, n), lr)
            path.append((m, n))
    return np.array(path)


check.needs("gradient", "update", "batches")
mine = by_hand(100, 0.5, EPOCHS)
print(f"{len(mine) - 1} steps lead from m = {mine[0, 0]:.2f}, n = {mine[0, 1]:.2f} to", end=" ")
print(f"m = {mine[-1, 0]:.3f}, n = {mine[-1, 1]:.3f}. Least squares: m = {best[0]:.3f}, n = {best[1]:.3f}.")

# %% [markdown]
# ## Gap 4: the same step in PyTorch
#
# PyTorch keeps a gradient beside every parameter, and `backward()` **adds** to it. So a step has four parts: clear the
# gradients, compute the loss over the batch, compute its gradients, update.


# %%
def step(model, optimizer, x, y):
    """One step: `model(x)` is the prediction, `optimizer` knows the parameters and the learning rate."""
    # exercise: # Four lines. torch.nn.functional.mse_loss(prediction, y) is the loss.
    # exercise: ...
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    ### END SOLUTION


# %%
if FRAMEWORK == "torch":
    import torch

    check.step(step)

# %% [markdown]
# The loop around it is yours from above; the gradient is PyTorch's. In TensorFlow a **tape** records the loss and gives
# back new gradients each time, so that there is nothing to clear. (Choose the framework in the first cell.)

# %%
if FRAMEWORK == "torch":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def sgd(batch_size, lr, epochs, step=step):
        """Slope and intercept at the start and after every step [steps + 1, 2]."""
        xs, ys = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
        model = torch.nn.Linear(1, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        path = [START]
        with torch.no_grad():
            model.weight.fill_(START[0])
            model.bias.fill_(START[1])
        for epoch in counted(range(epochs), "epochs"):
            for batch in batches(torch.from_numpy(shuffled(epoch)).to(device), batch_size):
                step(model, optimizer, xs[batch], ys[batch])
                path.append((model.weight.item(), model.bias.item()))
        return np.array(path)

else:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    needs.tensorflow()
    import tensorflow as tf

    device = tf.config.list_logical_devices("GPU" if tf.config.list_physical_devices("GPU") else "CPU")[0].name

    def sgd(batch_size, lr, epochs):
        """Slope and intercept at the start and after every step [steps + 1, 2]."""
        xs, ys = tf.constant(x), tf.constant(y)
        m, n = tf.Variable(START[0]), tf.Variable(START[1])
        optimizer = tf.keras.optimizers.SGD(lr)
        optimizer.build([m, n])

        @tf.function(reduce_retracing=True)
        def step(batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((m * tf.gather(xs, batch) + n - tf.gather(ys, batch)) ** 2)
            optimizer.apply(tape.gradient(loss, [m, n]), [m, n])

        path = [START]
        for epoch in counted(range(epochs), "epochs"):
            for batch in batches(tf.constant(shuffled(epoch)), batch_size):
                step(batch)
                path.append((m.numpy(), n.numpy()))
        return np.array(path)


check.needs(*GAPS)
theirs = sgd(100, 0.5, EPOCHS)
print(f"{FRAMEWORK} on {device}: its path and yours are apart by {np.abs(theirs - mine).max():.1e} at most.")

# %% [markdown]
# ## What goes wrong: gradients that pile up
#
# The most common slip in PyTorch raises no error: `optimizer.zero_grad()` is forgotten. Before you run the cell: what
# does a ball do that rolls in a valley, and is pushed by the slopes of **all** the places where it has been?

# %%
if FRAMEWORK == "torch":

    def careless(model, optimizer, x, y):
        """A step that clears nothing."""
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    check.needs(*GAPS)
    piled_up = sgd(100, 0.05, 6, careless)
    cleared = sgd(100, 0.05, 6)
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    for rank, (axes, path) in enumerate(zip(panels, (cleared, piled_up), strict=True)):
        line.surface(axes, x, y)
        line.path(axes, path, look=style.of_rank(rank)._replace(linestyle="-"))
        axes.plot(*path[0], "s", color="black", markersize=9)
        axes.set_title(("Cleared before each step", "Never cleared")[rank] + f": {len(path) - 1} steps")
        axes.label_outer()
    plt.show()

# %% [markdown]
# It swings from one side to the other and does not come to rest: the sum of all gradients so far is a velocity,
# and nothing brakes it. The loss goes down at first, so one looks for the fault elsewhere. (A velocity with a brake is
# of use. It is called *momentum*, and lab 2 trains with it.)

# %% [markdown]
# ## Three batch sizes
#
# - **1,000**, all points (*full batch*): the gradient is exact, and an epoch is one step.
# - **100** (*mini-batch*): ten steps an epoch, along gradients that are right on average.
# - **1** (*single sample*): a thousand steps an epoch, each from one point's gradient. It needs a much smaller LR.

# %%
RUNS = {1000: 0.5, 100: 0.5, 1: 0.01}  # LR by batch size
NAMES = {1000: "Full batch (1,000)", 100: "Mini-batch (100)", 1: "Single sample (1)"}

check.needs(*GAPS)
paths = {}
print("batch size      LR    steps   seconds   ms a step")
for batch_size, lr in RUNS.items():
    sgd(batch_size, lr, 1)  # the first steps load and compile; they are not counted
    began = time.perf_counter()
    paths[batch_size] = sgd(batch_size, lr, EPOCHS)
    seconds, steps = time.perf_counter() - began, len(paths[batch_size]) - 1
    print(f"{batch_size:10,}  {lr:6.2f}  {steps:7,}  {seconds:8.2f}  {1000 * seconds / steps:10.3f}")

# %% [markdown]
# A step over 1,000 points costs about as much as one over a single point: what takes the time is to start the
# computation, not the computation. That is why nobody trains with single samples, and why a GPU wants large batches.

# %% [markdown]
# ## The paths over the loss surface
#
# The map shows the loss of every line: slope to the right, intercept upwards. It is a long valley, twelve times as
# curved in $n$ as in $m$. Each path starts at the square and lasts the same number of epochs.

# %%
check.needs(*GAPS)
figure, panels = plt.subplots(1, 3, figsize=(12, 5.2), sharey=True)
for rank, (axes, (batch_size, path)) in enumerate(zip(panels, paths.items(), strict=True)):
    surface = line.surface(axes, x, y)
    line.path(axes, path, look=style.of_rank(rank)._replace(linestyle="-"))
    axes.plot(*path[0], "s", color="black", markersize=9)
    axes.set_title(f"{NAMES[batch_size]}\n{len(path) - 1:,} steps")
    axes.label_outer()
figure.colorbar(surface, ax=panels, label="Loss (mean squared error)", format="%.3f", location="bottom", aspect=50)
plt.show()

# %% [markdown]
# - The **full batch** goes straight down the gradient: first down the steep side, then slowly along the bottom. Every
#   step is as good as it can be, and there is only one an epoch.
# - The **mini-batch** wavers, but it has made ten times as many steps over the same points, and is there.
# - The **single sample** staggers. It reaches the minimum too, and then keeps walking around it: at a constant LR the
#   noise of its gradients never lets it rest. A smaller LR towards the end would.

# %% [markdown]
# ## The same as loss curves
#
# By how much is the loss over *all* points still above its minimum? On the left over **epochs**: at each epoch all
# three have seen the same number of points. On the right over **steps**.

# %%
check.needs(*GAPS)
figure, panels = plt.subplots(1, 2, figsize=(12, 5.5), sharey=True)
for rank, (batch_size, path) in enumerate(paths.items()):
    colour, marker, linestyle = style.of_rank(rank)
    above = line.loss(x, y, *path.T) - line.loss(x, y, *best)
    look = {"color": colour, "linestyle": linestyle, "marker": marker, "label": NAMES[batch_size]}
    steps_per_epoch = len(x) // batch_size
    panels[0].plot(np.arange(EPOCHS + 1), above[::steps_per_epoch], **look)
    steps = np.unique(np.geomspace(1, len(path) - 1, 40).astype(int))
    panels[1].plot(steps, above[steps], **look)
panels[0].set(xlabel="Epochs", ylabel="Loss above its minimum", yscale="log", title="The same points seen")
panels[1].set(xlabel="Steps", xscale="log", title="The same number of updates")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# Over epochs the small batches are far ahead. Over steps the full batch and the mini-batch, which have the same LR, go
# down together: ten times the points make a step steadier, and not one bit longer. The single sample, with its small
# LR, needs many more.
#
# This is the question of data-parallel training. $N$ devices compute one step over an $N$ times larger batch in the
# time of one. That pays only if the larger batch gets **further in a step**, and for this its LR has to grow. Labs
# 2 and 4 show how, and how far.

# %% [markdown]
# ## Watch one
#
# The first steps of the mini-batch path, one after another. Press play.

# %%
check.needs(*GAPS)
HTML(line.animation(x, y, paths[100][:61:2]))

# %% [markdown]
# ## To try
#
# - Set the LR of the full batch to 0.9, then to 1.1. From where on does the path leave the valley, and why is it the
#   intercept that goes first? (The curvature of the loss in $n$ is 2; a step overshoots once $\eta \cdot 2 > 2$.)
# - Give the single sample an LR of 0.1. How close to the minimum does it stay?
# - Set `FRAMEWORK = "tensorflow"` and restart the kernel. The paths are the same, up to rounding: the framework is not
#   what decides.
