"""Horovod's callbacks and load_model for Keras 3, by Horovod's names and arguments.

The build puts a copy of this module into Horovod, as horovod/_keras/horovod_names.py: see tools/build/patching.py.
"""

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType, TracebackType
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from hvdtrain.errors import KerasError
from hvdtrain.keras.averaging import Reduction, distribute, elastic, tf_variable
from hvdtrain.tensorflow.engines.horovod import hvd

OF_KERAS_2 = re.compile(
    r"reset_states|fit_generator|set_session|optimizers\.legacy|input_length|KerasTensor cannot be used as input"
    r"|not recognized: \{'(lr|decay)'|attribute '(lr|_decay|ref)'|Unrecognized keyword arguments"
    r"|got an unexpected keyword argument '?batch_input_shape|filepath provided must end in"
    r"|'numpy\.float64' object cannot be interpreted as an integer|Cannot convert '.*' to a shape"
)
"""Messages of Keras 3, and of Python inside it, for what Keras 2 took."""
NAMES = re.compile(r"(tensorflow\.(python\.)?)?keras(\.|$)")
ENVIRONMENT = f"pip install --no-deps 'tf_keras~={tf.__version__.rpartition('.')[0]}.0' && export TF_USE_LEGACY_KERAS=1"
KERAS_2 = (
    "hvdtrain: this program may be written for Keras 2, which TensorFlow has replaced by Keras 3; it runs after: "
    f"{ENVIRONMENT}",
    ", and with this first line, as it imports keras: import sys, tf_keras; sys.modules['keras'] = tf_keras",
)
"""How a program of Keras 2 runs, and what one that imports keras needs besides."""
TENSORFLOW_1 = (
    f"hvdtrain: this program is written for TensorFlow 1; it may run after: {ENVIRONMENT}, and with this first line: "
    "import sys, horovod.tensorflow, tensorflow.compat.v1 as tf; tf.disable_v2_behavior(); "
    "sys.modules['tensorflow'] = tf",
    "; from tf_keras.api._v1 import keras; sys.modules['keras'] = keras",
)

LEADS = (keras.optimizers.SGD, keras.optimizers.RMSprop)
"""Optimizers whose momentum slots hold updates, in which the LR is a factor."""


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root's weights and optimizer state before the first step, and after it those that only its
    batch has built. The weights of `local_variables` stay each rank's own."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._local = {
            id(tf_variable(each)) for each in tf.nest.flatten([] if local_variables is None else local_variables)
        }
        self._sent: keras.Model | None = None

    @property
    def broadcast_done(self) -> bool:
        return self._sent is not None and self._sent is self.model

    def register_local_var(self, variable: Any) -> None:
        self._local.add(id(tf_variable(variable)))

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if (hvd.size() > 1 or elastic()) and model.jit_compile:
            if not model._resolve_auto_jit_compile():
                warnings.warn("XLA cannot compile Horovod's collectives: jit_compile is turned off", stacklevel=2)
            model.jit_compile, model.train_function = False, None

    def on_train_begin(self, logs: Any = None) -> None:
        # A model that was given build(shape) is called built, and its layers are not.
        self._broadcast(all(layer.built for layer in self.model._flatten_layers()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast(True)

    def _broadcast(self, whole: bool) -> None:
        if self.broadcast_done:
            return
        optimizer = self.model.optimizer
        if whole and self.model.built and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.weights, *optimizer.variables]
        with tf.device(self.device):
            hvd.broadcast_variables(
                [each.value for each in variables if id(each.value) not in self._local], root_rank=self.root_rank
            )
        self._sent = self.model if whole else None


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the LR to `initial_lr * multiplier(epoch)` from `start_epoch` to before `end_epoch`: at each epoch's first
    batch, or without `staircase` at each batch, whose epoch is a fraction then.

    A `multiplier` that is a number is raised to the power of the epochs since the first. `momentum_correction` scales
    the momentum of SGD and RMSprop with the LR, as in Goyal et al. 2017, arXiv:1706.02677, section 3.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise KerasError("initial_lr is required: give the LR that the schedule multiplies.")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise KerasError(
                f"{type(self).__name__} needs steps_per_epoch where Keras does not know an epoch's length."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended or (self.staircase and batch):
            return
        self._set_lr(self.current_epoch + (0 if self.staircase else batch / (self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set_lr(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and old not in (0, new) and isinstance(inner, LEADS) and inner.momentum:
            for slot in getattr(inner, "momentums", None) or getattr(inner, "_momentums", []):
                slot.assign(slot.value * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the LR with every batch of the first epochs from initial_lr / ranks to `initial_lr` (Goyal et al. 2017,
    arXiv:1706.02677)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr, self._of_ranks, 0, warmup_epochs, False, momentum_correction, steps_per_epoch=steps_per_epoch
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def _of_ranks(self, epoch: float) -> float:
        done = (epoch + 1 / (self.steps_per_epoch or 1)) / self.warmup_epochs
        return (1 + (hvd.size() - 1) * done) / hvd.size()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and hvd.rank() == 0:
            lr = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint with save_best_only, whose `filepath` is set before the training. Raises KerasError."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        some = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(some, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.filepath:
            raise KerasError("BestModelCheckpoint has no filepath: set it before fit, to one that ends in .keras.")


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """A saved model, with the state of its optimizer, which averages over the ranks from now on. `legacy_opts` changes
    nothing: Keras 3 has no legacy optimizers."""
    known = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer:
        distribute(model.optimizer, Reduction(compression=compression))
    return model


_compile = Trainer.compile


@functools.wraps(_compile)
def _compile_of_then(model: keras.Model, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("experimental_run_tf_function", None)  # Horovod's examples give it, Keras 3 does not know it
    _compile(model, *args, **kwargs)


Trainer.compile = _compile_of_then


def of_keras_2(error: BaseException) -> bool:
    """Whether the program asked for something that Keras 2 has, and Keras 3 probably not."""
    if isinstance(error, ImportError) and NAMES.match(error.name or ""):
        return True
    if isinstance(error, AttributeError):
        owner = error.obj.__name__ if isinstance(error.obj, ModuleType) else type(error.obj).__module__
        if NAMES.match(owner):
            return True
    if called := re.match(r"(\w+)\.\w+\(\) got an unexpected keyword argument", str(error)):
        return any(
            hasattr(module, called[1]) for name, module in [*sys.modules.items()] if name.startswith("keras.src")
        )
    return bool(OF_KERAS_2.search(str(error)))


def advice(error: BaseException) -> str:
    """How the program runs that has ended by `error`, where it asked for what TensorFlow 1 or Keras 2 had; else ""."""
    of_1 = isinstance(error, AttributeError) and error.name in dir(tf.compat.v1) and error.obj is tf
    if not of_1 and not of_keras_2(error):
        return ""
    road, where_it_imports_keras = TENSORFLOW_1 if of_1 else KERAS_2
    return road + (where_it_imports_keras if "horovod.keras" in sys.modules else "")


def advise_at_failure() -> None:
    """From now on a program that ends by what TensorFlow 2 or Keras 3 no longer has prints how it runs."""
    print_traceback = sys.excepthook
    if print_traceback.__name__ == "advise":
        return

    def advise(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        print_traceback(kind, error, traceback)
        if how := advice(error):
            print(how, file=sys.stderr, flush=True)

    sys.excepthook = advise
