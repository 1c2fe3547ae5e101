"""What Keras's gpt computes of a batch, by TensorFlow alone: `python tensorflow_gpt.py FOLDER`, which holds cases.json
and the batch, and gets NAME.npz with the losses, the gradients and the first weights of each case."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")

import numpy as np
import tensorflow as tf

from hvdtrain.core import recipe
from hvdtrain.datasets import TextData
from hvdtrain.tensorflow import models, state
from hvdtrain.tensorflow.engines import Engine
from hvdtrain.tensorflow.objective import Objective

folder = Path(sys.argv[1])
batch = [tf.constant(each) for each in np.load(folder / "batch.npz").values()]
for name, (keys, vocabulary) in json.loads((folder / "cases.json").read_text()).items():
    chosen, engine = recipe.load("text", keys), Engine("/CPU:0")
    text = TextData(vocabulary, vocabulary - 1)
    dataset = SimpleNamespace(text=text, classes=vocabulary, train=None)
    model = models.build(chosen, dataset, engine)
    with tf.GradientTape() as tape:
        loss, seen = Objective(chosen, dataset, engine).measure(model, batch, training=True)
    total, count = seen.metrics["loss"]
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
    names = [weight.path.replace("/", ".") for weight in model.trainable_weights]
    found = {f"gradient.{each}": tf.convert_to_tensor(of).numpy() for each, of in zip(names, gradients, strict=True)}
    held = {each: of.numpy() for each, of in state.of_model(model).items()}
    np.savez(folder / f"{name}.npz", **found, **held, loss=total.numpy(), count=count.numpy())
