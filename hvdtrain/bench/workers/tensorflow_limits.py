"""One rank of `bench train` with TensorFlow."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from hvdtrain.bench.workers import limits
from hvdtrain.progress import Progress
from hvdtrain.run import Run
from hvdtrain.tensorflow.__main__ import without_banner

with without_banner():
    import tensorflow as tf

from hvdtrain.tensorflow import variables
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.local import LocalEngine
from hvdtrain.tensorflow.opening import engine_of
from hvdtrain.tensorflow.train import Training

WIRE = {"none": tf.float32, "fp16": tf.float16, "fp64": tf.float64}


@contextlib.contextmanager
def sides(run: Run) -> Iterator[limits.Sides]:
    """The run's training, and one on each rank by itself."""
    with engine_of(run) as engine:
        training = Training(run, engine)
        count = sum(int(tf.size(weight)) for weight in training.weights)
        with tf.device(engine.device):
            gradients = tf.zeros(count, WIRE[run.recipe.compression])
        communicate, alone = None, None
        if engine.size > 1:
            communicate = _allreduce(engine, gradients)
            by_itself = LocalEngine(engine.device)
            by_itself.rank = engine.rank
            alone = _drive(Training(replace(run, engine="local", folder=None), by_itself))
        sent = count * gradients.dtype.size
        yield limits.Sides(_drive(training), alone, communicate, engine.sum, sent)


def _drive(training: Training) -> limits.Drive:
    def batches(place: Progress) -> Iterator[tuple[int, limits.Parts]]:
        training.progress.epoch, training.progress.sample = place.epoch, place.sample
        return training.batches()

    return limits.Drive(
        batches=batches,
        update=lambda parts: training.update(parts, 0.0),
        wait=lambda: training.weights[-1].numpy() if training.engine.replicas == 1 else None,
    )


def _allreduce(engine: Engine, gradients: tf.Tensor) -> Callable[[], None]:
    with engine.scope():
        first = tf.Variable(0.0, dtype=gradients.dtype, trainable=False)
    add = engine.replicate(lambda tensor: variables.put(first, engine.sum_tensor(tensor)[0]))

    def communicate() -> None:
        with tf.device(engine.device):
            add([(gradients,)])
        engine.copies(first)[0].numpy()

    return communicate


if __name__ == "__main__":
    limits.main("tensorflow", sides)
