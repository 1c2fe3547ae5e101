"""Mistakes of a program with its own loop."""

import contextlib
import io
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain.torch as ht

X, Y = torch.arange(32.0)[:, None] / 32, torch.arange(32.0)[:, None] / 16


class Unsaved:
    """A scheduler whose state is no JSON."""

    def state_dict(self):
        return {"made": object()}

    def load_state_dict(self, state):
        pass


class Stateless:
    pass


def parts(lr=0.1):
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loop(world, folder, *, model=None, optimizer=None, data=(X, Y), batch_size=8, epochs=2, steps=True, report=None,
         stop_at=None, reads=1, loss_of=None, lr=0.1, late=None, **more):  # fmt: skip
    """A loop; each case gives it one thing wrong."""
    own, its = parts(lr)
    model, optimizer = model or own, optimizer or its
    if more.pop("schedules", False):
        more["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if more.pop("forgets", False):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = world.run(folder, model, optimizer, log_every_steps=1, **more)
    if late == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in run.epochs(epochs):
        for _ in range(reads):
            for x, y in run.batches(data, batch_size=batch_size):
                each = (model(x) - y).square()
                each.mean().backward()
                if late != "update":
                    optimizer.step()
                optimizer.zero_grad()
                if steps:
                    run.step(loss_of(each) if loss_of else each.mean())
                if late == "schedule":
                    more["scheduler"].step()
                if run.global_step == stop_at:
                    raise SystemExit(7)
        run.report(**(report or {}))


def wrapped(world, folder):
    model, optimizer = parts()
    loop(world, folder, model=nn.DataParallel(model), optimizer=optimizer)


def elsewhere(world, folder):
    model = nn.Linear(1, 1, device="meta")
    loop(world, folder, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def frozen(world, folder):
    loop(world, folder, model=nn.Linear(1, 1).requires_grad_(False), optimizer=parts()[1])


def step_alone(world, folder):
    run = world.run(folder, *parts())
    for _ in run.epochs(1):
        run.step(loss=0.1)


def outside(world, folder):
    run = world.run(folder, *parts())
    for _ in run.batches((X, Y), 8):
        pass


def report_outside(world, folder):
    world.run(folder, *parts()).report(accuracy=1)


def no_steps(world, folder):
    for _ in world.run(folder, *parts()).epochs(1):
        pass


def reading(of, updates_at=1, steps=True):
    """A program whose epoch reads `of(run)`, with an update and a step after every so many batches."""

    def program(world, folder):
        model, optimizer = parts()
        run = world.run(folder, model, optimizer)
        for _ in run.epochs(1):
            for number, (x, y) in enumerate(of(run), 1):
                loss = (model(x) - y).square().mean()
                loss.backward()
                if number % updates_at == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if steps and number % updates_at == 0:
                    run.step(loss)

    return program


def ahead(run):
    """The batches of a prefetcher."""
    batches = run.batches((X, Y), 8)
    before = next(batches)
    for batch in batches:
        yield before
        before = batch
    yield before


def beside(others):
    """Batches with what `others` makes of those of a second set."""
    return reading(lambda run: (batch for batch, _ in zip(run.batches((X, Y), 8), others(run), strict=False)))


def twice(run):
    """Every second batch of a second set."""
    second = run.batches((X, Y), 4)
    return zip(second, second, strict=True)


def left_out(world, folder):
    """The first epoch is as it should be, and then a batch is left out."""
    model, optimizer = parts()
    run = world.run(folder, model, optimizer)
    for epoch in run.epochs(2):
        for number, (x, y) in enumerate(run.batches((X, Y), 8)):
            if epoch == number == 1:
                continue
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)


def by_hand(world, folder):
    """Gradients that no backward computes, and a step without a loss."""
    model, optimizer = parts()
    run = world.run(folder, model, optimizer)
    for _ in run.epochs(1):
        for x, y in run.batches((X, Y), 8):
            loss = (model(x) - y).square().mean()
            for each, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                each.grad = gradient
            optimizer.step()
            run.step()


def two_runs(world, folder):
    world.run(folder, *parts())
    world.run(f"{folder}-2", *parts())


def not_given(world, folder):
    """Two optimizers step, and one is given."""
    model = nn.Linear(1, 1)
    weight, bias = (torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model.parameters())
    weight.register_step_post_hook(lambda *_: bias.step())
    loop(world, folder, model=model, optimizer=weight)


class Listing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for each in self.param_groups[0]["params"]:
            self.state[each]["steps"] = [1]


def of(kind):
    def run(world, folder):
        model = nn.Linear(1, 1)
        loop(world, folder, model=model, optimizer=kind(model.parameters(), lr=0.1))

    return run


def layers(count):
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def others_scheduler(world, folder):
    loop(world, folder, scheduler=torch.optim.lr_scheduler.StepLR(parts()[1], 1))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([X])


def with_classes(*names):
    data = torch.utils.data.TensorDataset(X, Y)
    data.classes = names
    return data


class Resumed:
    """Stops within the first epoch, then resumes with something else."""

    def __init__(self, before=None, then=loop, **changed):
        self.before, self.then, self.changed = before or {}, then, changed

    def begin(self, folder):
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit), ht.join() as world:
            loop(world, folder, checkpoint_every_steps=1, stop_at=2, **self.before)

    def __call__(self, world, folder):
        self.then(world, folder, checkpoint_every_steps=1, **self.changed)


