"""The optimizers' table: arguments from keys and optimizer_args, what is refused, and what follows from them."""

import ast

import pytest
from choices import choice
from paths import REPOSITORY
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.core import compatibility, optimizers, plan, recipe
from hvdtrain.core.network import Network
from hvdtrain.core.recipe import Recipe
from hvdtrain.errors import RecipeError
from hvdtrain.record.folder import model_identity

KEYS = {"name": "mine", "model": "linear", "dataset": "linear", "batch_size": 100, "epochs": 3, "base_lr": 0.5}
RADAM = {"optimizer": "torch.optim:RAdam"}


def made(**keys: object) -> Recipe:
    return recipe.validate({**KEYS, **keys})


def planned(**keys: object) -> plan.Plan:
    return plan.make(made(**keys), 1, datasets.load("linear"), Network(2, has_batch_norm=False))


TAKEN = {
    "sgd by keys": ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0}),
    "sgd by arguments": (
        {"optimizer_args": {"momentum": 0.9, "nesterov": True}},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    ),
    "adam": ({"optimizer": "adam"}, {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}),
    "adamw": (
        {"optimizer": "adamw", "optimizer_args": {"weight_decay": 0.05, "betas": [0.9, 0.99]}},
        {"weight_decay": 0.05, "betas": (0.9, 0.99), "eps": 1e-8},
    ),
    "lamb": (
        {"optimizer": "lamb", "weight_decay": 0.1},
        {"weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-6, "exclude_1d": True},
    ),
    "lars": (
        {"optimizer": "lars", "momentum": 0.9, "optimizer_args": {"trust_coefficient": 0.01, "exclude_1d": False}},
        {"weight_decay": 0.0, "momentum": 0.9, "trust_coefficient": 0.01, "eps": 1e-8, "exclude_1d": False},
    ),
}


@pytest.mark.parametrize(("keys", "expected"), TAKEN.values(), ids=TAKEN)
def test_arguments_of_the_named_ones(keys, expected):
    assert optimizers.settings(made(**keys)).model_dump() == expected


PATHS = f"{', '.join(optimizers.NAMED)}, or an import path such as torch.optim:RAdam"
OF_NAMED = "is of the named optimizers; give torch.optim:RAdam its own in optimizer_args."


def takers(key):
    return [name for name, kind in optimizers.NAMED.items() if key in kind.model_fields]


