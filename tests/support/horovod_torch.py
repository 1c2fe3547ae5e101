"""Horovod's own optimizer beside plain PyTorch: `python horovod_torch.py torch FOLDER` on two ranks, whose data and
first weights differ. Each case is a program that plain PyTorch trains on the whole batch, and Horovod on half of it a
rank. FOLDER/rank-R.json has by case what went wrong on rank R; empty where nothing did."""

import contextlib
import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

VARIANTS: dict[str, Any] = dict.fromkeys(("foreach", "capturable", "fused", "amsgrad", "centered", "maximize"), True)
VARIANTS |= {"weight_decay": 0.1, "line_search_fn": "strong_wolfe"}
X = torch.randint(6, (4, 4, 3), generator=torch.Generator().manual_seed(1)).double()
LIMITS = {"compressed, sparse": 1e-3, "LBFGS": 1e-6, "LBFGS line_search_fn": 1e-6}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "biases": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "matrices": lambda: nn.Linear(3, 4, bias=False),
    "sparse": lambda: nn.Embedding(6, 2, sparse=True),
    "images": lambda: nn.Conv2d(3, 2, 2, padding=1).to(memory_format=torch.channels_last),
}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)


class Side:
    """Plain PyTorch, or under Horovod the rank that has that part of the batch; rank 0 alone loads what was saved."""

    def __init__(self, part: slice = slice(4)) -> None:
        self.part, self.plain = part, part == slice(4)

    def begin(self, kind: str, make: Any, saved: Any = None, **options: Any) -> None:
        torch.manual_seed(self.part.start or 0)
        self.model, self.x = MODELS[kind](), {"sparse": X.long(), "images": X[..., None, None]}.get(kind, X)
        self.optimizer = self.unwrapped = make([*self.model.parameters()])
        if saved and not self.part.start:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
        if not self.plain:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self.optimizer = hvd.DistributedOptimizer(self.unwrapped, **options)
            hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def backward(self, step: int, scale: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        scale(loss := self.model(self.x[step, self.part]).square().mean()).backward()
        return loss

    def train(self, *steps: int, closure: bool = False) -> None:
        for step in steps:
            again = partial(self.backward, step)
            self.optimizer.step(*([again] if closure else again() is None or []))

    def ends(self, case: Callable[["Side"], None]) -> torch.Tensor:
        case(self)
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class Own(torch.optim.Optimizer):
    """Has a constructor and a step of its own, and before the first one a nested state."""

    def __init__(self, *, rate: float, of: list[nn.Parameter]) -> None:
        super().__init__(of, {})
        self.rate, self.state["all"] = rate, {"none": None}
        for p in of:
            self.state[p] = {"nested": [{"sum": torch.zeros_like(p)}], "late": False, "count": torch.tensor(1)}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            (nested,), late, count = self.state[p].values()
            p.sub_(self.rate * nested["sum"].add_(p.grad * (2 if late else 1)) / count)
            self.state[p].update(late=True, count=count + 1)


def resumed(side: Side, kind: str = "biases", make: Any = SGD, closure: bool = False, **options: Any) -> None:
    side.begin(kind, make, **options)
    side.train(0, 1, closure=closure)
    side.begin(kind, make, copy.deepcopy([side.model.state_dict(), side.optimizer.state_dict()]), **options)
    side.train(2, 3, closure=closure)


def changed(side: Side) -> None:
    """A scheduler made before, a step hook, a frozen layer, and one that comes later."""
    side.begin("biases", lambda parameters: SGD(parameters[:2]))
    schedule = torch.optim.lr_scheduler.ExponentialLR(side.unwrapped, 0.5)
    side.optimizer.load_state_dict(side.optimizer.state_dict())
    side.optimizer.register_step_post_hook(lambda *_: side.model[0].weight.data.mul_(0.9))
    for step in range(4):
        side.model[0].requires_grad_(step != 1)
        side.train(step)
        schedule.step()
        if step == 1:
            side.optimizer.add_param_group({"params": [*side.model[2].parameters()]})


def scaled(side: Side, **more: Any) -> None:
    side.begin("biases", partial(SGD, **more))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        factor = float("inf") if step == 1 and side.part.stop == 4 else 1  # on rank 1, or in the whole batch
        side.backward(step, lambda loss, factor=factor: scaler.scale(loss) * factor)
        scaler.step(side.optimizer)
        scaler.update()


def gathered(side: Side, most: float = float("inf")) -> None:
    side.begin("biases", SGD, op=hvd.Sum)
    outputs = side.model(X[0, side.part])
    (outputs if side.plain else hvd.allgather(outputs)).sum().backward()
    if most < 1:
        nn.utils.clip_grad_norm_(side.model.parameters(), most)
    side.optimizer.step()


def optimizers(variants: set[str]) -> Iterator[tuple[str, Callable[[Side], None], torch.Tensor]]:
    """Every optimizer of PyTorch, alone and with each of these options, on the first model that plain PyTorch trains
    with it; and the weights with which that ends."""
    for name, optimizer in inspect.getmembers(torch.optim, inspect.isclass):
        for flag in ["", *sorted(variants & inspect.signature(optimizer).parameters.keys())]:
            make = partial(optimizer, **({flag: VARIANTS[flag]} if flag else {}))
            for kind in ("biases", "matrices", "sparse"):
                case = partial(resumed, kind=kind, make=make, closure=name == "LBFGS")
                # LBFGS may go up for ever; capturable needs a GPU, Muon matrices; Optimizer is of no use.
                with contextlib.suppress(AssertionError, RuntimeError, TypeError, ValueError):
                    expected = Side().ends(case)
                    assert expected.abs().max() < 100
                    yield f"{name} {flag}".strip(), case, expected
                    break


CASES: dict[str, Callable[[Side], None]] = {
    "own optimizer": partial(resumed, make=lambda parameters: Own(rate=0.1, of=parameters)),
    "closure": partial(resumed, closure=True),
    "compressed, sparse": partial(resumed, kind="sparse", compression=hvd.Compression.fp16),
    "groups": partial(resumed, groups=2, gradient_predivide_factor=2.0),
    "channels_last": partial(resumed, kind="images"),
    "changed": changed, "GradScaler": scaled, "GradScaler, fused": partial(scaled, fused=True),
    "gradient of a collective": gathered, "clipped too early": partial(gathered, most=0.1),
}  # fmt: skip

if __name__ == "__main__":
    hvd.init()
    torch.set_default_dtype(torch.float64)
    variants = json.loads(Path(sys.argv[2], "given.json").read_text())["variants"]
    rank, wrong = Side(slice(2 * hvd.rank(), 2 * hvd.rank() + 2)), {}
    programs = [(name, case, Side().ends(case)) for name, case in CASES.items()]
    for name, case, expected in [*programs, *optimizers({*variants})]:
        try:
            apart = (rank.ends(case) - expected).abs().max()
            wrong[name] = "" if apart <= LIMITS.get(name, 1e-12) else f"{apart} apart"
        except Exception as error:
            wrong[name] = str(error)
    Path(sys.argv[2], f"rank-{hvd.rank()}.json").write_text(json.dumps(wrong))
