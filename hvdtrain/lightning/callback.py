"""The run's loop, driven by the hooks of Lightning's."""

import signal
from typing import Any

from lightning.pytorch import Callback

from hvdtrain.lightning.module import RecipeModule
from hvdtrain.run.loop import Loop
from hvdtrain.torch import models
from hvdtrain.torch.trainer import Replica


class RunCallback(Callback):
    """The run's log, metrics and checkpoints: the same as those of hvdtrain.torch."""

    # The loop's collectives stand in hooks that Lightning calls on every rank: on a rank without validation examples
    # it skips those around validation.

    def __init__(self, loop: Loop[Replica], module: RecipeModule) -> None:
        self.loop, self.module = loop, module
        self._step = loop.progress.step
        self._terminate = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, *_: Any) -> None:
        # Lightning's own handler would broadcast in the middle of a step; the world has noticed the signal already.
        if callable(self._terminate):
            signal.signal(signal.SIGTERM, self._terminate)
            signal.siginterrupt(signal.SIGTERM, False)

    def on_train_epoch_start(self, *_: Any) -> None:
        models.training_mode(self.module.model, self.loop.recipe)
        self.loop.begin_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        """After a micro-batch; only the last one makes an update."""
        if self.loop.progress.step != self._step:
            self._step = self.loop.progress.step
            self.loop.trainer.share_buffers()
            self.loop.after_update(self.module.lr)

    def on_train_epoch_end(self, *_: Any) -> None:
        """After validation."""
        self.loop.finish_epoch(self.module.meter.take())
        self.module.progress = self.loop.progress
