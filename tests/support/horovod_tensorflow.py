"""What test_horovod.py starts on two ranks: `python horovod_tensorflow.py FOLDER MODULE`, MODULE being the program's
`import ... as hvd`. FOLDER/rank-R.json holds by case what came out on this rank, and what one process computes of the
data of both ranks by the plain framework."""

import copy
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

FOLDER, MODULE = Path(sys.argv[1]), sys.argv[2]
hvd = importlib.import_module(MODULE)
hvd.init()
import horovod.tensorflow as hvdt  # noqa: E402

keras = tf.keras
RANK, SIZE, STEPS = hvd.rank(), hvd.size(), 2
KERAS_3 = hasattr(keras, "ops")
draw = np.random.RandomState(0)
X = draw.randint(0, 6, (STEPS, SIZE, 8, 3)).astype("f")
Y = draw.randn(STEPS, SIZE, 8, 1).astype("f")
MEAN = {"op": hvdt.Average}
COMPILED = {"run_eagerly": False}


def dense(root=False):
    keras.utils.set_random_seed(1 if root else 1 + RANK)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])


def sparse(root=False):
    keras.utils.set_random_seed(1 if root else 1 + RANK)
    return keras.Sequential(
        [keras.layers.Input((3,)), keras.layers.Embedding(6, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def sgd(**more):
    return keras.optimizers.SGD(0.05, momentum=0.9, **more)


def gradients(model, step, rank):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X[step, rank]) - Y[step, rank]) ** 2)
    return [tf.convert_to_tensor(each).numpy() for each in tape.gradient(loss, model.trainable_variables)]


def plainly(make, combine=lambda ranks: np.mean(ranks, 0), passes=1, average=False, local=()):
    """This rank's weights, from one process that computes the steps of both ranks."""
    models, optimizers, sums = [make(root=True) for _ in range(SIZE)], [sgd() for _ in range(SIZE)], None
    for step in range(STEPS):
        every = [gradients(model, step, rank) for rank, model in enumerate(models)]
        shared = [combine(of_ranks) for of_ranks in zip(*every, strict=True)]
        now = [[own / SIZE if i in local else shared[i] for i, own in enumerate(rank)] for rank in every]
        sums = (
            now
            if sums is None
            else [[a + b for a, b in zip(*both, strict=True)] for both in zip(sums, now, strict=True)]
        )
        if (step + 1) % passes == 0:
            for model, optimizer, total in zip(models, optimizers, sums, strict=True):
                mean = [tf.constant(each / passes if average else each) for each in total]
                optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
            sums = None
    return models[RANK].get_weights()


def fitted(make, options=None, wrap=hvd.DistributedOptimizer, **compiled):
    model = make()
    optimizer = wrap(sgd(), **(options(model) if callable(options) else options or {}))
    model.compile(optimizer, "mse", **{"run_eagerly": True, **compiled})
    kept = model.layers[-1].trainable_variables if "local" in getattr(wrap, "__name__", "") else []
    shared = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=kept)
    model.fit(X[:, RANK].reshape(-1, 3), Y[:, RANK].reshape(-1, 1), 8, shuffle=False, verbose=0, callbacks=[shared])
    return model.get_weights()


def by_hand(distributed_tape, compiled, **options):
    """The weights after a user's loop with a tape, and an optimizer that is wrapped where there are `options`."""
    model, optimizer = dense(), hvd.DistributedOptimizer(sgd(), **options) if options else sgd()
    optimizer.build(model.trainable_variables)
    hvdt.broadcast_variables(model.variables, root_rank=0)
    hvdt.broadcast_variables(optimizer.variables(), root_rank=0)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(zip(distributed_tape(tape, model).gradient(loss, model.trainable_variables),
                                      model.trainable_variables, strict=True))  # fmt: skip

    step = tf.function(step) if compiled else step
    for number in range(STEPS):
        step(tf.constant(X[number, RANK]), tf.constant(Y[number, RANK]))
    return model.get_weights()


