"""Keras's private members that hvdtrain.tensorflow and hvdtrain.keras need, refused by name where an installed release
has one no more. Those in modules that are also Horovod's are named there."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras.src import backend
from keras.src.saving import saving_lib

from hvdtrain import installed

TRIED = ("3.15.1",)
"""The releases of Keras that hvdtrain was tried with."""
member = functools.partial(installed.member, "keras", TRIED[-1])
replace = functools.partial(installed.replace, "keras", TRIED[-1])

mask_of, set_mask = member(backend, "get_keras_mask"), member(backend, "set_keras_mask")
"""Get and set the positions of a tensor that count, where layers mask some; else None."""


def layers(model: keras.Model) -> list[keras.Layer]:
    """The model and its layers, nested ones too."""
    return list(member(model, "_flatten_layers")())


class _Places(saving_lib.H5IOStore):  # type: ignore[misc]
    """Notes where Keras would write each variable."""

    def __init__(self) -> None:
        self.found, self._at = dict[str, Any](), ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_Places":
        self._at = f"{path}/vars" if path else "vars"
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        self.found[f"{self._at}/{key}"] = value


def places(model: keras.Model) -> dict[str, keras.Variable]:
    """The model's variables by their paths in a file of weights as Keras writes it."""
    noted = _Places()
    member(saving_lib, "_save_state")(model, noted, None, "", set())
    return {path: each for path, each in noted.found.items() if isinstance(each, keras.Variable)}


def adds_losses(model: keras.Model) -> bool:
    """Whether layers added losses of their own in the last call."""
    return any(member(layer, "_losses") for layer in layers(model))


def moment_axes(norm: keras.layers.BatchNormalization) -> Sequence[int]:
    """The axes over which the layer takes the moments."""
    return member(norm, "_reduction_axes")  # type: ignore[no-any-return]


def set_moments_class(norm: keras.layers.BatchNormalization, kind: type) -> None:
    """Makes the layer one of a subclass that overrides `_moments`."""
    member(norm, "_moments")
    norm.__class__ = kind


def is_scheduled(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the LR is a schedule's or a function's, and no variable."""
    return not isinstance(member(optimizer, "_learning_rate"), keras.Variable)


def trained(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables for which the optimizer was built."""
    return member(optimizer, "_trainable_variables")  # type: ignore[no-any-return]


def with_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """These, and their moving averages, in a built optimizer with use_ema."""
    return [*trained(optimizer), *member(optimizer, "_model_variables_moving_average")]


def accumulated(optimizer: keras.optimizers.Optimizer) -> Sequence[keras.Variable]:
    """The gradients that a built optimizer has added up since its last update."""
    return member(optimizer, "_accumulated_gradients") if optimizer.gradient_accumulation_steps else ()


def swap(callback: keras.callbacks.SwapEMAWeights) -> None:
    """Swaps the model's weights and their averages."""
    member(callback, "_swap_variables")()


def writers(callback: keras.callbacks.TensorBoard) -> dict[str, Any]:
    """The open writers of event files, by name."""
    return member(callback, "_writers")  # type: ignore[no-any-return]


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch at which a `fit` that resumes begins; None for that of its argument."""
    return member(model, "_initial_epoch")  # type: ignore[no-any-return]


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the epoch at which `fit` begins."""
    replace(model, "_initial_epoch", epoch)


def strategy(model: keras.Model) -> Any:
    """The strategy of tf.distribute under which the model was made; None outside of any."""
    return member(model, "_distribute_strategy")


def compiled_loss(model: keras.Model) -> Any:
    """What computes the losses since the last compile; None without any."""
    return member(model, "_compile_loss")


def loss_names(model: keras.Model) -> list[str]:
    """The names of the losses of the last call: the compiled ones, and add_loss for those that layers added."""
    compiled = compiled_loss(model)
    names = [each.loss.name for each in (compiled and member(compiled, "_flat_losses")) or ()]
    return [*names, *["add_loss"] * adds_losses(model)]


def loss_of(model: keras.Model, x: Any, y: Any, weights: Any) -> Any:
    """The loss of a batch in inference."""
    y_pred = model(x, training=False) if member(model, "_call_has_training_arg") else model(x)
    return member(model, "_compute_loss")(x, y, y_pred, weights, training=False)


def loss_tracker(model: keras.Model) -> Any:
    """The mean of the loss that `fit` logs; None before a compile."""
    return member(model, "_loss_tracker")


def compiled_metrics(model: keras.Model) -> Any:
    """What updates the metrics since the last compile; None without any."""
    return member(model, "_compile_metrics")


def given_metrics(compiled: Any) -> list[Any]:
    """What the program gave `compile` as metrics, from what `compiled_metrics` returned."""
    names = ("_user_metrics", "_user_weighted_metrics") if compiled else ()
    return keras.tree.flatten([member(compiled, name) for name in names])  # type: ignore[no-any-return]


def inner_parts(metric: keras.metrics.Metric) -> list[Any]:
    """What tracks the metric's variables, and the metrics inside it."""
    return [member(metric, "_tracker"), *member(metric, "_metrics")]


def wrapped(metric: keras.metrics.Metric) -> list[Any]:
    """The function of which the metric is the mean, where it is one of a function."""
    return [member(metric, "_fn")] if isinstance(metric, keras.metrics.MeanMetricWrapper) else []
