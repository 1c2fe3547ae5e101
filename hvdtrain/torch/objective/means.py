"""Whether the loss that a program differentiates is a mean over examples, as its graph shows."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def no_means(loss: Any, examples: int, whose: str, remedy: str, whole: int = 0) -> list[str]:
    """Lines of the log where the graph of the loss of so many examples, `whole` on all ranks, shows that it is no mean
    over them: PyTorch's cross_entropy with weights or ignored labels, or a sum that nothing divides, or `whole`. Called
    before backward frees it."""
    found, seen, nodes = dict[str, None](), set[Any](), list[Any]([(loss.grad_fn, 0.0, None, "")])
    for each in nodes:  # a node, what divides above it, and the sizes and the name of an undivided sum above it
        node, by, total, what = each
        if node is None or each in seen or what in found:
            continue
        seen.add(each)
        name, reduction = node.name(), getattr(node, "_saved_reduction", None)
        shape = tuple(node._input_metadata[0].shape)
        sizes = tuple(getattr(node, "_saved_self_sym_sizes", getattr(getattr(node, "_saved_self", None), "shape", ())))
        if name.startswith("NllLoss") and reduction == MEAN:
            ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # which PyTorch shows without its sign
            if node._saved_weight is not None or (node._saved_target == ignored).any():
                found["cross_entropy with weights or labels that are left out"] = None
        if reduction == MEAN or (total and name.startswith("Mean") and 0 in getattr(node, "_saved_dim", (0,))):
            continue
        is_of_batch = examples and not shape and any(size % examples == 0 for size in sizes)
        if reduction == SUM or (name.startswith("Sum") and is_of_batch):
            is_by_whole = by == whole > examples and whole not in {*sizes, math.prod(sizes)}
            if is_by_whole or by < max(1, min([examples, *sizes[:1]])):
                total, what = sizes, "a sum over the batch" + f" divided by all ranks' {whole} examples" * is_by_whole
        elif total:  # a layer takes data beside its inputs with gradients, which have other sizes
            inputs = {each and tuple(each._input_metadata[at].shape) for each, at in node.next_functions}
            is_layer = (None in inputs and inputs - {None, shape}) or name.startswith(("Embedding", "Index", "Gather"))
            if is_layer or not isinstance(getattr(node, "variable", None), nn.Parameter | None):
                found[what] = None
        for at, (below, _) in enumerate(node.next_functions):
            divisor = _divisor(node, at, total or ()) if total in {None, shape} else 0.0
            if not (total and max(1, examples) <= divisor < math.inf):
                nodes.append((below, max(by, divisor), total, what))
    ends = f"is no mean over examples: the result depends on the number of ranks; {remedy}"
    return [f"{whose}: {what} {ends}" for what in found]


def _divisor(node: Any, at: int, sizes: tuple[int, ...]) -> float:
    """By what a node divides its input `at`, a number or, in a product, a tensor of these sizes; 0: by nothing."""
    kind, factor = node.name()[:3], getattr(node, ("_saved_other", "_saved_self")[at % 2], None)
    is_known = is_number(factor) or (kind == "Mul" and getattr(factor, "shape", None) == sizes and math.prod(sizes))
    if kind not in {"Div", "Mul"} or (kind == "Div" and at) or not is_known:
        return math.inf if node.name().startswith(("Div", "Mean")) else 0.0
    size = float((torch.as_tensor(factor).detach() * 1.0).abs().max())
    return size if kind == "Div" else round(1 / max(size, 1e-300), 2)


MEAN, SUM = 1, 2
"""Reductions, as the nodes of PyTorch's losses keep them."""


def before_backward(look: Callable[[Any], None]) -> Callable[[], None]:
    """Calls `look` with what backward is to begin at, until the function that is returned is called. A mode would see
    early what backward may not reach, and programs have modes of their own."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(tensors: Any, *args: Any, **options: Any) -> None:
        with contextlib.suppress(Exception):  # of what backward itself refuses
            look(tensors)
        plain(tensors, *args, **options)

    def restore() -> None:
        if torch.autograd.backward is backward:  # else it is another's by now
            torch.autograd.backward = plain

    torch.autograd.backward = backward
    return restore


def is_number(value: Any) -> bool:
    """Whether the value is one number, maybe as a tensor."""
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