class OwnStep(keras.Model):
    """Its own step has a plain tape. Under Keras 3 it is not built before its first batch, and its layers are."""

    make = staticmethod(dense)

    def __init__(self):
        super().__init__()
        self.body = self.make()
        self.built = not KERAS_3

    def build(self, shape):
        self.built = True

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Unbuilt(OwnStep):
    """Its layers are built by its first batch, from a seed of the rank's."""

    make = staticmethod(lambda: keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)]))


def unbuilt():
    """How far apart the ranks are after the first batch, which built the model."""
    keras.utils.set_random_seed(1 + RANK)
    weights = fitted(Unbuilt, **COMPILED)
    return [float(np.abs(np.diff(np.asarray(hvd.allgather(each.reshape(1, -1))), axis=0)).max()) for each in weights]


def local_optimizer(optimizer, **options):
    """A distributed optimizer for which the last layer's weights stay different on each rank."""
    wrapped = hvd.DistributedOptimizer(optimizer, **{k: v for k, v in options.items() if k != "variables"})
    for each in options["variables"]:
        wrapped.register_local_var(each)
    return wrapped


def one_variable():
    """The averaged gradient of one variable, and this rank's gradient by the plain tape."""
    weight = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(weight**2) * (RANK + 1)
    averaged = hvdt.DistributedGradientTape(tape).gradient(loss, weight)
    return [*averaged.numpy(), *(tape.gradient(loss, weight).numpy() / (RANK + 1))]


def numbered_otherwise():
    """The weights where a rank has made more layers before, such as one that evaluates another model."""
    if RANK:
        [keras.layers.Dense(1) for _ in range(3)]
    return by_hand(lambda tape, model: hvdt.DistributedGradientTape(tape), True)


def copied(optimizer):
    return copy.deepcopy(hvd.DistributedOptimizer(optimizer))


def of_its_configuration(optimizer):
    wrapped = hvd.DistributedOptimizer(optimizer)
    return type(wrapped).from_config(wrapped.get_config())


def scaled(optimizer):
    kinds = keras.optimizers if KERAS_3 else keras.mixed_precision
    return kinds.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))


def scheduled(callback, *args, **kwargs):
    """The LR of each batch, under a callback of Horovod's."""
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append(float(model.optimizer.learning_rate))
    )
    model = dense(root=True)
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    model.fit(X[:, RANK].reshape(-1, 3), Y[:, RANK].reshape(-1, 1), 8, 3, verbose=0, shuffle=False,
              callbacks=[callback(*args, **kwargs), look])  # fmt: skip
    return seen


def loaded():
    """The weights after a stored model continues training, with its momentum."""
    path = str(FOLDER / f"model-{RANK}.keras")
    model = dense(root=True)
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    model.train_on_batch(X[0, RANK], Y[0, RANK])
    model.save(path)
    again = hvd.load_model(path)
    again.train_on_batch(X[1, RANK], Y[1, RANK])
    return again.get_weights()


def averaged_metric():
    logs = {"loss": float(RANK), "acc": 3.0 * RANK}
    callback = hvd.callbacks.MetricAverageCallback()
    model = dense(root=True)
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", run_eagerly=True)
    callback.set_model(model)
    callback.on_epoch_end(0, logs)
    return [logs["acc"], logs["loss"]]


def state():
    model = dense()
    model.compile(sgd(), "mse", run_eagerly=True)
    kept = hvd.elastic.KerasState(model, batch=RANK, epoch=RANK)
    kept.sync()
    commit = hvd.elastic.CommitStateCallback(kept, batches_per_commit=1)
    commit.on_train_begin()
    commit.on_batch_end(0)
    synced = model.get_weights()
    model.set_weights([each + 1 for each in synced])
    kept.restore()
    return [*model.get_weights(), np.float32(kept.batch)]


def batch_norm():
    layer = hvdt.SyncBatchNormalization()
    x = tf.Variable(X[0, RANK])
    with tf.GradientTape() as tape:
        out = layer(x, training=True)
        loss = tf.reduce_sum(out**3)
    return [out.numpy(), tape.gradient(loss, x).numpy()]


