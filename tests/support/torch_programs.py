"""PyTorch's part of programs.py."""

import os
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.core.recipe import load
from hvdtrain.launch.topology import discover
from hvdtrain.torch import models
from hvdtrain.torch.__main__ import train  # noqa: F401
from hvdtrain.torch.engines import Engine
from hvdtrain.torch.engines.local import LocalEngine
from hvdtrain.torch.trainer import (
    Trainer,
    open_engine,  # noqa: F401
)


def horovod(recipe: str = "linear", **overrides: Any) -> Engine:
    """Horovod's engine for a recipe; joins the ranks the first time."""
    from hvdtrain.torch.engines.horovod import HorovodEngine

    return HorovodEngine(load(recipe, overrides), None)


def ddp(recipe: str = "linear", **overrides: Any) -> Engine:
    """DistributedDataParallel's engine for a recipe; a training before it has joined the ranks."""
    from hvdtrain.torch.engines.ddp import DdpEngine

    return DdpEngine(load(recipe, overrides), discover(os.environ), torch.device("cpu"))


def local() -> Engine:
    return LocalEngine(torch.device("cpu"))


def state(trainer: Trainer) -> dict[str, np.ndarray]:
    """A training's whole state, by name."""
    return trainer.state.arrays()


def parameters(trainer: Trainer) -> int:
    """How many numbers it learns."""
    return sum(parameter.numel() for parameter in trainer.model.parameters())


def flip_a_bit(trainer: Trainer) -> None:
    """Of the linear model's weight."""
    trainer.model.weight.detach().view(torch.int32)[0] ^= 1


def lose_once(trainer: Trainer, step: int) -> None:
    """The gradients of that update are lost once, as where a connection breaks."""
    finish, calls = trainer.engine.finish, iter(range(1, step + 1))

    def finish_or_raise() -> None:
        finish()
        if next(calls, None) == step:
            raise ConnectionError

    trainer.engine.finish = finish_or_raise  # type: ignore[method-assign]


def results_of(engine: Engine) -> dict[str, Any]:
    """What each verb of an engine gave on this rank, as plain lists."""
    rank = engine.rank
    results: dict[str, Any] = {
        "rank and size": [rank, engine.size],
        "sum of float64": engine.sum(np.array([rank + 1.0, 0.125 * rank])).tolist(),
        "sum of float32": engine.sum(np.array([rank + 1.0], np.float32)).tolist(),
        "sum of int64": engine.sum(np.array([2**62 + 1 if rank == 0 else -rank, 2**53 * rank + 1])).tolist(),
        "sum of a table": engine.sum(np.full((2, 3), rank + 1.0)).tolist(),
        "sum of another shape": engine.sum(np.arange(7.0)).tolist(),
        "gathered": engine.gather_rows(torch.tensor([rank, 10.0 * rank], dtype=torch.float64)).tolist(),
        "gathered float32": engine.gather_rows(torch.full((3,), rank + 0.5)).tolist(),
    }
    tensors = {
        "scalar": torch.tensor(rank + 7),
        "counts": torch.full((3,), 2**53 + 1 + rank),
        "weights": torch.full((2, 2), rank + 0.5),
        "doubles": torch.full((2,), rank + 0.1, dtype=torch.float64),
    }
    results["metadata"] = engine.broadcast(tensors, {"step": 3 + rank, "best": None, "text": "é" * (rank + 1)})
    results["no metadata"] = engine.broadcast({}, None if rank == 0 else {"step": 1})
    results["broadcast"] = {name: tensor.tolist() for name, tensor in tensors.items()}
    half = torch.full((2,), 40_000.0, dtype=torch.float16)  # the sum of two is too large for it
    engine.average(half, "half")()
    results["average of float16"] = half.tolist()
    results["updates"] = updates(engine)
    return results


def patience() -> float:
    """The processor time in seconds that a rank's training thread spends on waiting for the last one, which comes two
    seconds late."""
    engine = horovod()
    if engine.rank == engine.size - 1:
        time.sleep(2)
    began = time.thread_time()
    engine.sum(np.zeros(1))
    return time.thread_time() - began


