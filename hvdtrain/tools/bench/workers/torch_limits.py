"""One rank of `bench train` with PyTorch."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch

from hvdtrain.run.run import Run
from hvdtrain.tools.bench.workers import limits
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.opening import engine_of
from hvdtrain.torch.trainer import Trainer

COMMUNICATED = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


@contextlib.contextmanager
def sides(run: Run) -> Iterator[limits.Sides]:
    """The run's training, and one on each rank by itself."""
    with engine_of(run) as engine:
        trainer = Trainer(run, engine)
        count = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
        gradients = torch.zeros(count, dtype=COMMUNICATED[run.recipe.compression], device=engine.device)
        communicate, alone = None, None
        if engine.size > 1:
            communicate = partial(engine.allreduce, gradients)
            by_itself = LocalEngine(engine.device)
            by_itself.rank = engine.rank
            alone = _drive(Trainer(run, by_itself))
        yield limits.Sides(_drive(trainer), alone, communicate, engine.sum, gradients.nbytes)


def _drive(trainer: Trainer) -> limits.Drive:
    device = trainer.engine.device
    return limits.Drive(
        batches=trainer.batches,
        update=lambda micro_batches: trainer.update(micro_batches, 0.0, 0),
        wait=lambda: torch.cuda.synchronize() if device.type == "cuda" else None,
    )


if __name__ == "__main__":
    limits.main("torch", sides)
