"""What a plan must know of a network: its parameters, its FLOPs, and whether it has BatchNorm."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hvdtrain.datasets import Dataset

RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
"""The number of bottlenecks in each stage: He et al. 2016, arXiv:1512.03385, table 1. As in torchvision, no convolution
has a bias."""
Shape = tuple[int, ...]
KERNEL = {"weight": "kernel", "bias": "bias"}
NORM = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
EMBEDDING = {"weight": "embeddings"}
"""TensorFlow's names of a layer's tensors, of a norm's and of an embedding's, by PyTorch's."""
EMBEDDINGS = ("wte", "wpe")
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


class GPT(BaseModel):
    """The arguments of the network gpt; see `hvdtrain.torch.gpt`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    layers: Annotated[int, Field(gt=0, le=1000)] = 4
    heads: Annotated[int, Field(gt=0, le=1000)] = 4
    width: Annotated[int, Field(gt=0, le=10**5)] = 128
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def shapes(self, vocabulary: int, context: int) -> dict[str, Shape]:
        """The shapes of its weights for sequences of up to `context` tokens, by their names in PyTorch: GPT-2's."""
        c = self.width
        block = {"ln_1": (c,), "attn.c_attn": (3 * c, c), "attn.c_proj": (c, c)}
        block |= {"ln_2": (c,), "mlp.c_fc": (4 * c, c), "mlp.c_proj": (c, 4 * c)}
        modules = {f"h.{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()}
        found: dict[str, Shape] = {"wte.weight": (vocabulary, c), "wpe.weight": (context, c)}
        for name, shape in {**modules, "ln_f": (c,)}.items():
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return found

    def first_weights(self, vocabulary: int, context: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Its first weights, float32, by their names in PyTorch: normal with a standard deviation of 0.02, which is
        divided by sqrt(2 layers) for those that end in the residual stream (Radford et al. 2019, section 2.3; 0.02 is
        that of OpenAI's code)."""
        draw = np.random.default_rng(seed)
        for name, shape in self.shapes(vocabulary, context).items():
            if len(shape) == 1:
                yield name, np.full(shape, name.endswith(".weight"), np.float32)
            else:
                std = 0.02 / math.sqrt(2 * self.layers if name.endswith("c_proj.weight") else 1)
                yield name, draw.standard_normal(shape, np.float32) * np.float32(std)

    def flops(self, vocabulary: int, context: int) -> int:
        """FLOPs of the forward pass of a sequence of `context` tokens: matrix products and attention, which is counted
        as if each token saw all."""
        of_token = self.layers * (12 * self.width**2 + 2 * context * self.width) + vocabulary * self.width
        return 2 * context * of_token


def end_of(r: Any, dataset: Dataset) -> int | None:
    """The token behind which attention sees no earlier one, where the recipe's sequences are separate; else None."""
    return dataset.text.end if dataset.text and r.sequences == "separate" else None


def flops(r: Any, dataset: Dataset) -> int | None:
    """FLOPs of one example's forward pass through a network of MODELS; None where its images' size is not known."""
    classes = dataset.classes or 0
    if r.model == "linear":
        return 2
    if r.model == "gpt":
        return GPT(**r.model_args).flops(classes, r.sequence_length)
    return resnet_flops(r.model, r.stem, dataset.sample_shape[0], classes) if dataset.sample_shape else None


def resnet_flops(model: str, stem: str, side: int, classes: int) -> int:
    """FLOPs of one image's forward pass through convolutions and classifier; `side` is the image's, in pixels."""
    convolutions = [(shape, out) for _, _, shape, out in _convolutions(model, stem, side)]
    features = convolutions[-1][0][0]
    return 2 * (sum(math.prod(shape) * out**2 for shape, out in convolutions) + features * classes)


def weights(r: Any, classes: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The shapes of a network's trained weights and of its BatchNorm statistics, by their names in PyTorch. The
    recipe's model is one of MODELS."""
    if r.model == "linear":
        return {"weight": (1, 1), "bias": (1,)}, {}
    if r.model == "gpt":
        return GPT(**r.model_args).shapes(classes, r.sequence_length), {}
    trained, statistics, shape = dict[str, Shape](), dict[str, Shape](), Shape()
    for convolution, norm, shape, _ in _convolutions(r.model):
        trained |= {f"{convolution}.weight": shape, f"{norm}.weight": shape[:1], f"{norm}.bias": shape[:1]}
        statistics |= {f"{norm}.running_mean": shape[:1], f"{norm}.running_var": shape[:1]}
        statistics[f"{norm}.num_batches_tracked"] = ()
    return trained | {"fc.weight": (classes, shape[0]), "fc.bias": (classes,)}, statistics


def norms_of(shapes: Mapping[str, Shape]) -> set[str]:
    """The norms among the modules that have weights of these shapes, by their names in PyTorch."""
    return {name[:-7] for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 1}


def in_tensorflow(name: str, norms: Collection[str]) -> str:
    """TensorFlow's name of a weight, by that in PyTorch; `norms`: those of `norms_of`. Raises KeyError."""
    module, _, leaf = name.rpartition(".")
    table = EMBEDDING if module in EMBEDDINGS else NORM if module in norms else KERNEL
    return f"{module or ALONE}.{table[leaf]}"


def named(r: Any, classes: int, framework: str) -> Network:
    """The network with its parameters by their names in the framework. The recipe's model is one of MODELS."""
    trained, statistics = weights(r, classes)
    norms, batch_norms = norms_of(trained), {name.rpartition(".")[0] for name in statistics}
    names = {name: name if framework == "torch" else in_tensorflow(name, norms) for name in trained}
    sizes = {names[name]: math.prod(shape) for name, shape in trained.items()}
    return Network(
        sum(sizes.values()),
        bool(batch_norms),
        has_dropout=r.model == "gpt" and GPT(**r.model_args).dropout > 0,
        sizes=sizes,
        norms={names[name] for name in trained if name.rpartition(".")[0] in norms},
        batch_norms=batch_norms,
    )


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
