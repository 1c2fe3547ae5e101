"""The oddities of the program that a seed stands for, without any framework."""

import random
from collections.abc import Sequence


def drawn(seed: int, kinds: Sequence[str], apart: Sequence[set[str]], most: int) -> set[str]:
    """One each for the first seeds, three to `most` for later ones; of each set in `apart` at most one."""
    if seed < len(kinds):
        return {kinds[seed]}
    draw = random.Random(seed)
    found = draw.sample(kinds, draw.randint(3, most))
    for group in apart:
        others = [each for each in found if each in group][1:]
        found = [each for each in found if each not in others]
    return set(found)


ODDITIES = (
    "view", "transposed", "tied", "overlap", "scalar", "empty", "conj", "complex", "bfloat16", "float32",
    "channels last", "frozen", "under no_grad", "never used", "in odd steps", "for some examples", "norm",
    "norm used twice", "norm in eval", "counter", "average", "not persistent", "made later", "growing", "extra state",
    "checkpointed", "several losses", "groups", "accumulated", "clipped", "thawed", "compiled", "nested", "averaged",
    "two optimizers", "expanded", "lazy", "token counts",
)  # fmt: skip
ONLY_LOOPS = {"two optimizers"}
"""Oddities for which a recipe has no key."""
REFUSED = {"expanded", "lazy"}
_ALONE = {"accumulated": {"counter", "average", "not persistent", "made later", "growing", "extra state", "norm"}}
_ALONE["accumulated"] |= {"norm used twice", "thawed", "in odd steps", "for some examples"}


def oddities(seed: int) -> set[str]:
    """The oddities of a program of odd_programs.py: the first seeds have one each, later ones up to four."""
    if seed < len(ODDITIES):
        return {ODDITIES[seed]}
    draw = random.Random(seed)
    found = set(draw.sample([each for each in ODDITIES if each not in REFUSED], draw.randint(2, 4)))
    return found - {"accumulated"} if found & _ALONE["accumulated"] else found
