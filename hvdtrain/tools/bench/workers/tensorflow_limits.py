"""One rank of `bench train` with TensorFlow."""

import contextlib
from collections.abc import Callable, Iterator

from hvdtrain.run.run import Run
from hvdtrain.tensorflow.banner import without_banner
from hvdtrain.tools.bench.workers import limits

with without_banner():
    import tensorflow as tf

from hvdtrain.tensorflow import variables
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.engines.local import LocalEngine
from hvdtrain.tensorflow.engines.replication import replication_of
from hvdtrain.tensorflow.opening import engine_of
from hvdtrain.tensorflow.trainer import Trainer

COMMUNICATED = {"none": tf.float32, "fp16": tf.float16, "fp64": tf.float64}


@contextlib.contextmanager
def sides(run: Run) -> Iterator[limits.Sides]:
    """The run's training, and one on each rank by itself."""
    with engine_of(run) as engine:
        trainer = Trainer(run, engine)
        count = sum(int(tf.size(weight)) for weight in trainer.weights)
        with tf.device(engine.device):
            gradients = tf.zeros(count, COMMUNICATED[run.recipe.compression])
        communicate, alone = None, None
        if engine.size > 1:
            communicate = _allreduce(engine, gradients)
            by_itself = LocalEngine(engine.device)
            by_itself.rank = engine.rank
            alone = _drive(Trainer(run, by_itself))
        sent = count * gradients.dtype.size
        yield limits.Sides(_drive(trainer), alone, communicate, engine.sum, sent)


def _drive(trainer: Trainer) -> limits.Drive:
    return limits.Drive(
        batches=trainer.batches,
        update=lambda micro_batches: trainer.update(micro_batches, 0.0, 0),
        wait=lambda: trainer.weights[-1].numpy() if trainer.replication.replicas == 1 else None,
    )


def _allreduce(engine: Engine, gradients: tf.Tensor) -> Callable[[], None]:
    replication = replication_of(engine)
    with replication.scope():
        first = tf.Variable(0.0, dtype=gradients.dtype, trainable=False)
    add = replication.replicate(lambda tensor: variables.put(first, engine.sum_tensor(tensor)[0]))

    def communicate() -> None:
        with tf.device(engine.device):
            add([(gradients,)])
        replication.copies(first)[0].numpy()

    return communicate


if __name__ == "__main__":
    limits.main("tensorflow", sides)