def updates(engine: Engine) -> list[list[float]]:
    """Gradient and weight after each of two updates of lr 1; rank r's gradient is r + 1, then 10 (r + 1)."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    network, optimizer = engine.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    for factor in (1.0, 10.0):
        optimizer.zero_grad()
        x = torch.full((1, 1), factor * (engine.rank + 1.0), dtype=torch.float64)
        for out in engine.outputs(network, [x]):
            out.sum().backward()
        engine.finish()
        gradient = model.weight.grad.item()
        optimizer.step()
        seen.append([gradient, model.weight.item()])
    return seen


def sync_batch_norm(shape: list[int], steps: int) -> dict[str, float]:
    """The largest difference to BatchNorm2d on the concatenated batch: output, statistics, gradients."""
    engine = horovod()
    wide = {"dtype": torch.float64}
    torch.manual_seed(0)
    images = torch.randn(steps, engine.size * shape[0], *shape[1:], **wide) * 3 + 100
    gradients = torch.randn(images.shape, **wide)
    plain = nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.3).double()
    with torch.no_grad():
        plain.weight.copy_(torch.rand(shape[1]))
        plain.bias.copy_(torch.rand(shape[1]))
    holder = nn.Sequential(nn.BatchNorm2d(shape[1], eps=1e-3, momentum=0.3)).double()
    holder[0].load_state_dict(plain.state_dict())
    synced = models.with_sync_batch_norm(holder, engine)[0].double()
    mine = slice(engine.rank * shape[0], (engine.rank + 1) * shape[0])
    furthest: dict[str, float] = {"eps": abs(synced.eps - 1e-3), "momentum": abs(synced.momentum - 0.3)}

    def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        furthest[name] = max(furthest.get(name, 0.0), (ours - theirs).abs().max().item())

    for x, g in zip(images, gradients, strict=True):
        whole, own = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        theirs, ours = plain(whole), synced(own)
        compare("output", ours, theirs[mine])
        plain.zero_grad(), synced.zero_grad()
        theirs.backward(g), ours.backward(g[mine])
        compare("input's gradient", own.grad, whole.grad[mine])
        for name in ("weight", "bias"):  # of a sum over the batch: the ranks' gradients add up to it
            summed = torch.from_numpy(engine.sum(getattr(synced, name).grad.numpy()))
            compare(f"{name}'s gradient", summed, getattr(plain, name).grad)
    for name, buffer in plain.named_buffers():
        compare(name, dict(synced.named_buffers())[name], buffer)
    plain.eval(), synced.eval()
    compare("evaluated", synced(images[0]), plain(images[0]))
    narrow = models.with_sync_batch_norm(nn.Sequential(nn.Conv2d(shape[1], 4, 3), nn.BatchNorm2d(4)), engine)
    with torch.autocast("cpu", torch.bfloat16):
        out = narrow(images[0][mine].float())
    out.float().square().sum().backward()
    furthest["bfloat16"] = 0.0 if out.dtype == torch.bfloat16 and narrow[0].weight.grad.isfinite().all() else 1.0
    return furthest


def adasum() -> list[float]:
    """The weights after one update of lr 1 from 0, where the two ranks' gradients are at right angles."""
    engine = horovod(reduction="adasum")
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    network, optimizer = engine.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    network(torch.eye(2)[engine.rank]).sum().backward()
    engine.finish()
    optimizer.step()
    return model.weight.flatten().tolist()


class Branches(nn.Module):
    """Small and large layers in both memory layouts, one that rank 0 alone uses, one that nobody uses, one frozen."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.filters = nn.Conv2d(3, 8, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.large, self.sometimes, self.never, self.frozen = (nn.Linear(*size) for size in LAYERS)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.large(self.norm(self.filters(x)).mean((2, 3)).repeat(1, 96))
        return self.frozen(hidden + (self.sometimes(hidden) if self.rank == 0 else 0))


LAYERS = ((768, 768), (768, 768), (4, 4), (768, 2))  # 2.25 MiB: more than are communicated at once


def gradients(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By recipe keys: how far a model's averaged gradients are from the mean of the ranks' own, relative to it; then
    which have none, and whether the filters' ones lie as the filters do. And what a broadcast made of filters."""
    results: dict[str, Any] = {}
    for name, keys in cases.items():
        engine = horovod(**keys)
        torch.manual_seed(engine.rank)
        model = Branches(engine.rank)
        engine.broadcast({name: weight.detach() for name, weight in model.state_dict().items()}, None)
        torch.manual_seed(0)
        reference = Branches()
        results["filters"] = torch.equal(model.filters.weight, reference.filters.weight)
        passes = keys.get("accumulation_steps", 1)
        images = torch.randn(engine.size, passes, 5, 3, 6, 6).to(torch.float32)
        network, optimizer = engine.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
        furthest = 0.0
        for factor in (1.0, 3.0):
            optimizer.zero_grad(), reference.zero_grad()
            for out in engine.outputs(network, list(factor * images[engine.rank])):
                out.square().mean().backward()
            engine.finish()
            for reference.rank, micro_batches in enumerate(factor * images):
                for micro_batch in micro_batches:
                    (reference(micro_batch).square().mean() / engine.size).backward()
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                if theirs.grad is not None:
                    apart = (ours.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-3)
                    furthest = max(furthest, apart.item())
        results[name] = furthest
        results[f"{name}, without"] = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        results[f"{name}, layout"] = model.filters.weight.grad.is_contiguous(memory_format=torch.channels_last)
    return results
