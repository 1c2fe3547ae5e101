"""What is odd in the programs of odd_keras.py and odd_keras_fits.py, by seed; without Keras, which loads slowly."""

import random

from odd_drawn import drawn

ODDITIES = (
    "tied", "frozen", "never used", "embedding", "norm", "norm in inference", "constraint", "regularizer", "added loss",
    "sample weights", "two outputs", "nested", "counter", "average", "train_step", "subclass", "float32", "recurrent",
    "scalar", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "accumulated", "scheduled", "excluded from decay",
    "plain sgd", "frozen by key", "no decay by key", "given weights",
)  # fmt: skip
REFUSED = {"train_step": "train_step", "accumulated": "gradient_accumulation_steps", "scheduled": "an LR schedule"}
REFUSED |= {"use_ema": "use_ema"}
"""Oddities that a recipe refuses, as its message names them."""
SPARSE = "embedding"
"""A recipe adds up a row's gradients; Keras's optimizers take the square of each."""


def oddities(seed: int) -> set[str]:
    """The oddities of that program: the first seeds have one each, later ones up to four."""
    if seed < len(ODDITIES):
        return {ODDITIES[seed]}
    draw = random.Random(seed)
    found = set(draw.sample(ODDITIES, draw.randint(2, 4)))
    if {"train_step", "subclass"} <= found:
        found.remove("subclass")
    if found & {"clipnorm", "clipvalue", "global_clipnorm"}:  # of which Keras takes one
        found -= {"clipvalue", "global_clipnorm"}
        found.add("clipnorm")
    return found - {"plain sgd"} if "float32" in found else found  # named optimizers know one type


CALLBACKS = (
    "SwapEMAWeights", "SwapEMAWeights in epochs", "EarlyStopping", "EarlyStopping restoring", "ReduceLROnPlateau",
    "LearningRateScheduler", "ModelCheckpoint", "TerminateOnNaN", "CSVLogger", "LambdaCallback",
)  # fmt: skip
OTHERS = ("BackupAndRestore", "History", "ProgbarLogger", "RemoteMonitor")
"""Keras's other callbacks, except OrbaxCheckpoint and TensorBoard, which need other packages."""
OWN_METRICS = ("own value", "own dictionary", "own maximum", "own minimum", "own array", "own variable")
FITS = (
    *CALLBACKS, "masking", "zero masked", "summed", "class weights", "sample weights", "two optimizers",
    "synchronized norm", "adapted", "dropout", "weighted metrics", "validation", "validation weights", "initial epoch",
    "constraint", "global_clipnorm", "accumulated", "averaged last", "evaluated",
    *OTHERS, *OWN_METRICS, "own callbacks", "own loss", "mean by weights", "ignored class", "steps per epoch",
    "not shuffled", "validation steps", "predicted", "by index",
)  # fmt: skip
"""The oddities of odd_keras_fits.py."""
UNRESUMED = {"BackupAndRestore": "BackupAndRestore and FaultTolerance would both resume the training"}
"""Oddities that FaultTolerance refuses, with the message."""
OF_RANK = {"dropout"}
"""Oddities whose results depend on the number of ranks."""
MONITORS = (
    "EarlyStopping",
    "EarlyStopping restoring",
    "ReduceLROnPlateau",
    "ModelCheckpoint",
    "LambdaCallback",
    "History",
    "own callbacks",
)
APART = (
    {"masking", "zero masked", "class weights"},
    {"masking", "zero masked", "adapted"},
    {"SwapEMAWeights", "SwapEMAWeights in epochs"},
    {"EarlyStopping", "EarlyStopping restoring"},
    {"ReduceLROnPlateau", "LearningRateScheduler"},
    {"sample weights", "class weights"},
    {"two optimizers", "accumulated"},
    {"masking", "zero masked", "ignored class"},
    {"class weights", "ignored class", "own loss"},
    {"summed", "mean by weights"},
    {"validation", "validation weights", "validation steps", "own variable"},  # whose log plain Keras has from evaluate
    *({"averaged last", each} for each in MONITORS),  # which would read one rank's numbers
)
"""Sets of oddities of which a program has at most one."""


def fits(seed: int) -> set[str]:
    """The oddities of that program."""
    return drawn(seed, FITS, APART, most=7)
