"""What a run asks of Horovod."""

from types import SimpleNamespace

import pytest

from hvdtrain import settings
from hvdtrain.recipe import load

ONE_HOST = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}
TWO_HOSTS = {**ONE_HOST, "LOCAL_WORLD_SIZE": "2"}
GPUS = {**TWO_HOSTS, "CUDA_VISIBLE_DEVICES": "0,1"}
GROUPED = {"HOROVOD_DISABLE_GROUP_FUSION": "1"}

ASKED = {
    "one host": ({}, ONE_HOST, {}),
    "two hosts": ({}, TWO_HOSTS, {**GROUPED, "HOROVOD_CYCLE_TIME": "10"}),
    "two hosts, the recipe says": ({"cycle_time_ms": 2.5}, TWO_HOSTS, {**GROUPED, "HOROVOD_CYCLE_TIME": "2.5"}),
    "two hosts, the user says": (
        {},
        {**TWO_HOSTS, "HOROVOD_CYCLE_TIME": "3"},
        {**GROUPED, "HOROVOD_CYCLE_TIME": "3"},
    ),
    "two hosts, autotune finds out": ({"autotune": True}, TWO_HOSTS, {"HOROVOD_AUTOTUNE": "1"}),
    "GPUs": ({}, GPUS, {}),
    "GPUs that are not used": ({"device": "cpu"}, GPUS, {**GROUPED, "HOROVOD_CYCLE_TIME": "10"}),
    "fusion": ({"fusion_threshold_mb": 2}, ONE_HOST, {"HOROVOD_FUSION_THRESHOLD": str(2 * 2**20)}),
}


@pytest.mark.parametrize(("keys", "environ", "wanted"), ASKED.values(), ids=ASKED.keys())
def test_variables(keys, environ, wanted):
    assert settings.variables(load("linear", keys), environ) == wanted


MIB = 2**20
GROUPS = {
    "all in one": ([3, 2, 1], {}, [[1, 2, 3]]),
    "cut at 25": ([11, 5, 10, 10, 10], {}, [[10, 10], [10, 5], [11]]),
    "one too large for a group": ([1, 40, 1], {}, [[1], [40], [1]]),
    "as the recipe says": ([3, 2, 1], {"fusion_threshold_mb": 3}, [[1, 2], [3]]),
    "each alone": ([3, 2, 1], {"fusion_threshold_mb": 0}, None),
    "found by autotune": ([3, 2, 1], {"autotune": True}, None),
}


@pytest.mark.parametrize(("sizes", "keys", "wanted"), GROUPS.values(), ids=GROUPS.keys())
def test_gradients_travel_in_groups(sizes, keys, wanted):
    tensors = [SimpleNamespace(nbytes=size * MIB) for size in sizes]
    found = settings.groups(load("linear", keys), TWO_HOSTS, tensors)
    assert (found and [[tensor.nbytes // MIB for tensor in group] for group in found]) == wanted


def test_on_one_host_horovod_sends_what_is_ready():
    assert settings.groups(load("linear"), ONE_HOST, [SimpleNamespace(nbytes=MIB)]) is None
