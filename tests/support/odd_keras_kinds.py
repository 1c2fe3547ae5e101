"""What is odd in the programs of odd_keras.py, by seed; without Keras, whose import takes seconds."""

import random

ODDITIES = (
    "tied", "frozen", "never used", "embedding", "norm", "norm in inference", "constraint", "regularizer", "added loss",
    "sample weights", "two outputs", "nested", "counter", "average", "train_step", "subclass", "float32", "recurrent",
    "scalar", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "accumulated", "scheduled", "excluded from decay",
    "plain sgd",
)  # fmt: skip
REFUSED = {"train_step": "train_step", "accumulated": "gradient_accumulation_steps", "scheduled": "an LR schedule"}
REFUSED |= {"use_ema": "use_ema"}
"""By a recipe, which has keys of its own: what it names."""
SPARSE = "embedding"
"""A recipe adds up a row's gradients; Keras's optimizers take the square of each."""


def oddities(seed: int) -> set[str]:
    """Of that program: the first seeds have one each, later ones up to four."""
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
