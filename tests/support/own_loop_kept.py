"""Programs that keep more than a model and its optimizer: each function makes the model, what `world.run` gets as its
optimizers, the update, what to compare in the end, what to do when an epoch begins, and more arguments of
`world.run`."""

import random

import numpy as np
import torch
from torch import nn

COMPILED = False
"""Whether `compiled` compiles its model, or else a part of it."""


def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] * x[:, 1:2]).sin()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def nothing(epoch):
    pass


def updating(loss, *optimizers):
    def update(x, y):
        for each in optimizers:
            each.zero_grad()
        found = loss(x, y)
        found.backward()
        for each in optimizers:
            each.step()
        return found

    return update


def mse(model):
    return lambda x, y: (model(x) - y).square().mean()


class Sam(torch.optim.Optimizer):
    """Its inner optimizer shares the groups, and both keep something for each parameter."""

    def __init__(self, parameters, base, **settings):
        super().__init__(parameters, settings)
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def ascend(self):
        for each in [each for group in self.param_groups for each in group["params"]]:
            self.state[each]["step"] = each.detach().clone()  # a name that Adam has, too
            each.add_(0.05 * each.grad.sign())
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for each, own in self.state.items():
            each.copy_(own["step"])
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """Without the constructor of PyTorch's class; keeps lists, counts, and what begins as None."""

    def __init__(self, inner):
        self.held, self.state, self.count, self.mean = {"inner": [inner]}, {}, 0, None
        self.slow = [[each.detach().clone() for each in group["params"]] for group in inner.param_groups]

    @property
    def inner(self):
        return self.held["inner"][0]

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        self.mean = self.count + (0.5 * self.mean if self.mean is not None else torch.zeros(2))
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            group["lr"] = 0.1 / (1 + 0.01 * float(self.mean[0]))
            for each, own in zip(group["params"], slow, strict=True):
                if self.count % 3 == 0:
                    each.copy_(own.lerp_(each, 0.5))


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features):
        self.calls += 1
        return (features - self.weight).square().mean() / self.calls


def sam():
    model = net()
    optimizer = Sam(model.parameters(), torch.optim.Adam, lr=0.05)

    def update(x, y):
        loss = mse(model)(x, y)
        loss.backward()
        optimizer.ascend()
        mse(model)(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, update, model.parameters, nothing, {}


def lookahead():
    model = net()
    optimizer = Lookahead(Lookahead(torch.optim.Adam(model.parameters(), lr=0.1)))
    return model, optimizer, updating(mse(model), optimizer), model.parameters, nothing, {}


def centers():
    """A loss with parameters in a module, and a temperature that is in none."""
    model, loss, scale = net(), Centers(), nn.Parameter(torch.ones(()))
    first = torch.optim.SGD([*model.parameters(), scale], lr=0.1, momentum=0.9)
    both = first, torch.optim.Adam(loss.parameters(), lr=0.1)

    def losses(x, y):
        return mse(model)(x, y) * (-scale).exp() + scale + 0.1 * loss(model[:2](x))

    return (
        *(model, both, updating(losses, *both)),
        *(lambda: [*model.parameters(), *loss.parameters(), loss.calls, scale], nothing, {}),
    )


def thawed():
    """A body that learns from epoch 2 on, half of it in a group that is added then."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([model[0].bias, *model[2].parameters()], lr=0.1, momentum=0.9)

    def begin(epoch):
        if epoch == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].weight, "lr": 0.02})

    return model, optimizer, updating(mse(model), optimizer), model.parameters, begin, {}


def with_state():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    stop, queue = {"bad": 0, "losses": [], "sums": np.zeros(2), "pair": (1, "a")}, torch.zeros(2)
    step = updating(mse(model), optimizer)

    def update(x, y):
        loss = step(x, y)
        average.update_parameters(model)
        stop["bad"], stop["pair"] = stop["bad"] + 1, (stop["pair"][0] * 2, "b")
        stop["losses"].append(loss.item())
        stop["sums"] += 1
        queue.add_(1)
        return loss

    return (
        *(model, optimizer, update),
        lambda: [*average.parameters(), stop["bad"], stop["pair"][0], *stop["losses"], stop["sums"], queue],
        *(nothing, {"state": {"average": average, "stop": stop, "queue": queue}}),
    )


def drawn():
    """By the generators that are seeded for each step and epoch, and by some of the program's own."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {"a": torch.Generator().manual_seed(1), "b": np.random.default_rng(1), "c": random.Random(1)}

    def loss(x, y):
        share = np.random.beta(0.4, 0.4) * random.gauss(1, 0.1) + torch.rand(())
        share = share + torch.rand((), generator=own["a"]) + own["b"].random() + own["c"].random()
        return (model(share * x + (1 - share) * x.flip(1)) - share * y).square().mean()

    scale = torch.ones(())

    def begin(epoch):
        scale.copy_(torch.rand(()))

    def update(x, y):
        return updating(loss, optimizer)(x * scale, y)

    return model, optimizer, update, model.parameters, begin, {"state": own}


def zeroed():
    """A layer that is frozen in epoch 2, and that momentum still moves, as its gradient is not None but zeros."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def update(x, y):
        loss = mse(model)(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    def begin(epoch):
        model[0].requires_grad_(epoch < 2)

    return model, optimizer, update, model.parameters, begin, {}


def compiled():
    model = plain = net()
    if COMPILED:
        model = torch.compile(plain, backend="eager")
    else:
        plain[0] = torch.compile(plain[0], backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, updating(mse(model), optimizer), plain.parameters, nothing, {}


def scaled():
    """A loss scale that `world.run` does not get, whose first updates are left out; and a teacher."""
    model, teacher = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-281)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, backoff_factor=2.0**-20)

    def update(x, y):
        loss = mse(model)(x, y) + (model(x) - teacher(2 * x).detach()).square().mean()
        scaler.scale(loss * 1e280).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return model, optimizer, update, lambda: [*model.parameters(), scaler.get_scale()], nothing, {}


def phases():
    """A second optimizer of the same weights for the later epochs."""
    model = net()
    first, second = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model.parameters(), lr=0.01),
    )
    using = [first]

    def begin(epoch):
        using[0] = second if epoch > 2 else first

    def update(x, y):
        return updating(mse(model), using[0])(x, y)

    return model, (first, second), update, model.parameters, begin, {}


def aliased():
    """The best weights are the live ones until there are better ones, as where a program forgets to copy them."""
    model = net()
    optimizer, best = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        {"loss": 1.0, "weights": model.state_dict()},
    )

    def update(x, y):
        loss = updating(mse(model), optimizer)(x, y)
        if loss.item() < best["loss"] - 0.05:
            best.update(loss=loss.item(), weights={name: each.clone() for name, each in model.state_dict().items()})
        return loss

    def watch():
        return [*model.parameters(), *best["weights"].values()]

    return model, optimizer, update, watch, nothing, {"state": {"best": best}}