def batch_norm_plainly():
    layer, x = keras.layers.BatchNormalization(), tf.Variable(X[0].reshape(-1, 3))
    with tf.GradientTape() as tape:
        out = layer(x, training=True)
        loss = tf.reduce_sum(out**3)
    own = slice(8 * RANK, 8 * RANK + 8)
    return [out.numpy()[own], tape.gradient(loss, x).numpy()[own]]


own, both = np.arange(4.0) + RANK, [np.arange(4.0), np.arange(4.0) + 1]
last = lambda model: {"variables": model.layers[-1].trainable_variables}  # noqa: E731
first_group = lambda model: {"groups": [model.trainable_variables[:2]]}  # noqa: E731
variables = [tf.Variable(own), tf.Variable(own + 1)]
warmup = [0.05 / 2 * (1 + (i + 1) / 4) for i in range(4)] + [0.05] * 2
CASES = {
    "fit": (lambda: fitted(dense, **COMPILED), lambda: plainly(dense)),
    "fit eagerly": (lambda: fitted(dense), lambda: plainly(dense)),
    "as written then": (lambda: fitted(dense, experimental_run_tf_function=False), lambda: plainly(dense)),
    "sum": (lambda: fitted(dense, {"op": hvdt.Sum}), lambda: plainly(dense, lambda ranks: np.sum(ranks, 0))),
    **({"copied": (lambda: fitted(dense, None, copied), lambda: plainly(dense))} if KERAS_3 else {}),
    "of its configuration": (lambda: fitted(dense, None, of_its_configuration), lambda: plainly(dense)),
    "through horovod.tensorflow": (
        lambda: fitted(dense, {"op": hvdt.Sum}, hvdt.DistributedOptimizer),
        lambda: plainly(dense, lambda ranks: np.sum(ranks, 0)),
    ),
    "compression": (lambda: fitted(dense, {"compression": hvd.Compression.fp16}), lambda: plainly(dense)),
    "sparse": (lambda: fitted(sparse, **COMPILED), lambda: plainly(sparse)),
    "sparse as dense": (lambda: fitted(sparse, {"sparse_as_dense": True}), lambda: plainly(sparse)),
    "sparse in a group": (lambda: fitted(sparse, {"groups": 1}), lambda: plainly(sparse)),
    "passes": (lambda: fitted(dense, {"backward_passes_per_step": 2}, **COMPILED), lambda: plainly(dense, passes=2)),
    "averaged passes": (
        lambda: fitted(dense, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}),
        lambda: plainly(dense, passes=2, average=True),
    ),
    "groups": (lambda: fitted(dense, {"groups": 2}), lambda: plainly(dense)),
    "number of groups": (lambda: fitted(dense, {"num_groups": 9}), lambda: plainly(dense)),
    "lists of groups": (lambda: fitted(dense, first_group), lambda: plainly(dense)),
    "predivided": (lambda: fitted(dense, {"gradient_predivide_factor": 2.0}), lambda: plainly(dense)),
    "process set": (lambda: fitted(dense, {"process_set": hvdt.global_process_set}), lambda: plainly(dense)),
    "loss scale": (lambda: fitted(dense, wrap=scaled), lambda: plainly(dense)),
    "local variables": (
        lambda: fitted(lambda: dense(root=True), last, local_optimizer),
        lambda: plainly(dense, local=(2, 3)),
    ),
    "tape": (lambda: by_hand(lambda tape, model: hvdt.DistributedGradientTape(tape), False), lambda: plainly(dense)),
    "tape in a function": (
        lambda: by_hand(lambda tape, model: hvdt.DistributedGradientTape(tape, sparse_as_dense=True), True),
        lambda: plainly(dense),
    ),
    "tape with groups": (
        lambda: by_hand(
            lambda tape, model: hvdt.DistributedGradientTape(tape, groups=[model.trainable_variables[:3]]), True
        ),
        lambda: plainly(dense),
    ),
    "plain tape": (lambda: by_hand(lambda tape, _: tape, False, **MEAN), lambda: plainly(dense)),
    "plain tape in a function": (lambda: by_hand(lambda tape, _: tape, True, **MEAN), lambda: plainly(dense)),
    "plain tape predivided": (
        lambda: by_hand(lambda tape, _: tape, True, gradient_predivide_factor=2.0),
        lambda: plainly(dense),
    ),
    "plain tape and passes": (
        lambda: by_hand(lambda tape, _: tape, False, backward_passes_per_step=2),
        lambda: plainly(dense, passes=2),
    ),
    "tape and optimizer of sums": (
        lambda: by_hand(lambda tape, _: hvdt.DistributedGradientTape(tape, op=hvdt.Sum), True, op=hvdt.Sum),
        lambda: plainly(dense, lambda ranks: np.sum(ranks, 0)),
    ),
    "plain tape in a model": (lambda: fitted(OwnStep, **COMPILED), lambda: plainly(dense)),
    "built by its first batch": (unbuilt, lambda: [0.0] * 4),
    "partial tape": (
        lambda: by_hand(lambda tape, it: hvdt.PartialDistributedGradientTape(tape, local_layers=it.layers[-1]), True),
        lambda: plainly(dense, local=(2, 3)),
    ),
    **({"tape of one variable": (one_variable, lambda: [3.0, 6.0, 2.0, 4.0])} if KERAS_3 else {}),
    "numbered otherwise": (numbered_otherwise, lambda: plainly(dense)),
    "broadcast": (
        lambda: hvdt.broadcast_variables(variables, 0) or [v.numpy() for v in variables],
        lambda: [both[0], both[0] + 1],
    ),
    "objects": (lambda: [hvdt.broadcast_object(RANK, 1), *hvdt.allgather_object(RANK)], lambda: [1, 0, 1]),
    "allreduce": (lambda: hvd.allreduce(own).numpy(), lambda: np.mean(both, 0)),
    "allreduce of a number": (lambda: hvd.allreduce(float(RANK), op=hvdt.Sum).numpy(), lambda: 1.0),
    "allgather": (lambda: hvd.allgather(own).numpy(), lambda: np.concatenate(both)),
    "value of the root": (lambda: hvd.broadcast(own, 1).numpy(), lambda: both[1]),
    "reducescatter": (lambda: hvd.reducescatter(own).numpy(), lambda: np.mean(both, 0)[2 * RANK : 2 * RANK + 2]),
    "alltoall": (
        lambda: hvdt.alltoall(tf.constant(own)).numpy(),
        lambda: np.concatenate([each[2 * RANK : 2 * RANK + 2] for each in both]),
    ),
    "grouped": (
        lambda: [each.numpy() for each in hvdt.grouped_allreduce([tf.constant(own), tf.constant(own[:1])])],
        lambda: [np.mean(both, 0), np.mean(both, 0)[:1]],
    ),
    "metrics": (averaged_metric, lambda: [1.5, 0.5]),
    "warm-up": (lambda: scheduled(hvd.callbacks.LearningRateWarmupCallback, 0.05, warmup_epochs=2), lambda: warmup),
    "schedule": (
        lambda: scheduled(hvd.callbacks.LearningRateScheduleCallback, 0.1, 0.5, start_epoch=1),
        lambda: [0.05] * 2 + [0.1] * 2 + [0.05] * 2,
    ),
    "load_model": (loaded, lambda: plainly(dense)),
    "elastic state": (state, lambda: [*dense(root=True).get_weights(), np.float32(0)]),
    "batch norm": (batch_norm, batch_norm_plainly),
}


def flat(values):
    return np.concatenate(
        [np.ravel(np.asarray(each, "d")) for each in (values if isinstance(values, list) else [values])]
    )


if __name__ == "__main__":
    chosen = os.environ.get("CASES", "").split(",") if os.environ.get("CASES") else CASES
    results = {}
    for name in chosen:
        try:
            results[name] = [flat(values()).tolist() for values in CASES[name]]
        except Exception as error:
            results[name] = [f"{type(error).__name__}: {error}"[:600], "no error"]
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(results))
    hvd.shutdown()
