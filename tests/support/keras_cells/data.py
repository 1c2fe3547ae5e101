"""The same numbers as arrays, as a PyDataset and as a random-access source; and data sets that cannot be read."""

import math
import random
import sqlite3

import keras
import numpy as np

TRAIN, VALID = 64, 20


def _numbers(count, seed):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 12, 6))
    return x, (np.abs(x).mean((1, 2)) * 40).astype(np.int64) % 3


def arrays(train=TRAIN, valid=VALID):
    return _numbers(train, 0), _numbers(valid, 1)


def labelled(train=0, valid=0):
    """`arrays` with these numbers added to the labels, which are 0 to 2."""
    (x, y), (of_valid, labels) = arrays()
    return (x, y + train), (of_valid, labels + valid)


class Source:
    """Samples by index, as grain's and array_record's sources have them."""

    def __init__(self, count, seed, noise=0.0, form=lambda x, y: (x, y)):
        self.x, self.y = _numbers(count, seed)
        self.noise, self.form = noise, form

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = self.noise * (np.random.normal(size=6) + random.random())
        return self.form((self.x[index] + noise).astype(np.float32), int(self.y[index]))


def source(noise=0.1):
    return Source(TRAIN, 0, noise), Source(VALID, 1)


def dicts():
    def form(x, y):
        return {"points": x, "scale": x[0, :2]}, y

    return Source(TRAIN, 0, 0.1, form), Source(VALID, 1, 0.0, form)


def tokens():
    def split(count):
        x = np.random.default_rng(count).integers(0, 20, (count, 5), np.int32)
        return {"tokens": x, "label": x.sum(1) % 3}

    return split(TRAIN), split(VALID)


def sequences():
    """Tokens of which more and more are 0, with a class for each."""

    def split(count):
        x = np.random.default_rng(count).integers(1, 12, (count, 7), np.int32)
        x *= np.arange(7) < np.linspace(0, 8, count)[:, None]
        return x, (x % 3).astype(np.int64)

    return split(TRAIN), split(VALID)


class Items(keras.utils.PyDataset):
    """Batches of five rows, the last of fewer, with noise of their own."""

    def __init__(self, count, seed, rows=5):
        super().__init__()
        self.x, self.y = _numbers(count, seed)
        self.rows = rows

    def __len__(self):
        return math.ceil(len(self.x) / self.rows)

    def __getitem__(self, index):
        rows = slice(index * self.rows, (index + 1) * self.rows)
        return self.x[rows] + 0.1 * np.random.normal(size=self.x[rows].shape), self.y[rows]


def items(rows=5):
    return Items(TRAIN, 0, rows), Items(VALID, 1, rows)


class Called(Items):
    """Prints when an epoch begins and ends."""

    epoch = 0

    def on_epoch_begin(self):
        self.epoch += 1
        print("epoch begins", self.epoch)

    def on_epoch_end(self):
        print("epoch ends", self.epoch)


def called():
    return Called(TRAIN, 0), Items(VALID, 1)


def empty():
    return [], []


def one():
    return arrays()[0][0]


def iterated():
    import tensorflow as tf

    return tf.data.Dataset, iter(())


def unequal():
    return (np.zeros((5, 2)), np.zeros(4)), arrays()[1]


def ragged():
    x = np.empty(5, object)
    x[:] = [np.zeros(length) for length in range(5)]
    return (x, np.zeros(5)), arrays()[1]


def shapes():
    samples = [(np.zeros((12, 6 + (index == 27))), 0) for index in range(TRAIN)]
    return samples, samples


def uneven():
    class Uneven(Items):
        def __getitem__(self, index):
            return tuple(part[: 2 + index % 2] for part in super().__getitem__(index))

    return Uneven(TRAIN, 0, 4), Uneven(VALID, 1, 4)


def restless():
    own = np.random.default_rng(0)
    return Source(TRAIN, 0, 0.0, lambda x, y: (x + own.normal(), y)), Source(VALID, 1)


def triples():
    return Source(TRAIN, 0, 0.0, lambda x, y: (x, y, y)), Source(VALID, 1)


def texts():
    return [(np.zeros((12, 6)), None)] * TRAIN, [(np.zeros((12, 6)), None)] * VALID


def named():
    x, y = arrays()[0]
    return [(x, np.array(["round", "long"])[y % 2])] * 2


def infinite():
    train, valid = arrays()
    train[0][5] = np.inf
    return train, valid


def database():
    rows = sqlite3.connect(":memory:")
    return Source(TRAIN, 0, 0.0, lambda x, y: (x, rows.execute("select ?", [y]).fetchone()[0])), Source(VALID, 1)


def damaged():
    class Damaged(Source):
        def __getitem__(self, index):
            raise OSError(f"no file {index}")

    return Damaged(TRAIN, 0), Damaged(VALID, 1)
