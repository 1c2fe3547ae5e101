"""One rank of `bench train` with PyTorch."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from hvdtrain.bench.workers import limits
from hvdtrain.progress import Progress
from hvdtrain.run import Run
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.opening import engine_of
from hvdtrain.torch.train import Training

WIRE = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


@contextlib.contextmanager
def sides(run: Run) -> Iterator[limits.Sides]:
    """The run's training, and one on each rank by itself."""
    with engine_of(run) as engine:
        training = Training(run, engine)
        count = sum(weight.numel() for weight in training.model.parameters())
        gradients = torch.zeros(count, dtype=WIRE[run.recipe.compression], device=engine.device)
        communicate, alone = None, None
        if engine.size > 1:
            communicate = partial(engine.allreduce, gradients)
            by_itself = LocalEngine(engine.device)
            by_itself.rank = engine.rank
            alone = _drive(Training(replace(run, engine="local", folder=None), by_itself))
        yield limits.Sides(_drive(training), alone, communicate, engine.sum, gradients.nbytes)


def _drive(training: Training) -> limits.Drive:
    device = training.engine.device

    def batches(place: Progress) -> Iterator[tuple[int, limits.Parts]]:
        training.progress.epoch, training.progress.sample = place.epoch, place.sample
        return training.batches()

    return limits.Drive(
        batches=batches,
        update=lambda parts: training.update(parts, 0.0),
        wait=lambda: torch.cuda.synchronize() if device.type == "cuda" else None,
    )


if __name__ == "__main__":
    limits.main("torch", sides)
