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
    "one host": ({}, ONE_HOST, GROUPED),
    "two hosts": ({}, TWO_HOSTS, {**GROUPED, "HOROVOD_CYCLE_TIME": "10"}),
    "two hosts, the recipe says": ({"cycle_time_ms": 2.5}, TWO_HOSTS, {**GROUPED, "HOROVOD_CYCLE_TIME": "2.5"}),
    "two hosts, the user says": (
        {},
        {**TWO_HOSTS, "HOROVOD_CYCLE_TIME": "3"},
        {**GROUPED, "HOROVOD_CYCLE_TIME": "3"},
    ),
    "two hosts, autotune finds out": ({"autotune": True}, TWO_HOSTS, {"HOROVOD_AUTOTUNE": "1"}),
    "GPUs": ({}, GPUS, GROUPED),
    "GPUs that are not used": ({"device": "cpu"}, GPUS, {**GROUPED, "HOROVOD_CYCLE_TIME": "10"}),
    "fusion": ({"fusion_threshold_mb": 2}, ONE_HOST, {**GROUPED, "HOROVOD_FUSION_THRESHOLD": str(2 * 2**20)}),
}


@pytest.mark.parametrize(("keys", "environ", "wanted"), ASKED.values(), ids=ASKED.keys())
def test_variables(keys, environ, wanted):
    assert settings.variables(load("linear", keys), environ) == wanted


MIB = 2**20
GROUPS = {
    "all in one": ([1, 2, 3], None, [[1, 2, 3]]),
    "cut at 25": ([10, 10, 10, 5, 11], None, [[10, 10], [10, 5], [11]]),
    "one too large for a group": ([1, 40, 1], None, [[1], [40], [1]]),
    "as the recipe says": ([1, 2, 3], 3, [[1, 2], [3]]),
}


@pytest.mark.parametrize(("sizes", "megabytes", "wanted"), GROUPS.values(), ids=GROUPS.keys())
def test_gradients_travel_in_groups(sizes, megabytes, wanted):
    tensors = [SimpleNamespace(nbytes=size * MIB) for size in sizes]
    found = settings.groups(tensors, megabytes)
    assert [[tensor.nbytes // MIB for tensor in group] for group in found] == wanted
