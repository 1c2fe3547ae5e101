"""TensorFlow's own failure, without hvdtrain: what XLA compiles cannot use a variable on another device.

`python tensorflow_distribute_xla.py` ends with InvalidArgumentError in TensorFlow 2.21; engines central and
parameter-server therefore refuse --xla.
"""

import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.experimental.CentralStorageStrategy(["/CPU:0", "/CPU:1"])
with strategy.scope():
    weight = tf.Variable(1.0)


@tf.function(jit_compile=True)
def gradient() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = weight * weight
    return tape.gradient(loss, weight)


def replica() -> None:
    gradient()


@tf.function
def step() -> None:
    strategy.run(replica)


if __name__ == "__main__":
    step()
