"""The optimizers beside the papers' formulas in NumPy, their state and its copies, averaged weights, the norm of the
gradients, and what is refused of a user's optimizer."""

from unittest.mock import MagicMock

import numpy as np
import optimizer_reference as reference
import pytest
from ranks import needs_torch
from refusals import refusal

pytestmark = needs_torch
torch = pytest.importorskip("torch")

from hvdtrain.core import optimizers as settings  # noqa: E402
from hvdtrain.core import recipe  # noqa: E402
from hvdtrain.errors import CheckpointError, RecipeError  # noqa: E402
from hvdtrain.record.checkpoint import Checkpoint  # noqa: E402
from hvdtrain.torch import optimizers  # noqa: E402
from hvdtrain.torch.engines.local import LocalEngine  # noqa: E402
from hvdtrain.torch.models import Ema  # noqa: E402
from hvdtrain.torch.state import Copies, State  # noqa: E402
from hvdtrain.torch.step import Step  # noqa: E402
from hvdtrain.torch.trainer import Trainer  # noqa: E402

LIMITS = {"float64": (torch.float64, 1e-12), "float32": (torch.float32, 1e-6)}
NONE = torch.amp.GradScaler("cpu", enabled=False)


def network(dtype=torch.float64):
    model = torch.nn.Module()
    for name, start in reference.START.items():
        model.register_parameter(name, torch.nn.Parameter(torch.tensor(start, dtype=dtype)))
    return model


def made(model, **keys):
    return optimizers.make(recipe.load("linear", keys), model, 0.1, keys.get("fused_optimizer", False))


def update(model, optimizer, step):
    for name, gradient in reference.GRADIENTS[step].items():
        parameter = model.get_parameter(name)
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(reference.LRS[step])
        else:
            group["lr"] = reference.LRS[step]
    optimizer.step()


