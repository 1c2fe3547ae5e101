"""The states of torchmetrics over the ranks, also where ranks have lists of unequal lengths."""

import functools
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from hvdtrain.core import sharing
from hvdtrain.torch.objective import gathered

SYNC, SYNC_DIST = Metric.sync, Metric._sync_dist
ABSENT = torch.zeros(0)
"""Stands for an element that another rank's list has and this rank's has not."""


def synchronize(strategy: Any) -> None:
    """Makes metrics, wherever they were made, synchronise over a strategy's ranks, also after the Trainer's end."""
    Metric.sync = functools.partialmethod(_sync, strategy)  # type: ignore[assignment, method-assign]
    Metric._sync_dist = _sync_dist  # type: ignore[assignment, method-assign]


def _sync(metric: Metric, strategy: Any, dist_sync_fn: Any = None, *given: Any, **named: Any) -> None:
    """As torchmetrics' own over torch.distributed. A metric's own dist_sync_fn is used."""
    if dist_sync_fn:
        SYNC(metric, dist_sync_fn, *given, **named)
    else:
        named["distributed_available"] = lambda: strategy.world_size > 1
        SYNC(metric, functools.partial(_gathered, strategy), *given[:2], **named)


def _sync_dist(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Synchronises lists of unequal lengths, such as boxes by image: all ranks gather as many elements."""
    if isinstance(dist_sync_fn, functools.partial) and dist_sync_fn.func is _gathered:
        lists = {
            name: getattr(metric, name)
            for name, reduction in metric._reductions.items()
            if isinstance(getattr(metric, name), list) and reduction is not dim_zero_cat  # which is joined to one
        }
        of_ranks = sharing.of_all({name: len(each) for name, each in lists.items()}, dist_sync_fn.args[0].library)
        for name, each in lists.items():
            most = max(lengths[name] for lengths in of_ranks)
            setattr(metric, name, [*each, *[ABSENT] * (most - len(each))])
    SYNC_DIST(metric, dist_sync_fn, process_group)


def _gathered(strategy: Any, tensor: Tensor, group: Any = None) -> list[Tensor]:
    """The tensors of the ranks that have one."""
    about = sharing.of_all([str(tensor.dtype), list(tensor.shape), tensor is ABSENT], strategy.library)
    found = zip(gathered(tensor, strategy.library, about), about, strict=True)
    return [each for each, (*_, is_absent) in found if not is_absent]
