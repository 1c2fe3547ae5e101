"""What every kind of run sets up before it begins."""

import math
import os

import pytest

from hvdtrain import processors
from hvdtrain.core.recipe import load
from hvdtrain.launch import devices
from hvdtrain.launch.topology import Topology
from hvdtrain.run.setup import with_readers

READERS = {  # recipe, framework, GPUs, CPUs that the rank may use of 16, ranks of the host; how many read
    "one beside a network on the CPU": ("imagenet", "torch", 0, 16, 1, 1),
    "all cores but one beside a GPU": ("imagenet", "torch", 1, 16, 1, 15),
    "four ranks share a host": ("imagenet", "tensorflow", 4, 16, 4, 3),
    "a rank that is bound": ("imagenet", "torch", 4, 4, 4, 3),
    "a rank of one core": ("imagenet", "torch", 1, 1, 1, 1),
    "in memory": ("cifar100", "torch", 1, 16, 1, 0),
}


def of_host(ranks):
    return Topology(0, ranks, 0, ranks, 0, "nid1", "horovodrun", None)


@pytest.mark.parametrize(("name", "framework", "gpus", "cpus", "ranks", "expected"), READERS.values(), ids=READERS)
def test_how_many_readers_are_chosen(name, framework, gpus, cpus, ranks, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(processors, "quota", lambda: math.inf)
    monkeypatch.setattr(devices, "visible_gpus", lambda _: gpus)
    recipe, (line,) = with_readers(load(name, {"workers": "auto"}), of_host(ranks), framework)
    assert recipe.workers == expected
    assert line.startswith(f"readers     {expected} a rank, which has ")


def test_a_number_is_kept():
    recipe = load("imagenet", {"workers": 5})
    assert with_readers(recipe, of_host(1), "torch") == (recipe, [])
