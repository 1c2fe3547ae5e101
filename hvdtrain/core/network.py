"""What a plan must know of a network: its parameters, its FLOPs, and whether it has BatchNorm."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.datasets import Dataset

RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
"""The number of bottlenecks in each stage: He et al. 2016, arXiv:1512.03385, table 1. As in torchvision, no convolution
has a bias."""
Shape = tuple[int, ...]
KERNEL = {"weight": "kernel", "bias": "bias"}
NORM = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
"""TensorFlow's names of a layer's tensors, and of a BatchNorm's, by PyTorch's."""
ALONE = "linear"
"""TensorFlow's name of the layer that is PyTorch's whole model and has no name there."""
NORM_LEAVES = {"torch": ("weight", "bias"), "tensorflow": ("gamma", "beta")}
EXAMPLES = 2
"""How many examples a framework counts FLOPs with; of one, BatchNorm may have no variance."""


@dataclass(frozen=True)
class Network:
    """What a plan must know of a recipe's network."""

    parameters: int
    """The number of trainable parameters."""
    has_batch_norm: bool
    flops: int | None = None
    """FLOPs of one example's forward pass in training; a multiply-add is 2. None where they were not counted."""
    has_dropout: bool = False
    """Whether its layers draw random numbers in training."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The number of numbers in each parameter, by its name in the framework; 0 in one that never learns."""
    norms: Collection[str] = ()
    """The names of the parameters of norm layers."""
    batch_norms: Collection[str] = ()
    """The names of the BatchNorm layers."""


def curve_line(size: int, norms: Sequence[str], remedy: str, has_dropout: bool) -> str:
    """Why the curve is not the same on another number of ranks, and what makes it equal; "" where nothing is known.

    `norms` names the BatchNorm layers that normalise by their rank's examples, "" for any; the `remedy` is theirs.
    """
    why = []
    if norms:
        named = f" ({norms[0]}{f' and {len(norms) - 1} more' if norms[1:] else ''})" if norms[0] else ""
        why.append(f"BatchNorm{named} normalises by each rank's part of the batch ({remedy} makes it equal)")
    if has_dropout:
        why.append("dropout draws its random numbers on each rank (a model without it makes it equal)")
    return f"depends on the number of ranks: {'; '.join(why)}" if why and size > 1 else ""


def other_types(precision: str, products: Sequence[str], remedy: str) -> list[str]:
    """A line of the log on matrix products and convolutions of other types than the precision's, if there are any."""
    others = [each for each in products if each != precision]
    what = f"{len(others)} of {len(products)} matrix products and convolutions, {' and '.join(sorted(set(others)))}"
    return [f"precision {precision} does not hold for {what} by the model's own types; {remedy}"] * bool(others)


def counted_examples(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The request for the training examples with which a framework counts FLOPs, all with the same draws."""
    return np.arange(EXAMPLES) % len(dataset.train), np.zeros((EXAMPLES, dataset.draws), np.float32)


def resnet_flops(model: str, stem: str, side: int, classes: int) -> int:
    """FLOPs of one image's forward pass through convolutions and classifier; `side` is the image's, in pixels."""
    convolutions = [(shape, out) for _, _, shape, out in _convolutions(model, stem, side)]
    features = convolutions[-1][0][0]
    return 2 * (sum(math.prod(shape) * out**2 for shape, out in convolutions) + features * classes)


def weights(model: str, classes: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The shapes of a network's trained weights and of its BatchNorm statistics, by their names in PyTorch. `model` is
    one of MODELS."""
    if model == "linear":
        return {"weight": (1, 1), "bias": (1,)}, {}
    trained, statistics, shape = dict[str, Shape](), dict[str, Shape](), Shape()
    for convolution, norm, shape, _ in _convolutions(model):
        trained |= {f"{convolution}.weight": shape, f"{norm}.weight": shape[:1], f"{norm}.bias": shape[:1]}
        statistics |= {f"{norm}.running_mean": shape[:1], f"{norm}.running_var": shape[:1]}
        statistics[f"{norm}.num_batches_tracked"] = ()
    return trained | {"fc.weight": (classes, shape[0]), "fc.bias": (classes,)}, statistics


def named(model: str, classes: int, framework: str) -> Network:
    """The network with its parameters by their names in the framework. `model` is one of MODELS."""
    trained, statistics = weights(model, classes)
    batch_norms = {name.rpartition(".")[0] for name in statistics}

    def of(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        table = NORM if module in batch_norms else KERNEL
        return name if framework == "torch" else f"{module or ALONE}.{table[leaf]}"

    norms = {of(name) for name in trained if name.rpartition(".")[0] in batch_norms}
    sizes = {of(name): math.prod(shape) for name, shape in trained.items()}
    return Network(sum(sizes.values()), bool(norms), sizes=sizes, norms=norms, batch_norms=batch_norms)


def _convolutions(model: str, stem: str = "imagenet", side: int = 0) -> Iterator[tuple[str, str, Shape, int]]:
    """The convolutions of a ResNet: each one's name, the name of the BatchNorm after it, its shape [out, in, height,
    width], and the side of its output for images of that `side`, in pixels."""
    halved = 1 if stem == "cifar" and model == "resnet50" else 2
    side = math.ceil(side / halved)
    yield "conv1", "bn1", (64, 3, 7, 7), side
    side = math.ceil(side / halved)
    channels = 64
    for stage, blocks in enumerate(RESNETS[model]):
        width = 64 << stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            before, side = side, math.ceil(side / 2) if stage and not block else side
            yield f"{name}.conv1", f"{name}.bn1", (width, channels, 1, 1), before
            yield f"{name}.conv2", f"{name}.bn2", (width, width, 3, 3), side
            yield f"{name}.conv3", f"{name}.bn3", (4 * width, width, 1, 1), side
            if not block:
                yield f"{name}.downsample.0", f"{name}.downsample.1", (4 * width, channels, 1, 1), side
            channels = 4 * width