REFUSED = {
    "misspelt": ({"optimizer": "adma"}, f"optimizer must be {PATHS}, got 'adma'. Did you mean adam?"),
    "no text": ({"optimizer": 3}, "optimizer must be text, got 3."),
    "momentum of Adam": (
        {"optimizer": "adam", "momentum": 0.9},
        f"momentum goes with optimizer {' or '.join(takers('momentum'))}, got adam; drop it.",
    ),
    "Nesterov of LARS": (
        {"optimizer": "lars", "momentum": 0.9, "nesterov": True},
        "nesterov goes with optimizer sgd, got lars; drop it.",
    ),
    "momentum of the user's": ({**RADAM, "momentum": 0.9}, f"momentum {OF_NAMED}"),
    "weight decay of the user's": ({**RADAM, "weight_decay": 0.1}, f"weight_decay {OF_NAMED}"),
    "given twice": (
        {"optimizer": "adamw", "weight_decay": 0.1, "optimizer_args": {"weight_decay": 0.05}},
        "weight_decay must be given once: as a key, or in optimizer_args; drop one.",
    ),
    "unknown argument": (
        {"optimizer": "adam", "optimizer_args": {"amsgrad": True}},
        "optimizer adam has no argument 'amsgrad'; it takes betas, eps, weight_decay.",
    ),
    "the LR": (
        {"optimizer_args": {"lr": 0.1}},
        "optimizer sgd has no argument 'lr'; it takes momentum, nesterov, weight_decay.",
    ),
    "beta of 1": (
        {"optimizer": "adam", "optimizer_args": {"betas": [0.9, 1]}},
        "each of 'betas' in optimizer_args must be less than 1, got 1.",
    ),
    "Nesterov without momentum": (
        {"optimizer_args": {"nesterov": True}},
        "nesterov needs momentum above 0, got momentum=0.",
    ),
    "arguments that are a list": ({"optimizer_args": [1]}, "optimizer_args must map names to values, got [1]."),
    "Adasum of Adam": (
        {"optimizer": "adam", "reduction": "adasum"},
        "reduction adasum goes with optimizer sgd, got adam; drop one.",
    ),
    "fused LAMB": (
        {"optimizer": "lamb", "fused_optimizer": True},
        f"fused_optimizer goes with optimizer {', '.join(optimizers.fused())}, got lamb; drop it.",
    ),
    "decay of 1": ({"ema_decay": 1}, "ema_decay must be less than 1, got 1."),
    "decay of 0": ({"ema_decay": 0}, "ema_decay must be greater than 0, got 0."),
}
ARGUMENTS = [  # an argument of LAMB or LARS, its value, and the rule that it breaks
    ("lamb", "betas", [0.9], "have at least 2 values"),
    ("lamb", "betas", [0.9, 0.9, 0.9], "have at most 2 values"),
    ("lamb", "betas", 0.9, "be a list"),
    ("lamb", "eps", 0, "be greater than 0"),
    ("lars", "exclude_1d", "no", "be true or false"),
    ("lars", "momentum", 1.0, "be less than 1"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(keys, message):
    assert refusal(RecipeError, made, **keys) == message


@pytest.mark.parametrize(("optimizer", "name", "value", "rule"), ARGUMENTS)
def test_refused_arguments(optimizer, name, value, rule):
    message = refusal(RecipeError, made, optimizer=optimizer, optimizer_args={name: value})
    assert message == f"'{name}' in optimizer_args must {rule}, got {value!r}."


# Also how many numbers a checkpoint holds for each weight.
IDENTITIES = {
    "sgd": ({}, 1, "optimizer sgd"),
    "sgd with momentum": ({"momentum": 0.9}, 2, "optimizer sgd with momentum_buffer"),
    "sgd with momentum as argument": ({"optimizer_args": {"momentum": 0.9}}, 2, "optimizer sgd with momentum_buffer"),
    "sgd, averaged": ({"momentum": 0.9, "ema_decay": 0.9}, 3, "optimizer sgd with momentum_buffer, averaged weights"),
    "adam": ({"optimizer": "adam"}, 3, "optimizer adam with exp_avg and exp_avg_sq"),
    "adamw, averaged": (
        {"optimizer": "adamw", "ema_decay": 0.9},
        4,
        "optimizer adamw with exp_avg and exp_avg_sq, averaged weights",
    ),
    "lamb": ({"optimizer": "lamb"}, 3, "optimizer lamb with exp_avg and exp_avg_sq"),
    "lars": ({"optimizer": "lars", "momentum": 0.9}, 2, "optimizer lars with momentum_buffer"),
    "yours": (RADAM, 3, "optimizer torch.optim:RAdam"),
    "yours with arguments": (
        {**RADAM, "optimizer_args": {"eps": 0.1}},
        3,
        "optimizer torch.optim:RAdam {'eps': 0.1}",
    ),
}


@pytest.mark.parametrize(("keys", "copies", "identity"), IDENTITIES.values(), ids=IDENTITIES)
def test_what_a_checkpoint_holds_follows_from_the_optimizer(keys, copies, identity):
    made_plan = planned(**keys)
    assert made_plan.checkpoint_bytes == 2 * 4 * copies
    assert model_identity(made_plan) == f"linear, 2 parameters, {identity}"
    assert len(model_identity(planned(**RADAM, optimizer_args={"x": "y" * 4000}))) < 1000


def test_a_keras_optimizer_goes_with_plain_variables():
    nadam = made(optimizer="keras.optimizers:Nadam")
    for engine in ("horovod", "local"):
        compatibility.check_choice(choice(engine, "tensorflow", nadam), {})
    for engine in ("mirrored", "multiworker", "parameter-server"):
        assert refusal(RecipeError, compatibility.check_choice, choice(engine, "tensorflow", nadam), {}) == (
            "optimizer keras.optimizers:Nadam is Keras's, which goes with engine horovod or local, "
            f"got {engine}; take a named one."
        )


class RMSprop(optimizers.Momentum):
    """A slot that it always keeps, and one that a key decides on."""

    @property
    def slots(self):
        return ("square_avg", *super().slots)


def test_another_row_is_found_everywhere(monkeypatch):
    monkeypatch.setitem(optimizers.NAMED, "rmsprop", RMSprop)
    row = made(optimizer="rmsprop", weight_decay=0.1)
    assert optimizers.settings(row).model_dump() == {"weight_decay": 0.1, "momentum": 0.0}
    assert planned(optimizer="rmsprop").checkpoint_bytes == 2 * planned().checkpoint_bytes
    message = refusal(RecipeError, recipe.validate, {**KEYS, "optimizer": "rmsprob"})
    assert ", rmsprop, or an import path" in message
    assert message.endswith("Did you mean rmsprop?")
    assert f"fused_optimizer goes with optimizer {', '.join(optimizers.fused())}, got rmsprop" in refusal(
        RecipeError, recipe.validate, {**KEYS, "optimizer": "rmsprop", "fused_optimizer": True}
    )


@pytest.mark.parametrize("name", [*optimizers.NAMED, "rmsprop"])
def test_two_runs_with_other_slots_have_another_identity(name, monkeypatch):
    monkeypatch.setitem(optimizers.NAMED, "rmsprop", RMSprop)
    moving = {"momentum": 0.9} if "momentum" in optimizers.NAMED[name].model_fields else {}
    first, second = made(optimizer=name), made(optimizer=name, **moving)
    same_slots = optimizers.settings(first).slots == optimizers.settings(second).slots
    assert (optimizers.identity(first) == optimizers.identity(second)) == same_slots != bool(moving)
    assert optimizers.identity(first) != optimizers.identity(made(optimizer="adam" if name == "sgd" else "sgd"))


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_each_framework_has_every_optimizer_of_the_table(framework):
    tree = ast.parse((REPOSITORY / "hvdtrain" / framework / "optimizers.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "KINDS"]
    assert {key.value for key in assigned[0].value.keys} == optimizers.NAMED.keys()
