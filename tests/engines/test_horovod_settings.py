"""Horovod's settings for a run."""

import functools

import pytest

from hvdtrain.core.recipe import load
from hvdtrain.engines import horovod_settings
from hvdtrain.launch.devices import visible_gpus

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


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """What the driver of every host shows."""
    monkeypatch.setattr(horovod_settings, "visible_gpus", functools.partial(visible_gpus, count=lambda path: 2))


@pytest.mark.parametrize(("keys", "environ", "wanted"), SETTINGS.values(), ids=SETTINGS.keys())
def test_variables(keys, environ, wanted):
    assert horovod_settings.variables(load("linear", keys), environ) == wanted


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
def test_what_is_communicated_together(keys, environ, wanted):
    assert horovod_settings.fusion_bytes(load("linear", keys), environ) == wanted
