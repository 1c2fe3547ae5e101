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
    "two optimizers", "expanded", "lazy", "token counts", "recomputed", "too large", "frozen by key",
    "groups by key", "given weights", "class weights",
)  # fmt: skip
ONLY_LOOPS = {"two optimizers"}
"""Oddities for which a recipe has no key."""
REFUSED = {"expanded", "lazy"}
_ALONE = {"accumulated": {"counter", "average", "not persistent", "made later", "growing", "extra state", "norm"}}
_ALONE["accumulated"] |= {"norm used twice", "thawed", "in odd steps", "for some examples"}
_ALONE["too large"] = {*_ALONE["accumulated"], "norm in eval", "compiled"}
_ALONE["recomputed"] = {"compiled"}
_ALONE |= {key: {"groups"} for key in ("frozen by key", "groups by key")}  # which its optimizer makes by position
_ALONE["class weights"] = {"token counts", "several losses", "nested"}


def oddities(seed: int) -> set[str]:
    """The oddities of a program of odd_programs.py: the first seeds have one each, later ones up to four."""
    if seed < len(ODDITIES):
        return {ODDITIES[seed]}
    draw = random.Random(seed)
    found = set(draw.sample([each for each in ODDITIES if each not in REFUSED], draw.randint(2, 4)))
    return found - {each for each, others in _ALONE.items() if found & others}


def epochs_of(seed: int, epochs: int) -> int:
    """After how many of the epochs a program of odd_programs.py stops early: every third has patience for one less."""
    return epochs - 1 if seed % 3 == 1 else epochs


LOOP_ODDITIES = (
    "head, then body", "in turn", "thawed", "frozen for good", "zeroed", "new head", "new layer", "group added",
    "second optimizer", "module beside", "SAM", "Lookahead", "gathered", "by hand", "PCGrad", "two backwards", "GAN",
    "backward and by hand", "backward of inputs", "spike left out", "new weight", "left out", "loss times zero",
    "two loaders", "drawn by torch", "drawn by numpy", "drawn by random", "noise", "average", "patience", "center",
    "accumulated", "scaler", "clipped", "scheduler", "teacher", "penalty", "centralized", "drawn for nothing",
)  # fmt: skip
_APART = "LoopError: the ranks are not in the same step: rank 0 "
LOOP_REFUSED = {  # by oddity, how the line begins, on several ranks
    "by hand, not averaged": "ReplicaError: after step .*: the update used gradients that were not averaged",
    "a rank without backward": f"{_APART}calls backward.* number 1 in step .*; rank 1 calls no backward",
    "a rank with one more": f"{_APART}(begins|calls .* number 1 in) step .*; rank 1 calls backward.* number 2 in step ",
    "left out by one rank": f"{_APART}calls backward.* number 1 in step .*; rank 1 calls run.skip",
    "own noise": "ReplicaError: after step .* differ in weights: .*: the program draws random numbers after backward",
    "steps in backward": "LoopError: SGD makes its step inside of backward",
    "LBFGS": "LoopError: LBFGS keeps lists of steps, ",
}
_LOOPS_APART = (
    {"head, then body", "in turn", "thawed", "frozen for good", "GAN", "group added", "backward of inputs"},
    {
        *("SAM", "by hand", "PCGrad", "two backwards", "GAN", "accumulated", "scaler"),
        *("backward and by hand", "backward of inputs", "spike left out"),
    },
    {"new head", "new layer", "group added", "new weight", "average"},
    {"new head", "new layer", "group added", "new weight", "scheduler"},
    # Gradients of zero move a frozen parameter on by its momentum; a checkpoint has none.
    *({"zeroed", each} for each in ("head, then body", "in turn", "thawed", "frozen for good", "GAN", "group added")),
    {"SAM", "second optimizer"},
    {"scaler", "second optimizer"},
    {"scaler", "module beside"},
    {"accumulated", "gathered", "center"},
    {"left out", "center"},
    {"left out", "two loaders", "spike left out"},
)
_PLAIN = {"two loaders", "drawn by torch", "teacher"}
"""Oddities that may stand beside one that is refused."""


def loop_oddities(seed: int) -> set[str]:
    """The oddities of a program of odd_loops.py: the first seeds have one each, later ones up to four."""
    if seed < len(kinds := (*LOOP_ODDITIES, *LOOP_REFUSED)):
        return {kinds[seed]}
    found = drawn(seed, LOOP_ODDITIES, _LOOPS_APART, 4)
    return found if seed % 12 else found & _PLAIN | {random.Random(seed).choice([*LOOP_REFUSED])}
