"""hvdtrain's loop and a hand-written tf.function + Horovod loop, interleaved step by step, in the same processes.

Both train the recipe's network on the CPU, on the same examples with the same loss and update; the hand-written one
does what such a script does and no more: no guard, no log, no metrics, no order kept over ranks, and arrays read by
tf.data. Another data set of the user's is read alike by both. hvdtrain's logs as a run does, into a temporary folder;
checkpoints and validation are in neither time.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import benchmark
import horovod.tensorflow as hvd
import keras
import numpy as np
import overhead
import tensorflow as tf

from hvdtrain.core.progress import Request
from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.tensorflow import models, optimizers
from hvdtrain.tensorflow.data import Arrays, Examples, Loader
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.objective import Objective
from hvdtrain.tensorflow.trainer import Trainer, open_engine

CPU = "/CPU:0"


def hand_written(run: Run) -> benchmark.Steps:
    """The bare loop."""
    engine = Engine(CPU)
    model = models.build(run.recipe, run.dataset, engine)
    objective = Objective(run.recipe, run.dataset, engine)
    weights = [weight.value for weight in model.trainable_weights]
    optimizer = optimizers.make(run.recipe, model.trainable_weights)  # Keras's SGD takes longer, and steps otherwise
    kept = [weight.value for weight in model.weights] + keras.tree.flatten(optimizer.state)
    hvd.broadcast_variables(kept, root_rank=0)
    lr = tf.constant(run.plan.schedule.peak_lr)

    @tf.function
    def step(batch: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            if run.recipe.step:
                loss = objective.measure(model, batch, training=True)[0]
            else:  # images are normalised already
                loss = objective._loss(model(batch[0], training=True), batch[1], training=True)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        optimizer.descend(gradients, lr)
        return loss

    train = run.dataset.train
    for batch in _own(run) if isinstance(train, Examples) and not isinstance(train, Arrays) else _in_memory(run):
        step(batch)
        yield


def _in_memory(run: Run) -> Iterable[Any]:
    """Local batches of arrays without end, images of hvdtrain's data sets normalised."""
    dataset = run.dataset
    arrays = dataset.train.read(np.arange(len(dataset.train)), None)
    if dataset.classes is not None:
        x, y = arrays
        arrays = ((x.astype(np.float32) / 255 - dataset.mean) / dataset.std).astype(np.float32), y
    # Numbers are shuffled, and without end: a buffer of images, filled anew every epoch, made ranks wait up to 17 s.
    mine = tf.data.Dataset.range(len(dataset.train)).shard(hvd.size(), hvd.rank())
    chosen = mine.shuffle(len(dataset.train)).repeat().batch(run.plan.local_batch)
    return chosen.map(
        lambda numbers: keras.tree.map_structure(lambda array: tf.gather(array, numbers), arrays)
    ).prefetch(2)


def _own(run: Run) -> Iterator[Any]:
    """Local batches of the user's data set without end."""
    loader, draw = Loader(run.recipe, CPU), np.random.default_rng(0)
    split, batch = run.dataset.train, run.plan.local_batch
    while True:
        mine = draw.permutation(len(split))[hvd.rank() :: hvd.size()]
        requests: list[Request] = [
            (mine[first : first + batch], None) for first in range(0, len(mine) - batch + 1, batch)
        ]
        yield from loader.batches(split, requests)


def loops(run: Run) -> overhead.Loops:
    """Both loops over one engine."""
    engine = open_engine(run)
    return overhead.Loops(benchmark.ours(Loop(run, Trainer(run, engine))), hand_written(run), engine.sum, engine.close)


if __name__ == "__main__":
    overhead.rank("tensorflow", loops, sys.argv[1:])
