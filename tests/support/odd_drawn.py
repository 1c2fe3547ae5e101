"""Which oddities a seed's program has."""

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
