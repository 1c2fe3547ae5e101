"""hvdtrain's loop and a hand-written tf.function + Horovod loop, interleaved step by step, in the same processes.

Both train the same network on the CPU, on the same images with the same update; the hand-written one does what such
a script does and no more: no guard, no log, no exact metrics, no order kept over ranks. hvdtrain's logs as a run does,
into a temporary folder; checkpoints and validation are in neither time.
"""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.run.loop import Loop
from hvdtrain.run.run import Run
from hvdtrain.tensorflow.models import resnet50
from hvdtrain.tensorflow.opening import open_engine
from hvdtrain.tensorflow.sgd import SGD
from hvdtrain.tensorflow.trainer import Trainer
from hvdtrain.tools.bench.workers import overhead


def hand_written(run: Run) -> overhead.Steps:
    """The bare loop."""
    recipe, dataset, batch = run.recipe, run.dataset, run.plan.worker_batch
    x, y = dataset.train.read(np.arange(len(dataset.train)), None)
    images = ((x.astype(np.float32) / 255 - dataset.mean) / dataset.std).astype(np.float32)
    # Numbers are shuffled, and without end: a buffer of images, filled anew every epoch, made ranks wait up to 17 s.
    chosen = tf.data.Dataset.range(len(y)).shard(hvd.size(), hvd.rank()).shuffle(len(y)).repeat().batch(batch)
    data = chosen.map(lambda numbers: (tf.gather(images, numbers), tf.gather(y, numbers))).prefetch(2)
    model = resnet50(dataset.classes or 0, recipe.stem, recipe.seed)
    weights = [weight.value for weight in model.trainable_weights]
    optimizer = SGD(recipe, weights)  # keras.optimizers.SGD takes longer, and steps otherwise
    hvd.broadcast_variables([weight.value for weight in model.weights] + optimizer.momentum, root_rank=0)
    lr = tf.constant(run.plan.peak_lr)

    @tf.function
    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        optimizer.descend(gradients, lr)
        return loss

    for inputs, labels in data:
        step(inputs, labels)
        yield


def loops(run: Run) -> overhead.Loops:
    """Both loops over one engine."""
    engine = open_engine(run)
    return overhead.Loops(overhead.ours(Loop(run, Trainer(run, engine))), hand_written(run), engine.sum, engine.close)


if __name__ == "__main__":
    overhead.main("tensorflow", loops, sys.argv[1:])
