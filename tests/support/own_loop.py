"""A program that keeps its own loop: `python own_loop.py hvdtrain.torch FOLDER CASE ...` trains each case of CASES in
FOLDER/CASE, one after the other, in one world."""

import contextlib
import copy
import os
import random
import sys
import time
from pathlib import Path

import torch
from small import hold
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdtrain.torch as ht
from hvdtrain.errors import AgreementError, LoopError

GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(96, 3, 8, 8, generator=GENERATOR, dtype=torch.float64)
LABELS = (INPUTS.mean((1, 2, 3)) > 0).long()
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
PAUSE = float(os.environ.get("OWN_LOOP_PAUSE", "0"))
"""Seconds between two steps."""
LR = float(os.environ.get("OWN_LOOP_LR", "0.01"))


class Net(nn.Module):
    """Convolutions, a parameter that no rank uses, and one that only rank 0 uses, in one epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8, 2)
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        out = self.head(self.body(x).mean((2, 3)))
        return out + 0 * self.sometimes if more else out


class Noisy(torch.utils.data.Dataset):
    """Samples that are augmented in another way in each epoch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> dict:
        noise = random.gauss(0, 0.1) + 0.1 * torch.randn((), dtype=torch.float64)
        return {"x": (INPUTS[index] + noise).to(self.dtype), "y": LABELS[index]}


def joined(*batches: dict) -> dict:
    """The examples of all batches."""
    return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}


class Centers(nn.Module):
    """A loss with parameters of its own, which another optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, out: torch.Tensor, y: torch.Tensor, weight: None) -> torch.Tensor:
        return nn.functional.cross_entropy(out, y) + (out - self.weight).square().mean()


class Lookahead(torch.optim.Optimizer):
    """Moves slow weights every second step; the rest is the inner optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def state_dict(self) -> dict:
        return self.inner.state_dict()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.inner.step()
        self.count += 1
        for each in [each for group in self.param_groups for each in group["params"]]:
            slow = self.state[each].setdefault("slow", each.clone())
            if self.count % 2 == 0:
                each.copy_(slow.lerp_(each, 0.5))


class Plain:
    """What a program trains and keeps: a model and its optimizer."""

    objective, state = staticmethod(nn.functional.cross_entropy), None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.inner, self.optimizers = model, optimizer, (optimizer,)

    def begin(self, epoch: int) -> None:
        pass

    def step(self) -> None:
        for each in self.optimizers:
            each.step()
            each.zero_grad()


