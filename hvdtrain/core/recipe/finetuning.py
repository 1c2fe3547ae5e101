"""The keys of fine-tuning: the weights that a run starts from, and which of them learn, and how fast."""

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from hvdtrain.core.values import Number, Paths, Text, check_name
from hvdtrain.core.wording import counted, nearest
from hvdtrain.errors import RecipeError
from hvdtrain.untrusted import printable, quoted

Patterns = Annotated[tuple[Text, ...], Field(strict=False, max_length=100)]
Scales = Annotated[dict[Text, Annotated[float, Field(strict=True, gt=0, le=1e6)]], Field(max_length=100)]
BEST, LAST = ":best", ":last"
"""What follows a run folder's path where its best checkpoint is meant, or its newest, as it is without."""
MOST_SHOWN = 12


class FineTuning(BaseModel):
    """What of a network is given, and what of it learns."""

    init_from: Text | None = Field(
        None,
        description="weights to start from: a run or a checkpoint; .safetensors; PyTorch: .pt, .pth, and from their "
        "caches torchvision:NAME, timm:NAME; TensorFlow: .keras, .weights.h5",
    )
    init_rename: Paths = Field({}, description="init_from: names there and names here, as encoder=backbone")
    init_skip: Patterns = Field((), description="init_from: patterns of what is not taken, as a new head: fc")
    freeze: Patterns = Field(
        (), description="patterns of parameters that do not learn, as conv1 layer1, or all but one: '*' '!fc'"
    )
    freeze_until_epoch: Number | None = Field(None, description="freeze: for so many epochs; left out: to the end")
    lr_scale: Scales = Field({}, description="factors of the LR by patterns of parameters, as layer1=0.1")
    no_weight_decay: Patterns = Field(
        (), description="patterns of parameters without weight decay; the words bias and norm stand for all such ones"
    )


class Part(NamedTuple):
    """How a parameter learns."""

    is_frozen: bool = False
    """Whether it does not learn, until `freeze_until_epoch` or at all."""
    lr_scale: float = 1.0
    has_decay: bool = True


def check(r: Any) -> None:
    """Raises RecipeError where keys do not go together."""
    check_name(r.init_from or "")
    until, is_own = r.freeze_until_epoch, ":" in r.optimizer  # which may have a weight decay by itself
    has_decay = is_own or r.weight_decay or r.optimizer_args.get("weight_decay")
    rules = {
        "init_rename and init_skip go with init_from, which is not given; drop them, or name the weights": (
            (r.init_rename or r.init_skip) and not r.init_from
        ),
        "freeze_until_epoch goes with freeze, which is not given; drop it, or freeze something": until and not r.freeze,
        f"freeze_until_epoch must be less than epochs={r.epochs}, got {until}; left out, it is to the end": (
            until and until >= r.epochs
        ),
        "freeze_until_epoch changes what compile and reduction adasum work on; drop one": (
            until and (r.compile or r.reduction == "adasum")
        ),
        "no_weight_decay needs a weight_decay above 0, got none; drop it": r.no_weight_decay and not has_decay,
    }
    for text, is_broken in rules.items():
        if is_broken:
            raise RecipeError(f"{text}.")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern, as of a shell, means the parameter or a module that it is in; a leading ! is left out."""
    pattern = pattern.removeprefix("!")
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def chosen(key: str, patterns: Iterable[str], names: Collection[str], words: Mapping[str, Collection[str]]) -> set[str]:
    """The names that the patterns of a recipe's `key` mean: !PATTERN takes back what was chosen before it. `words` are
    patterns of their own. Raises RecipeError, with the nearest name, for one that means none, unless `key` is ""."""
    found: set[str] = set()
    for pattern in patterns:
        meant = set(words[pattern]) if pattern in words else {name for name in names if matches(pattern, name)}
        if not meant and key:
            modules = dict.fromkeys(".".join(name.split(".")[:end]) for end in (1, 2, 3, 4) for name in names)
            near = nearest(pattern.strip("!*."), list(modules))
            listed = printable(", ".join([*modules][:MOST_SHOWN]), 300)
            shown = "" if near else f" There are {listed}{', and more' * (len(modules) > MOST_SHOWN)}."
            raise RecipeError(f"{key} {quoted(pattern)} matches no name.{near or shown}")
        found = found - meant if pattern.startswith("!") else found | meant
    return found


def parts(r: Any, names: Collection[str], norms: Collection[str]) -> dict[str, Part]:
    """How each of a network's parameters learns, in their order; `norms`: those of its norm layers. Raises RecipeError
    for a pattern that matches none, and where all are frozen for good."""
    frozen = chosen("freeze", r.freeze, names, {})
    words = {"bias": [name for name in names if name.endswith("bias")], "norm": norms}
    plain = chosen("no_weight_decay", r.no_weight_decay, names, words)
    scales = {name: each for pattern, each in r.lr_scale.items() for name in chosen("lr_scale", [pattern], names, {})}
    if len(frozen) == len(names):
        raise RecipeError(f"freeze {quoted(list(r.freeze))} leaves nothing to learn; leave out the head, as by '!fc'.")
    for_good = Part(is_frozen=True)
    found = {name: Part(name in frozen, scales.get(name, 1.0), name not in plain) for name in names}
    return {name: for_good if each.is_frozen and not r.freeze_until_epoch else each for name, each in found.items()}


def frozen_modules(r: Any, modules: Collection[str], leaves: Collection[str]) -> set[str]:
    """Those norm layers of the network, by name, of which `freeze` means both parameters, which have the names
    `leaves` in them."""
    frozen = chosen("", r.freeze, [f"{module}.{leaf}" for module in modules for leaf in leaves], {})
    return {module for module in modules if all(f"{module}.{leaf}" in frozen for leaf in leaves)}


def lines(r: Any, found: Mapping[str, Part], sizes: Mapping[str, int]) -> list[str]:
    """A plan's lines on the weights that a run starts from, and on the parts of its network that learn apart."""
    skipped = f" without {printable(', '.join(r.init_skip), 200)}" if r.init_skip else ""
    starts = [f"init        the weights of {r.init_from}{skipped}; a run that resumes has its checkpoint's"]
    groups: dict[Part, int] = {}
    for name, part in found.items():
        groups[part] = groups.get(part, 0) + sizes[name]
    until = f", for {counted(r.freeze_until_epoch, 'epoch')}" if r.freeze_until_epoch else ""
    texts = []
    for (is_frozen, scale, has_decay), size in groups.items():
        how = [f"frozen, BatchNorm's statistics too{until}"] * is_frozen
        how += [f"LR x{scale:g}"] * bool(until or not is_frozen) + ["no weight decay"] * (not has_decay)
        texts.append(f"{size:,} {', '.join(how)}")
    has_parts = r.freeze or r.lr_scale or r.no_weight_decay
    return starts * bool(r.init_from) + [f"groups      of parameters: {'; '.join(texts)}"] * bool(has_parts and texts)