def of_another_model(world, folder, **more):
    model = nn.Linear(1, 1, bias=False)
    loop(world, folder, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more)


CASES = {
    "wrapped model": wrapped,
    "no model": lambda world, folder: loop(world, folder, model="net"),
    "model elsewhere": elsewhere,
    "nothing learns": frozen,
    "optimizer of another model": lambda world, folder: loop(world, folder, optimizer=parts()[1]),
    "optimizer not given": not_given,
    "optimizer with a closure": of(torch.optim.LBFGS),
    "optimizer of lists": of(Listing),
    "state that is a number": lambda world, folder: loop(world, folder, state={"best": 0.5}),
    "state without a name": lambda world, folder: loop(world, folder, state={"a b": {}}),
    "state that is not given": Resumed(before={"state": {"best": {"loss": 0.5}}}),
    "a layer since": Resumed(before=layers(2), **layers(1)),
    "optimizer twice": lambda world, folder: loop(world, folder, optimizer=(parts()[1], "adam")),
    "scheduler of another optimizer": others_scheduler,
    "scheduler without a state": lambda world, folder: loop(world, folder, scheduler=Stateless()),
    "scheduler with another state": lambda world, folder: loop(world, folder, scheduler=Unsaved()),
    "scheduler forgotten": lambda world, folder: loop(world, folder, forgets=True),
    "scheduler made late": lambda world, folder: loop(world, folder, late="scheduler"),
    "interval": lambda world, folder: loop(world, folder, keep_checkpoints=0),
    "epochs": lambda world, folder: loop(world, folder, epochs=0),
    "batch too large": lambda world, folder: loop(world, folder, batch_size=64),
    "batch of nothing": lambda world, folder: loop(world, folder, batch_size=0),
    "empty data": lambda world, folder: loop(world, folder, data=[]),
    "iterable data": lambda world, folder: loop(world, folder, data=Stream()),
    "step forgotten": lambda world, folder: loop(world, folder, steps=False),
    "step alone": step_alone,
    "batches outside": outside,
    "prefetched": reading(ahead),
    "update every fourth": reading(lambda run: run.batches((X, Y), 8), 4),
    "batch left out": left_out,
    "sampler": reading(lambda run: run.batches((X, Y), 8, sampler=[0, 1])),
    "loader given": lambda world, folder: loop(world, folder, data=DataLoader([0.0])),
    "loader of its own": reading(lambda _: DataLoader(TensorDataset(X, Y), 8)),
    "second set cycled": beside(lambda run: itertools.cycle(run.batches((X, Y), 16))),
    "second set again": beside(lambda run: itertools.chain(*(run.batches((X, Y), 16) for _ in range(2)))),
    "second set faster": beside(twice),
    "batches twice": lambda world, folder: loop(world, folder, reads=2),
    "report outside": report_outside,
    "no steps": no_steps,
    "two runs": two_runs,
    "step before the update": lambda world, folder: loop(world, folder, late="update"),
    "schedule after the step": lambda world, folder: loop(world, folder, late="schedule", schedules=True),
    "loss of several": lambda world, folder: loop(world, folder, loss_of=lambda each: each),
    "loss of nothing": lambda world, folder: loop(world, folder, loss_of=lambda each: {}),
    "loss unseen": by_hand,
    "reported name": lambda world, folder: loop(world, folder, report={"epoch": 1}),
    "best without report": lambda world, folder: loop(world, folder, highest="accuracy", report={"acc": 1}),
    "diverging": lambda world, folder: loop(world, folder, lr=1e30, epochs=9),
    "another batch": Resumed(batch_size=4),
    "other classes": Resumed(data=with_classes("pear", "plum"), before={"data": with_classes("apple", "pear")}),
    "another seed": Resumed(seed=1),
    "a scheduler since": Resumed(schedules=True),
    "another model": Resumed(then=of_another_model),
    "unwritable": lambda world, folder: loop(world, "/proc/runs"),
    "engine": {"engine": "mirrored"},
    "device": {"device": "gpu"},
    "compression": {"compression": "zip"},
    "variable": {},
}
"""Programs by name, or what `join` is given."""


def ended(case, folder):
    """Exit code and stderr of a case."""
    err = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            if isinstance(case, Resumed):
                case.begin(folder)
            with ht.join(**case if isinstance(case, dict) else {}) as world:
                case(world, folder)
        except SystemExit as error:
            code = error.code
    return [code, err.getvalue()]
