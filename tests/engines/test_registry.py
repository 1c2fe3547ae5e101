"""Engines by name: who has them, what they refuse, which devices they take, before any framework is loaded; Horovod's
settings."""

import dataclasses
import functools

import pytest
from choices import choice
from refusals import refusal

from hvdtrain.core import compatibility, recipe, settings, values
from hvdtrain.engines import registry
from hvdtrain.errors import DeviceError, RecipeError
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.topology import Topology


@pytest.mark.parametrize(
    ("name", "adapter", "launcher", "chosen"),
    [
        ("auto", "torch", "alone", "local"),
        ("auto", "tensorflow", "srun", "horovod"),
        ("auto", "lightning", "torchrun", "horovod"),
        ("ddp", "torch", "alone", "ddp"),
        ("parameter-server", "tensorflow", "mpirun", "parameter-server"),
    ],
)
def test_the_engine_that_a_name_means(name, adapter, launcher, chosen):
    engine = registry.choose(name, dataclasses.replace(Topology.alone(), launcher=launcher))
    assert engine.name == chosen
    compatibility.check_choice(choice(engine.name, adapter), {})


@pytest.mark.parametrize(
    ("name", "adapter"), [("mirrored", "torch"), ("ddp", "tensorflow"), ("modelparallel", "lightning")]
)
def test_the_other_frameworks_engine_is_refused(name, adapter):
    its = ", ".join(engine for engine, row in registry.ENGINES.items() if adapter in row.classes)
    message = f"engine {name} is none of hvdtrain.{adapter}'s; take one of {its}."
    assert refusal(RecipeError, compatibility.check_choice, choice(name, adapter), {}) == message


REFUSED = [
    (
        "modelparallel",
        {"model": "vgg16"},
        "model vgg16 cannot be with engine modelparallel, which knows the layers of linear, resnet50 and resnet101 "
        "alone; take --engine ddp.",
    ),
    (
        "ddp",
        {"model": "keras.applications:VGG16"},
        "model keras.applications:VGG16 is TensorFlow's, this run is PyTorch's; take one of torchvision, as "
        "torchvision:resnet101.",
    ),
    (
        "mirrored",
        {"model": "timm:vit_tiny_patch16_224"},
        "model timm:vit_tiny_patch16_224 is PyTorch's, this run is TensorFlow's; take one of keras.applications, as "
        "keras.applications:InceptionV3.",
    ),
    (
        "modelparallel",
        {"compile": True},
        "compile cannot be with engine modelparallel, whose network lies on several devices; drop it.",
    ),
    (
        "ddp",
        {"reduction": "adasum"},
        "reduction adasum is Horovod's alone, this run takes engine ddp; drop it.",
    ),
    (
        "mirrored",
        {"horovod_timeline": True},
        "horovod_timeline True is Horovod's alone, this run takes engine mirrored; drop it.",
    ),
    (
        "horovod",
        {"compression": "bf16"},
        "compression must be one of none, fp16, fp64 with engine horovod, got bf16.",
    ),
    (
        "modelparallel",
        {"compression": "fp16"},
        "compression must be one of none, fp64 with engine modelparallel, got fp16.",
    ),
    (
        "dataparallel",
        {"batch_norm": "sync"},
        "batch_norm sync needs ranks, which engine dataparallel has not; take local, or --engine ddp.",
    ),
]


@pytest.mark.parametrize(("engine", "keys", "message"), REFUSED)
def test_what_an_engine_cannot_do_is_refused(engine, keys, message):
    requested = choice(engine, recipe=recipe.load("digits", keys))
    assert refusal(RecipeError, compatibility.check_choice, requested, {}) == message


@pytest.mark.parametrize("name", values.known())
def test_every_engine_takes_the_shipped_recipes(name):
    shipped = recipe.load(name)
    engines = {key: row for key, row in registry.ENGINES.items() if (name, key) != ("text", "modelparallel")}
    for engine, row in engines.items():
        for adapter in row.classes:
            compatibility.check_choice(choice(engine, adapter, shipped), {})


