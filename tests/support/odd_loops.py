"""Odd training loops of one's own, each made from a seed: the same text trains with hvdtrain and with plain PyTorch.

`python odd_loops.py FOLDER`: FOLDER/given.json holds the `way` ("loop ddp", or "plain 2": on one process, what two
ranks are to become), the `seeds`, and `left`: 1 where each training is stopped at a random step and started again, or
the signal that it gets there. FOLDER/rank-R.json gets for each seed every tensor that was trained, or the error.
"""

import contextlib
import copy
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captured import each_seed
from odd_drawn import loop_oddities
from odd_loop_parts import Lookahead, Net, Plain, Sam, layer
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils

import hvdtrain.torch as ht
from hvdtrain.launch.topology import discover

EXAMPLES, STEPS, LR = 24, 6, 0.05


class Program:
    """What a user writes: the objects that are trained, and the loop."""

    run: Any
    ema: Any = None
    centers: Any = None

    def __init__(self, seed: int, world: Any, signal: int = 0, made: int = 0) -> None:
        """`signal`: what the process gets after a random step. `made`: the steps that were made before this start."""
        self.seed, self.world, self.signal, self.has = seed, world, signal, (has := loop_oddities(seed))
        draw = random.Random(-seed)
        self.kind, self.variant = draw.choice(("sgd", "momentum", "adam", "adamw")), draw.random() < 0.5
        self.batch_size = draw.choice((8, 12, 12, 24)[: 3 if "left out" in has else 4])
        self.at = draw.randint(1, STEPS - 2)
        self.model = model = Net(seed)
        if self.variant:
            self.set_flags(0)
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self.optimizers = self.made_optimizers()
        if made > self.at and "group added" not in has:
            self.grow()  # a program builds all layers of its checkpoint before it starts again
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled="scaler" in has)
        self.given: dict[str, Any] = {"scaler": self.scaler} if "scaler" in has else {}
        if "scheduler" in has:
            self.given["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.7)
        if "average" in has:
            self.ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.stopper, self.center = {"best": 1e9, "bad": 0}, torch.zeros(4, dtype=torch.float64)
        kept = {"average": self.ema, "patience": self.stopper, "center": self.center}
        if state := {name: each for name, each in kept.items() if name in has}:
            self.given["state"] = state

    def made_optimizers(self) -> list[torch.optim.Optimizer]:
        has, model = self.has, self.model
        if "LBFGS" in has:
            return [torch.optim.LBFGS(model.parameters(), lr=LR)]
        if "steps in backward" in has:
            return [torch.optim.SGD([each], lr=LR, momentum=0.9) for each in model.parameters()]
        apart = ["first"] * ("group added" in has) + ["last"] * ("second optimizer" in has)
        mine = [each for name, each in model.named_parameters() if name.partition(".")[0] not in apart]
        kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(self.kind, torch.optim.SGD)
        more = {"lr": LR, "weight_decay": 0.1} | ({"momentum": 0.9} if self.kind == "momentum" else {})
        wrapper = Sam if "SAM" in has else Lookahead if "Lookahead" in has else None
        made = [wrapper(mine, kind, **more) if wrapper else kind(mine, **more)]
        if "second optimizer" in has:
            made.append(torch.optim.SGD(model.last.parameters(), lr=LR / 2, momentum=0.5))
        if "module beside" in has:
            self.centers = layer(self.seed, 2, 6, kind=nn.Embedding)
            made.append(torch.optim.SGD(self.centers.parameters(), lr=0.5, momentum=0.5))
        return made

    def data(self) -> list[tuple[torch.Tensor, ...]]:
        """The sets that a loop reads side by side."""
        x = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        y = x.sum(1, keepdim=True)
        if "left out" in self.has:
            y[5] = torch.nan
        longer = torch.cat([x, x[:12]]) if self.variant else x
        return [(x, y), (longer - 1, longer.prod(1, keepdim=True))][: 1 + ("two loaders" in self.has)]

    def train(self, folder: Path, last: int) -> None:
        """`last`: the step after which the program is left."""
        self.step_in_backward(self.variant)
        every = {"checkpoint_every_epochs": STEPS, "checkpoint_every_steps": self.seed % 3 or None}
        self.run = run = self.world.run(folder, self.model, (*self.optimizers,), trackers=(), **self.given, **every)
        self.step_in_backward(not self.variant)
        data, update = self.data(), next((of for name, of in UPDATES.items() if name in self.has), plainly)
        for _ in run.epochs(STEPS * self.batch_size // EXAMPLES, max_steps=last):
            for read in zip(*(run.batches(each, batch_size=self.batch_size) for each in data), strict=False):
                batch = self.begun([each for part in read for each in part])
                loss = self.loss(batch)
                if self.is_left_out(loss) or update(self, batch, loss) is LEFT_OUT:
                    run.skip()
                    continue
                self.after(loss)
                run.step(loss.detach())
                if self.signal and run.global_step >= self.at:
                    os.kill(os.getpid(), self.signal)

    def is_odd_one(self) -> bool:
        """Whether this is the rank and the step in which one rank does something that the others do not."""
        return self.run.global_step == self.at and self.world.rank == self.world.size - 1

    def is_left_out(self, loss: torch.Tensor) -> bool:
        if "left out" in self.has:
            return self.world.sum(float(not loss.isfinite())) > 0
        return "left out by one rank" in self.has and self.is_odd_one()

    def by_rank(self, of: Callable[[int, int], torch.Tensor], rows: int) -> torch.Tensor:
        """`of(rank, rows)`; in the plain program those of all ranks, each with its random numbers."""
        if not isinstance(self.world, Plain):
            return of(self.world.rank, rows)
        found = []
        for rank in range(ranks := self.world.ranks):
            self.world.seed(rank)
            found.append(of(rank, rows // ranks))
        return torch.cat(found)

    def begun(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """The batch and its weights, after what a loop does before its forward: random numbers, parameters, flags."""
        step, x = self.run.global_step, batch[0]
        for name, of in DRAWS.items():
            if name in self.has:
                batch[0] = x = x + 0.1 * self.by_rank(lambda _, rows, of=of: of(rows), len(x))
        odd = (
            getattr(self.world, "ranks", self.world.size) - 1
            if self.has & {"loss times zero"} and step == self.at
            else -1
        )
        weights = self.by_rank(lambda rank, rows: torch.full((rows, 1), float(rank != odd)), len(x))
        if step >= self.at:
            self.grow()
        self.set_flags(step)
        return [*batch, weights]

    def grow(self) -> None:
        """Gives the optimizer a second group, and takes from it what the model has no more."""
        for name in self.has & NEW.keys() if len(self.optimizers[0].param_groups) == 1 else ():
            self.optimizers[0].add_param_group({"params": NEW[name](self.model, self.seed), "lr": LR / 2})
            there = set(self.parameters())
            for group in (group for each in self.optimizers for group in each.param_groups):
                group["params"][:] = [each for each in group["params"] if each in there]

    def set_flags(self, step: int) -> None:
        for name in self.has & FLAGS.keys():
            self.learn(*FLAGS[name](step, self.at))

    def learn(self, *flags: Any) -> None:
        for each, flag in zip((self.model.first, self.model.second, self.model.last), flags, strict=True):
            each.requires_grad_(bool(flag))

    def parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), *(self.centers.parameters() if self.centers else ())]

    def learning(self) -> list[nn.Parameter]:
        """The parameters that learn now."""
        return [each for each in self.parameters() if each.requires_grad]

    def in_turn(self) -> list[nn.Parameter]:
        return [*(self.model.last if self.run.global_step % 2 else self.model.first).parameters()]

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y, *other, weights = batch
        each = (self.model(x) - y).square()
        if other:
            each = each + 0.5 * (self.model(other[0]) - other[1]).square()
        for network in [self.teacher] * ("teacher" in self.has) + [self.ema] * bool(self.ema):
            each = each + 0.1 * (self.model(x) - network(x).detach()).square()
        loss = (weights * each).mean()
        if self.centers:
            loss = loss + 0.3 * (self.model.features(x) - self.centers((y[:, 0] > 0).long())).square().mean()
        if "center" in self.has:
            self.center.lerp_(self.world.mean(x.mean(), 1) * torch.ones_like(self.center), 0.1)
            loss = loss + 0.1 * (self.model(x + self.center)).square().mean()
        if "penalty" in self.has:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
            loss = loss + 0.1 * slope.square().mean()
        if "gathered" in self.has:
            z, all_z = (functional.normalize(self.model.features(each)) for each in (x, x + 0.1))
            label = torch.arange(len(z)) + self.world.rank * len(z)
            loss = loss + 0.2 * functional.cross_entropy(z @ self.world.gather(all_z).T / 0.2, label)
        return loss

    def update(self) -> None:
        """What a loop does once it has its gradients."""
        if self.scaler.is_enabled():
            for each in self.optimizers:
                self.scaler.unscale_(each)
        found = [each for each in self.learning() if each.grad is not None]
        if "clipped" in self.has:
            nn.utils.clip_grad_norm_(found, 0.5)
        if "drawn for nothing" in self.has:
            torch.rand(1)
        for each in found:
            if "centralized" in self.has:
                each.grad = each.grad - each.grad.mean()
            if self.has & {"noise", "own noise"}:
                drawn = self.run.generator if "noise" in self.has else None
                each.grad += 0.01 * torch.randn(each.shape, generator=drawn, dtype=each.dtype)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none="zeroed" not in self.has)

    def after(self, loss: torch.Tensor) -> None:
        if "scheduler" in self.has:
            self.given["scheduler"].step()
        if self.ema:
            self.ema.update_parameters(self.model)
        if "patience" in self.has:
            stopper, value = self.stopper, self.world.mean(loss.item(), 1)
            stopper["bad"] = 0 if value < 0.9 * stopper["best"] else stopper["bad"] + 1
            stopper["best"] = min(value, stopper["best"])
            for group in self.optimizers[0].param_groups:
                group["lr"] *= 0.5 if stopper["bad"] > 1 else 1

    def step_in_backward(self, now: bool) -> None:
        for each, parameter in zip(self.optimizers, self.model.parameters(), strict=False):
            if not now or "steps in backward" not in self.has:
                break
            parameter.register_post_accumulate_grad_hook(lambda _, each=each: each.step() or each.zero_grad())

    def tensors(self) -> dict[str, Any]:
        modules = {"model": self.model, "ema": self.ema, "centers": self.centers}
        return {f"{of} {name}": each.tolist() for of in modules if modules[of]
                for name, each in modules[of].state_dict().items()}  # fmt: skip


DRAWS: dict[str, Callable[[int], torch.Tensor]] = {
    "drawn by torch": lambda rows: torch.randn(rows, 1, dtype=torch.float64),
    "drawn by numpy": lambda rows: torch.tensor(np.random.normal(size=(rows, 1))),
    "drawn by random": lambda rows: torch.full((rows, 1), random.gauss(0, 1), dtype=torch.float64),
}
FLAGS: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "head, then body": lambda step, at: (step >= at, step >= at, step < at),
    "in turn": lambda step, at: (step % 2, step % 2, not step % 2),
    "thawed": lambda step, at: (step > at, step >= at, True),
    "frozen for good": lambda step, at: (step < at, True, True),
    "group added": lambda step, at: (step >= at, True, True),
}
"""Which of the three layers learn in a step."""


LEFT_OUT = object()


def new(module: nn.Module, name: str, made: Any) -> list[nn.Parameter]:
    setattr(module, name, made)
    return [made] if isinstance(made, nn.Parameter) else [*made.parameters()]


NEW: Any = {
    "new head": lambda model, seed: new(model, "last", layer(seed + 3, 6, 1)),
    "new layer": lambda model, seed: new(model, "added", layer(seed + 3, 6, 1)),
    "new weight": lambda model, seed: new(model.second, "weight", nn.Parameter(layer(seed + 3, 6, 6).weight.detach())),
    "group added": lambda model, _: [*model.first.parameters()],
}
"""The parameters of a group that the optimizer gets in the midst of training."""


def plainly(p: Program, batch: Any, loss: torch.Tensor) -> None:
    p.scaler.scale(loss).backward()
    p.update()


def without_spike(p: Program, batch: Any, loss: torch.Tensor) -> Any:
    """The batch whose gradient is largest is left out."""
    loss.backward()
    if p.run.global_step == p.at:
        for each in p.optimizers:
            each.zero_grad()
        return LEFT_OUT
    return p.update()


def mixed(p: Program, batch: Any, loss: torch.Tensor) -> None:
    """The gradients of one loss by backward, of another one by hand."""
    loss.backward()
    more = torch.autograd.grad(p.model(batch[0]).abs().mean(), learning := p.learning(), materialize_grads=True)
    for each, gradient in zip(learning, p.run.average(more), strict=True):
        each.grad = gradient if each.grad is None else each.grad + gradient.abs()
    p.update()


def accumulated(p: Program, batch: Any, _: Any) -> None:
    first, second = zip(*(each.chunk(2) for each in batch), strict=True)
    with p.run.accumulating():
        (p.loss(list(first)) / 2).backward()
    plainly(p, batch, p.loss(list(second)) / 2)


def gan(p: Program, batch: Any, _: Any) -> None:
    """One update after the other of each part of the network, while the other part is frozen."""
    for body in (True, False):
        p.learn(body, body, not body)
        plainly(p, batch, p.loss(batch))


def by_hand(p: Program, batch: Any, loss: torch.Tensor, average: Any = None) -> None:
    gradients = torch.autograd.grad(loss, learning := p.learning(), materialize_grads=True)
    for each, gradient in zip(learning, (average or p.run.average)(list(gradients)), strict=True):
        each.grad = gradient
    p.update()


def pcgrad(p: Program, batch: Any, loss: torch.Tensor) -> None:
    """The gradients of two losses, the first one without what contradicts the second."""
    learning, losses = p.learning(), (loss, -0.7 * p.model(batch[0]).square().mean())
    one, other = (p.run.average(list(torch.autograd.grad(each, learning, materialize_grads=True))) for each in losses)
    dot = sum((a * b).sum() for a, b in zip(one, other, strict=True))
    share = min(dot, 0) / sum(each.square().sum() for each in other)
    for each, a, b in zip(learning, one, other, strict=True):
        each.grad = a - share * b + b
    p.update()


UPDATES: Any = {
    "SAM": lambda p, batch, loss: (loss.backward(), p.optimizers[0].ascend(), plainly(p, batch, p.loss(batch))),
    "accumulated": accumulated,
    "GAN": gan,
    "two backwards": lambda p, batch, loss: (loss.backward(), plainly(p, batch, p.model(batch[0]).abs().mean())),
    "by hand, not averaged": lambda p, batch, loss: by_hand(p, batch, loss, list),
    "by hand": by_hand,
    "backward and by hand": mixed,
    "backward of inputs": lambda p, _, loss: (loss.backward(inputs=p.in_turn()), p.update()),
    "spike left out": without_spike,
    "PCGrad": pcgrad,
    "a rank without backward": lambda p, _, loss: (p.is_odd_one() or loss.backward(), p.update()),
    "a rank with one more": lambda p, batch, loss: (p.is_odd_one() and p.loss(batch).backward(), plainly(p, 0, loss)),
    "steps in backward": lambda p, batch, loss: loss.backward(),
    "LBFGS": lambda p, batch, loss: p.optimizers[0].step(lambda: (p.loss(batch), p.loss(batch).backward())[0]),
}
"""How an update is made."""
WORLDS: list[Any] = []


def became(way: str, seed: int, folder: Path, left: int) -> Any:
    world, draw = WORLDS[0] or Plain(int(way.partition(" ")[2])), random.Random(seed)
    at = draw.randint(1, STEPS - 1)
    try:
        for last in (at, STEPS) if left == 1 else (STEPS,):
            if WORLDS[0]:
                world._runs._trained.clear()  # as if it were another process
                world._engine.bucket_bytes = lambda: 100 if seed % 2 else 2**20  # 100: less than most weights
            program = Program(seed, world, left if left > 1 else 0, at if left == 1 and last == STEPS else 0)
            program.train(folder, last)
        return program.tensors()
    except (SystemExit, Exception) as error:
        if left > 1:
            raise
        if WORLDS[0]:
            world.close(type(error))
            world._runs.last = None
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    way, given = json.loads(Path(sys.argv[1], "given.json").read_text())["way"].split()
    with ht.join(given, "cpu") if way == "loop" else contextlib.nullcontext() as world:
        WORLDS.append(world)
        each_seed(became, discover(os.environ).rank)
