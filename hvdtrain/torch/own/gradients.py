"""Gradients that are the mean over the ranks once backward() returns, for any model and any optimizer."""

import numpy as np
import torch
from torch import nn

from hvdtrain.core.sharing import gather
from hvdtrain.errors import LoopError
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.buckets import Averager
from hvdtrain.torch.models import SyncBatchNorm


class LoopAverager(Averager):
    """The gradients of a loop of the user's, which may leave an epoch early: a message says so behind each backward."""

    error = LoopError

    def __init__(self, model: nn.Module, engine: Engine, compression: str) -> None:
        super().__init__(model, engine, compression)
        self._is_forward_shared = any(isinstance(each, SyncBatchNorm) for each in model.modules())
        self._is_loss_shared = False
        self._leaves = False
        self._unreached: list[str] | None = None

    def take_unreached(self) -> list[str]:
        """The parameters that no rank's first backward reached; once."""
        unreached, self._unreached = self._unreached, []
        return unreached or []

    def begin_batch(self) -> None:
        """This rank takes its next batch. Raises LoopError on all ranks where one has left instead."""
        if self._is_forward_shared:
            self._compare(leaves=False)

    def begin_loss(self) -> None:
        """This rank's loss communicates next. Raises LoopError as `begin_batch`."""
        self._is_loss_shared = True
        self._compare(leaves=False)

    def leave(self) -> None:
        """This rank leaves an epoch's batches early: takes part in what one that stays communicates next, which is its
        backward, or a comparison, where its forward or loss communicate too. Raises LoopError on all ranks where not
        all of them leave."""
        if self._is_forward_shared or self._is_loss_shared:
            self._compare(leaves=True)
        else:
            self._leaves = True
            self.finish()

    def _compare(self, leaves: bool) -> None:
        rank, size = self._engine.rank, self._engine.size
        left = gather(np.array([leaves], dtype=np.int64), rank, size, self._engine.sum)[:, 0]
        _check_left(np.flatnonzero(left).tolist(), size)

    def finish(self) -> list[str]:
        leaves, never = self._leaves, super().finish()
        if self._unreached is None and not leaves:
            self._unreached = never
        return never

    def _send_rest(self) -> None:
        super()._send_rest()
        self._left = torch.zeros(self._engine.size)
        self._left[self._engine.rank] = self._leaves
        self._wait = self._engine.average(self._left, "hvdtrain.leaving")

    def _finish(self) -> list[str]:
        never = super()._finish()
        self._leaves = False
        self._wait()
        _check_left(self._left.nonzero()[:, 0].tolist(), self._engine.size)
        return never


def _check_left(left: list[int], size: int) -> None:
    """Raises LoopError where some ranks have left the epoch's batches, others not."""
    if 0 < len(left) < size:
        stays = next(rank for rank in range(size) if rank not in left)
        raise LoopError(
            f"rank {left[0]} left run.batches() where rank {stays} continued; every rank must make the same steps: end "
            "an epoch early by a number that all of them have, as of world.sum."
        )
