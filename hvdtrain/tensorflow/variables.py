"""Changes to variables inside a graph, on the calling replica alone: under tf.distribute it has its own of each, and
a variable's own `assign` would require an aggregation first."""

import tensorflow as tf


def put(variable: tf.Variable, value: tf.Tensor) -> None:
    """variable = value"""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def add(variable: tf.Variable, value: tf.Tensor) -> None:
    """variable += value"""
    tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)


def subtract(variable: tf.Variable, value: tf.Tensor) -> None:
    """variable -= value"""
    tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=value)