@pytest.mark.parametrize("is_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("case", reference.CASES)
def test_twenty_updates_are_the_papers(case, precision, is_tensor):
    dtype, limit = LIMITS[precision]
    model = network(dtype)
    fused = is_tensor and reference.CASES[case]["optimizer"] in {"adam", "adamw"}
    optimizer = made(model, **reference.CASES[case], fused_optimizer=fused)
    if is_tensor:  # as a CUDA graph needs it
        optimizer.param_groups[0]["lr"] = torch.tensor(0.0, dtype=torch.float64)
    for step in range(20):
        update(model, optimizer, step)
    for name, expected in reference.weights(case).items():
        np.testing.assert_allclose(model.get_parameter(name).detach(), expected, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("kind", [optimizers.LAMB, optimizers.LARS])
def test_a_closure_computes_the_gradients(kind):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert optimizer.step(closure) < 4


USERS = {
    "adagrad": {"optimizer": "torch.optim:Adagrad"},
    "radam": {"optimizer": "torch.optim:RAdam"},
    "nadam": {"optimizer": "torch.optim:NAdam"},
    "sgd": {"optimizer": "torch.optim:SGD", "optimizer_args": {"momentum": 0.9}},
    "rmsprop": {"optimizer": "torch.optim:RMSprop", "optimizer_args": {"momentum": 0.9}},
    "counting": {"optimizer": "test_optimizers:Counting"},
}


class Counting(torch.optim.SGD):
    """Keeps a number beside each parameter that is no tensor, and steps by it."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            count = self.state[parameter].get("count", 0) + 1
            self.state[parameter]["count"] = count
            parameter.data.sub_(parameter.grad / count, alpha=self.param_groups[0]["lr"])


class Listing(torch.optim.SGD):
    """Keeps what no checkpoint holds."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = [parameter.clone()]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "test_optimizers", sys.modules[__name__])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("keys", [*reference.CASES.values(), *USERS.values()], ids=[*reference.CASES, *USERS])
def test_what_a_checkpoint_holds_continues_to_the_bit(keys, dtype):
    model, again = network(dtype), network(dtype)
    optimizer, resumed = made(model, **keys), made(again, **keys)
    state, target = State(model, [optimizer], NONE), State(again, [resumed], NONE)
    for step in range(6):
        update(model, optimizer, step)
    kept = Checkpoint(state.snapshot(), {"step": 6})
    target.start(kept.layout, state.values())
    target.load(kept)
    assert target.tensors.keys() == state.tensors.keys() == kept.arrays.keys()
    for step in range(6, 12):
        update(model, optimizer, step)
        update(again, resumed, step)
    ended = target.arrays()
    for name, array in state.arrays().items():
        assert (ended[name].dtype, ended[name].tobytes()) == (array.dtype, array.tobytes()), name
    assert target.values() == state.values()


class RMSprop(settings.Momentum):
    @property
    def slots(self):
        return ("square_avg", *super().slots)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", [*settings.NAMED, "rmsprop"])
def test_the_table_names_what_the_optimizer_keeps(name, momentum, monkeypatch):
    monkeypatch.setitem(settings.NAMED, "rmsprop", RMSprop)
    monkeypatch.setitem(optimizers.KINDS, "rmsprop", torch.optim.RMSprop)
    monkeypatch.setattr(RMSprop, "has_step", True)
    keys = {"optimizer": name} | ({"momentum": momentum} if "momentum" in settings.NAMED[name].model_fields else {})
    optimizer = made(model := network(), **keys)
    tensors = State(model, [optimizer], NONE).tensors.keys()
    update(model, optimizer, 0)
    slots = settings.settings(recipe.load("linear", keys)).slots
    assert {slot.partition(".")[0] for slot in tensors} - {"model", "step"} == set(slots)
    assert all(kept.keys() - {"step"} == set(slots) for kept in optimizer.state.values()) or not slots
    assert State(model, [optimizer], NONE).tensors.keys() == tensors


def test_what_no_checkpoint_holds_is_refused():
    model = network()
    optimizer = made(model, optimizer="test_optimizers:Listing")
    update(model, optimizer, 0)
    message = "optimizer Listing keeps a list as old.kernel, which no checkpoint holds; take another optimizer."
    assert refusal(CheckpointError, State(model, [optimizer], NONE).values) == message


def test_slots_of_another_model_are_refused():
    model = network()
    state = State(model, [made(model, optimizer="torch.optim:RAdam")], NONE)
    message = "the checkpoint holds exp_avg.other, but the model has no other; build it before the start, or give "
    message += "another --output."
    assert refusal(CheckpointError, state.start, {"exp_avg.other": ("float32", [3])}, {}) == message


def returns_text(parameters, lr):
    return "optimizer"


REFUSED = {  # the import path, its arguments, and the message
    "an unknown argument": (
        "torch.optim:RAdam", {"x": 1},
        " refuses its arguments: RAdam.__init__() got an unexpected keyword argument 'x'. It takes params, lr, betas, ",
    ),
    "a wrong value": ("torch.optim:RAdam", {"eps": -1.0}, " refuses its arguments: Invalid epsilon value: -1.0."),
    "no optimizer": ("test_optimizers:returns_text", {}, " must return a torch.optim.Optimizer, got str."),
}  # fmt: skip


@pytest.mark.parametrize(("path", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_of_a_users_optimizer(path, arguments, message):
    text = refusal(RecipeError, made, network(), optimizer=path, optimizer_args=arguments)
    assert text.startswith(f"optimizer {path}{message}")


def test_the_average_of_the_weights_is_numpys():
    model = network()
    optimizer, ema = made(model, optimizer="adamw"), Ema(model, reference.EMA_DECAY)
    followed = []
    for step in range(20):
        update(model, optimizer, step)
        ema.update()
        followed.append({name: value.detach().numpy().copy() for name, value in model.named_parameters()})
    before = {name: value.detach().numpy().tobytes() for name, value in model.named_parameters()}
    with ema.swapped_in():
        for name, value in model.named_parameters():
            expected = reference.averages((weights[name] for weights in followed), reference.START[name])
            np.testing.assert_allclose(value.detach(), expected, rtol=0, atol=1e-12)
    assert {name: value.detach().numpy().tobytes() for name, value in model.named_parameters()} == before


def test_each_rank_draws_its_own_dropout():
    def drawn(rank):
        given = {"recipe.seed": 0, "engine.rank": rank, "engine.device": torch.device("cpu"), "profiler": None}
        Trainer.update(MagicMock(**given), [], 0.1, 3)
        return torch.rand(()).item()

    assert drawn(0) == drawn(0) != drawn(1)


NORMS = {  # of the averaged gradients, before they are clipped, in every precision
    "plain": {},
    "clipped": {"clip_norm": 0.01},
    "two micro-batches": {"accumulation_steps": 2},
    "float16": {"precision": "float16"},
    "float16, an optimizer that takes the scale": {"precision": "float16", "fused_optimizer": True},
    "float16, clipped": {"precision": "float16", "clip_norm": 0.01},
}


@pytest.mark.parametrize("case", NORMS)
def test_the_norm_is_that_of_the_losss_gradient(case):
    chosen = recipe.load("linear", {"momentum": 0.5, **NORMS[case]})
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    step = Step(chosen, LocalEngine(torch.device("cpu")), model, lr=0.1)
    assert step.gradient_norm() is None
    x = torch.full((8, 1), 0.25)  # float16 overflows with more
    step([(x, 0 * x)] * chosen.accumulation_steps, lr=0.1)  # the loss (w x + b)^2 / 2 or (w x + b)^2
    factor = step.gradient_norm() / (0.25 * 1.0625**0.5)
    assert factor == pytest.approx(round(factor), rel=2e-3)
    assert round(factor) in {1, 2}


def tensors() -> dict[str, torch.Tensor]:
    images = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    return {
        "weight": torch.nn.Parameter(torch.randn(3, 2)),
        "float64": torch.randn(4, dtype=torch.float64),
        "step": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "channels last": images.to(memory_format=torch.channels_last),
        "a part": images[:, 1],
        "expanded": torch.ones(1).expand(5),
    }


def test_copies_are_equal_and_stay_when_the_tensors_change():
    copies, live = Copies(), tensors()
    wanted = {name: tensor.detach().numpy().copy() for name, tensor in live.items()}
    found = copies.copy(live)
    with torch.no_grad():
        for name in ("weight", "float64", "step", "a part"):
            live[name].zero_()
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    assert found["channels last"].strides == live["channels last"].numpy().strides  # the copy moves no number


def test_the_memory_of_copies_is_taken_once():
    copies, live = Copies(), tensors()
    first = {name: array.ctypes.data for name, array in copies.copy(live).items()}
    again = {name: array.ctypes.data for name, array in copies.copy(live).items()}
    assert again == first
    del live["step"]
    live["float64"] = torch.ones(9)
    found = copies.copy(live)
    assert found.keys() == live.keys()
    np.testing.assert_array_equal(found["float64"], np.ones(9, np.float32))
