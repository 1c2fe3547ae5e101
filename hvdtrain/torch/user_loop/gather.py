"""What ranks gather, with its gradient: `World.gather`, and `gather` for a recipe's `step`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hvdtrain.core.sharing import of_all
from hvdtrain.errors import LoopError
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.buckets import real
from hvdtrain.torch.objective import gathered, not_empty
from hvdtrain.torch.resumable import PLAIN, packed, unpacked

JOINED: list[Engine] = []
"""The engine with whose ranks this process trains."""


def gather(value: Any) -> Any:
    """`World.gather` without a World, for the `step` of a recipe or inside of a model; on several ranks not within
    torch.inference_mode, in which recipes validate. Raises LoopError.

    Examples:
        >>> import torch
        >>> import hvdtrain.torch as ht
        >>> def step(model, batch):
        ...     first, second = model(batch[0]), model(batch[1])
        ...     if model.training:
        ...         first, second = ht.gather((first, second))
        ...     return torch.nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))
    """
    if not JOINED:
        raise LoopError("hvdtrain.torch.gather has no ranks here; call it within join() or in the step of a recipe.")
    if JOINED[0].size > 1 and torch.is_inference_mode_enabled():
        raise LoopError(
            "hvdtrain.torch.gather was called in a validation, where ranks may differ by a batch; call it only where "
            "model.training is true."
        )
    return over_ranks(value, JOINED[0])


@torch._disable_dynamo  # loads the compiler in the first call, where torch.compiler.disable would load it here
def over_ranks(value: Any, engine: Engine) -> Any:
    """The ranks' values; see `World.gather`."""
    leaves, structure = tree_flatten(value, is_leaf=lambda part: not any(map(is_array, tree_leaves(part))))
    try:
        tensors = [_tensor(leaf) if is_array(leaf) else None for leaf in leaves]
        own = [packed(leaf, "") if each is None else kind(each) for each, leaf in zip(tensors, leaves, strict=True)]
        own.append(" ".join(str(structure).split()))
    except (LoopError, RuntimeError, TypeError, ValueError):  # named below, as the other ranks wait
        bad = next((each for each in sorted(tree_leaves(value), key=is_array) if not isinstance(each, PLAIN)), value)
        own = [f"a {type(bad).__name__}"]
    ranks = of_all(own, engine)
    structures = [each[-1] for each in ranks]
    if structures.count(structures[0]) < len(ranks) or len(own) == 1:
        raise LoopError(
            "world.gather takes dense tensors, arrays, numbers, texts, None, and lists and dictionaries of them, alike "
            f"on all ranks, got {structures}; give what you need of it."
        )
    parts = [_of_leaf(*each, engine) for each in zip(tensors, leaves, zip(*ranks, strict=True), strict=False)]
    return tree_unflatten(parts, structure)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def kind(tensor: torch.Tensor) -> list[Any]:
    """What ranks compare of a tensor: dtype, shape, and a text if it needs a gradient here."""
    needs = tensor.requires_grad and torch.is_grad_enabled()
    return [str(tensor.dtype), list(tensor.shape), *["with a gradient"] * needs]


def _tensor(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value)
    if tensor.layout is not torch.strided:
        raise TypeError
    return tensor if tensor.dim() else tensor[None]


def _of_leaf(own: torch.Tensor | None, leaf: Any, ranks: Sequence[Any], engine: Engine) -> Any:
    if not any(isinstance(each, list) for each in ranks):
        return [unpacked(each) for each in ranks]
    arrays = [each if isinstance(each, list) else ["no array", [1]] for each in ranks]
    kinds = [[dtype, shape[1:], *more] for dtype, shape, *more in arrays if math.prod(shape)]
    if own is None or (kinds and kinds.count(kinds[0]) < len(kinds)):
        raise LoopError(f"world.gather joins arrays of one dtype and shape behind the first axis, got {kinds}.")
    if any(each[2:] for each in ranks) and not own.requires_grad:  # an empty part, whose backward the others await
        own = own.detach().requires_grad_()
    joined = Joined.apply(own, ranks, engine)
    return joined.numpy() if isinstance(leaf, np.ndarray) else joined


def rows(tensor: torch.Tensor, engine: Engine) -> torch.Tensor:
    """The ranks' tensors, all of one dtype and shape, as [size, *shape], with the gradient of `World.gather`."""
    joined: torch.Tensor = Joined.apply(tensor[None], [[str(tensor.dtype), [1, *tensor.shape]]] * engine.size, engine)
    return joined


class Joined(torch.autograd.Function):
    """The ranks' tensors along their first axis; or with `is_whole`, this rank's part of the sum of the ranks' tensors.
    Each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, kinds: Sequence[Any], engine: Engine, is_whole: bool = False) -> Any:
        ctx.given = kinds, engine, not is_whole
        if not is_whole:
            return torch.cat(not_empty(gathered(tensor, engine, kinds)))
        shapes = [shape for _, shape, *_ in kinds]
        own, ends = shapes[engine.rank], np.cumsum([shape[0] * bool(math.prod(shape)) for shape in shapes])
        total = _sum(tensor, engine) if tensor.numel() else tensor
        return total[: ends[engine.rank]][-own[0] :] if math.prod(own) else tensor.new_zeros(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return Joined.apply(*gradients, *ctx.given), None, None, None


def _sum(tensor: torch.Tensor, engine: Engine) -> torch.Tensor:
    wide = real(tensor.to(torch.promote_types(tensor.dtype, torch.float32))).resolve_neg()
    total = wide.clone(memory_format=torch.contiguous_format)
    if total.is_cuda:
        engine.average(total.view(-1), "hvdtrain.gather.gradient")()
        total *= engine.size
    else:  # in another group of torch.distributed than the gradients that backward sends meanwhile
        total = torch.from_numpy(engine.sum(total.view(-1).numpy())).view(wide.shape)
    return (torch.view_as_complex(total) if tensor.is_complex() else total).to(tensor.dtype)
