"""Trains the network in one process: python before.py"""

import keras
from data import digits
from net import cnn

keras.utils.set_random_seed(0)
train, valid = digits()
model = cnn()
model.compile(
    optimizer=keras.optimizers.Adam(0.005),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(*train, batch_size=64, epochs=8, validation_data=valid, verbose=2)
model.save("cnn.keras")