class More(Plain):
    """What a program trains and keeps beside its model: a loss with an optimizer of its own, an optimizer that wraps
    another, a layer that learns from epoch 1 on, an average of the weights and a count."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.objective = Centers().to(next(model.parameters()).dtype)
        model.body[0].requires_grad_(False)
        self.optimizers = Lookahead(optimizer), torch.optim.SGD(self.objective.parameters(), lr=0.1, momentum=0.9)
        self.average, self.counts = torch.optim.swa_utils.AveragedModel(model), {"steps": 0}
        self.state = {"average": self.average, "counts": self.counts}

    def begin(self, epoch: int) -> None:
        if epoch == 1:  # also where the run resumes inside of this epoch
            self.model.body[0].requires_grad_(True)
            self.inner.add_param_group({"params": self.model.body[0].parameters()})

    def step(self) -> None:
        super().step()
        inner = copy.deepcopy(self.objective)  # as of an inner loop: each rank's own, and forgotten
        torch.optim.SGD(inner.parameters(), lr=0.1).step()
        self.average.update_parameters(self.model)
        self.counts["steps"] += 1


CASES = {
    "momentum": {"optimizer": "SGD", "clip": 0.1, "dtype": "float32"},
    "accumulated": {"parts": 3, "conditional": True},
    "bfloat16": {"dtype": "bfloat16"},
    "early": {"leaves": 3},
    "short": {"max_steps": 6, "norm": True},
    "cut": {"checkpoint_every_steps": 3, "paired": True, "keeps": True},
    "contrastive": {"gathers": True},
    "endless": {"epochs": 10_000, "checkpoint_every_steps": 5},
    "broken": {"breaks": 4},
    "parted": {"leaves": 2, "together": False},
    "parted forward": {"leaves": 2, "together": False, "synced": True},
    "unlike": {"together": False, "weighted": True},
    "parted gathers": {"leaves": 2, "together": False, "gathers": True},
    "left": {"then": "leaves"},
    "attacked": {"then": "attacks"},
    "refused": {"then": "reports"},
    "beside": {"keeps": True, "hides": 1},
    "unmatched": {"alone": True},
    "exit": {"exits": (5, "all")},
    "exit alone": {"exits": (5, 1)},
}


def contrastive(world, model, x) -> torch.Tensor:
    """A loss that needs all ranks' examples: with parameters before and behind what is gathered, by a world and without
    one, in a part that is computed again in backward, and with the own part put in its place."""
    first, second = (model.body(each).mean((2, 3)) for each in (x, x.flip(3) + 1))
    begin = world.rank * len(x)
    others = world.gather({"second": second, "rank": world.rank})["second"]
    put = torch.cat([others[:begin], second, others[begin + len(x) :]])
    again = checkpoint(lambda: model.head(ht.gather(second)), use_reentrant=False)
    center = world.sum(first.sum(0)) / len(others)
    losses = [(first - center).square().sum(1).mean()]
    for some, all_of_them in ((model.head(first), model.head(put)), (model.head(first), again), (first, others)):
        logits = nn.functional.normalize(some) @ nn.functional.normalize(all_of_them).T / 0.2
        losses.append(nn.functional.cross_entropy(logits, torch.arange(begin, begin + len(x))))
    return torch.stack(losses).mean()


def train(world, folder, dtype="float64", optimizer="AdamW", clip=None, parts=1, epochs=3, max_steps=None, leaves=None,
          conditional=False, breaks=None, norm=False, paired=False, then="",
          together=True, synced=False, alone=False, gathers=False, weighted=False,
          keeps=False, hides=0, exits=(None, 0), **intervals) -> None:  # fmt: skip
    """Trains one case in a loop such as a user's."""
    torch.manual_seed(world.rank)  # the ranks begin apart
    mixed = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    dtype = DTYPES[dtype]
    model = Net().to(dtype)
    if world.rank == 0:
        torch.manual_seed(0)
        model.load_state_dict(Net().to(dtype).state_dict())
    if norm:
        model.norm = nn.BatchNorm1d(2, dtype=dtype)  # which is never called
    if synced:
        model.body[1] = nn.BatchNorm2d(8, dtype=dtype)
        model = world.sync_batch_norm(model)
    settings = {"momentum": 0.9} if optimizer == "SGD" else {}
    learning = [each for name, each in model.named_parameters() if not (keeps and name.startswith("body.0."))]
    optimizer = getattr(torch.optim, optimizer)(learning, lr=LR, **settings)
    more = (More if keeps else Plain)(model, optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(more.optimizers[0], [2], gamma=0.5)
    run = world.run(
        folder, model, more.optimizers[: 2 - hides], scheduler=scheduler, highest="accuracy", log_every_steps=1,
        check_replicas_every_steps=1, state=more.state, **intervals,
    )  # fmt: skip
    data = Noisy(dtype)
    for epoch in run.epochs(epochs, max_steps=max_steps):
        more.begin(epoch)
        more_of = [run.batches(data, batch_size=12)] if paired else []
        for number, batch in enumerate(map(joined, run.batches(data, batch_size=24), *more_of)):
            total = 0.0
            cuts = zip(batch["x"].chunk(parts), batch["y"].chunk(parts), strict=True)
            for part, (x, y) in enumerate(cuts):
                with run.accumulating(part < parts - 1), mixed:
                    out = model(x, more=conditional and world.is_rank_0 and epoch == 1)
                    loss = more.objective(out, y, torch.tensor([1, 2], dtype=dtype) if weighted else None) / parts
                    loss = contrastive(world, model, x) if gathers else loss
                    loss.backward()
                total += loss.detach()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            more.step()
            if alone:
                world.sum(1) if world.is_rank_0 else world.mean(1, 1)
            time.sleep(PAUSE)
            end_early(world, run, breaks, exits)
            run.step(total, even=((batch["y"] == 0).sum(), len(batch["y"])))
            if leaves and number + 1 == leaves and (together or world.rank == 1):
                break
        correct = count = 0
        with torch.no_grad():
            for batch in run.each_once(data, batch_size=36):
                correct += (model(batch["x"]).argmax(1) == batch["y"]).sum().item()
                count += len(batch["y"])
        run.report(accuracy=world.mean(correct, count), seen=world.sum(count), last=epoch if together else world.rank)
        scheduler.step()
        if goes_astray(world, run, model, then):
            break
    sys.exit(0) if "EXITS" in os.environ else world.finish()


def end_early(world, run, breaks, exits) -> None:
    """Ends this rank in the case's step, where it is one that ends there."""
    if breaks == run.global_step and world.rank == world.size - 1:
        raise RuntimeError("a fault of the user's")
    if exits[0] == run.global_step and exits[1] in {"all", world.rank}:
        sys.exit(3)


def goes_astray(world, run, model, how: str) -> bool:
    """Does something wrong at an epoch's end; whether that is to leave the epochs."""
    data = Noisy(torch.float64)
    for batch in run.each_once(torch.utils.data.Subset(data, range(95)), batch_size=36) if how == "attacks" else ():
        model(batch["x"]).sum().backward()
    if how == "reports" and world.rank == 1:
        run.report(epoch=1)
    return how == "leaves" and world.rank == 1


def main() -> None:
    hold()
    folder, *cases = sys.argv[2:]
    with ht.join() as world:
        for case in cases:
            try:
                train(world, Path(folder, case), **CASES[case])
            except (AgreementError, LoopError) as error:
                if case == cases[-1]:
                    raise
                print(f"rank {world.rank}: {error}")
                world._runs.last = None
        world.print("the block has ended")
    print("behind the block")


if __name__ == "__main__":
    main()