DEVICES = {
    "a rank's own": (("ddp", None, 4, "auto"), ()),
    "all GPUs": (("modelparallel", None, 4, "auto"), ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
    "named": (("modelparallel", "cuda:1,cpu", 4, "auto"), ("cuda:1", "cpu")),
    "the CPU": (("mirrored", None, 0, "auto"), ("cpu",)),
    "the CPU beside GPUs": (("mirrored", None, 4, "cpu"), ("cpu",)),
    "two CPUs": (("modelparallel", "cpu,cpu", 0, "auto"), ("cpu", "cpu")),
}


@pytest.mark.parametrize(("wanted", "given"), DEVICES.values(), ids=DEVICES)
def test_the_devices_of_an_engine(wanted, given):
    name, *rest = wanted
    assert registry.devices_of(registry.ENGINES[name], *rest) == given


def check_devices(name, flag, visible, wanted):
    devices = registry.devices_of(registry.ENGINES[name], flag, visible, wanted)
    compatibility.check_choice(choice(name, devices=devices, devices_flag=flag), {})


ONE_DEVICE = (
    "engine {} needs at least 2 devices, this process has 1 ({}); ask for more GPUs, or name them: --devices "
    "cuda:0,cuda:1"
)
TAKERS = [name for name, row in registry.ENGINES.items() if row.devices]
UNLIKE = "--devices must be different GPUs, or cpu several times, got"
TOO_FEW = {
    "a CPU box": (("dataparallel", None, 0, "auto"), ONE_DEVICE.format("dataparallel", "cpu")),
    "one GPU": (("modelparallel", None, 1, "auto"), ONE_DEVICE.format("modelparallel", "cuda:0")),
    "CPUs for DataParallel": (
        ("dataparallel", "cpu,cpu", 0, "auto"),
        "engine dataparallel knows GPUs only, got --devices cpu,cpu; take --engine modelparallel or ddp.",
    ),
    "nonsense": (
        ("modelparallel", "gpu0,gpu1", 2, "auto"),
        "--devices must list devices such as cuda:0,cuda:1 or cpu,cpu, got 'gpu0'.",
    ),
    "a mixture": (("mirrored", "cuda:0,cpu", 0, "auto"), f"{UNLIKE} cuda:0,cpu."),
    "a GPU twice": (("central", "cuda:0,cuda:0", 0, "auto"), f"{UNLIKE} cuda:0,cuda:0."),
    "a rank's own": (
        ("horovod", "cpu,cpu", 0, "auto"),
        f"--devices goes with engine {', '.join(TAKERS)}, got engine horovod; drop it.",
    ),
}


@pytest.mark.parametrize(("wanted", "message"), TOO_FEW.values(), ids=TOO_FEW)
def test_devices_that_are_not_there_are_refused(wanted, message):
    assert refusal(DeviceError, check_devices, *wanted) == message


def test_another_compression_is_found_everywhere(monkeypatch, make_plan):
    row = settings.Compression("float8_e5m2", 1, ("ddp", "multiworker"), frameworks=("torch",))
    monkeypatch.setitem(settings.COMPRESSIONS, "fp8", row)
    assert "fp8" in registry.ENGINES["ddp"].compressions("torch")
    chosen = recipe.load("linear").model_copy(update={"compression": "fp8"})
    message = "compression must be one of none, fp16, fp64 with engine horovod, got fp8."
    assert refusal(RecipeError, compatibility.check_choice, choice("horovod", recipe=chosen), {}) == message
    compatibility.check_choice(choice("ddp", recipe=chosen), {})
    message = "compression must be one of none, fp64 with engine multiworker, got fp8."
    assert refusal(RecipeError, compatibility.check_choice, choice("multiworker", "tensorflow", chosen), {}) == message
    plan = make_plan("linear")
    assert dataclasses.replace(plan, recipe=chosen).gradient_bytes == plan.parameters


ONE_HOST = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}
TWO_HOSTS = {**ONE_HOST, "LOCAL_WORLD_SIZE": "2"}
GPUS = {**TWO_HOSTS, "CUDA_VISIBLE_DEVICES": "0,1"}

SETTINGS = {
    "one host": ({}, ONE_HOST, {"HOROVOD_CYCLE_TIME": "0.5"}),
    "one host, the user's": ({}, {**ONE_HOST, "HOROVOD_CYCLE_TIME": "3"}, {"HOROVOD_CYCLE_TIME": "3"}),
    "two hosts": ({}, TWO_HOSTS, {"HOROVOD_CYCLE_TIME": "10"}),
    "two hosts, the recipe's": ({"cycle_time_ms": 2.5}, TWO_HOSTS, {"HOROVOD_CYCLE_TIME": "2.5"}),
    "two hosts, the user's": (
        {},
        {**TWO_HOSTS, "HOROVOD_CYCLE_TIME": "3"},
        {"HOROVOD_CYCLE_TIME": "3"},
    ),
    "two hosts, autotune finds out": ({"autotune": True}, TWO_HOSTS, {"HOROVOD_AUTOTUNE": "1"}),
    "GPUs": ({}, GPUS, {}),
    "GPUs that are not used": ({"device": "cpu"}, GPUS, {"HOROVOD_CYCLE_TIME": "10"}),
    "fusion": (
        {"fusion_threshold_mb": 2},
        ONE_HOST,
        {"HOROVOD_FUSION_THRESHOLD": str(2 * 2**20), "HOROVOD_CYCLE_TIME": "0.5"},
    ),
}


@pytest.fixture
def two_gpus(monkeypatch):
    """What the driver of every host shows."""
    monkeypatch.setattr(
        registry, "visible_gpus", functools.partial(visible_gpus, nvidia=lambda path: ("GPU-a", "GPU-b"))
    )


@pytest.mark.parametrize(("keys", "environ", "wanted"), SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.usefixtures("two_gpus")
def test_horovods_variables(keys, environ, wanted):
    assert registry.horovod_variables(recipe.load("linear", keys), environ) == wanted


MIB = 2**20
FUSION_BYTES = {
    "one host": ({}, ONE_HOST, 2 * MIB),
    "two hosts": ({}, TWO_HOSTS, 2 * MIB),
    "the recipe's": ({"fusion_threshold_mb": 3}, TWO_HOSTS, 3 * MIB),
    "each alone": ({"fusion_threshold_mb": 0}, ONE_HOST, 0),
    "the user's": ({}, {**ONE_HOST, "HOROVOD_FUSION_THRESHOLD": "1000"}, 1000),
    "found by autotune": ({"autotune": True}, TWO_HOSTS, None),
    "Adasum": ({"reduction": "adasum"}, TWO_HOSTS, None),
    "GPUs": ({}, GPUS, None),
    "GPUs of one host": ({}, {**GPUS, **ONE_HOST, "CUDA_VISIBLE_DEVICES": "0"}, None),
}


@pytest.mark.parametrize(("keys", "environ", "wanted"), FUSION_BYTES.values(), ids=FUSION_BYTES.keys())
@pytest.mark.usefixtures("two_gpus")
def test_what_is_communicated_together(keys, environ, wanted):
    assert registry.fusion_bytes(recipe.load("linear", keys), environ) == wanted
