"""Fixtures that several test files share."""

import os

import pytest

os.environ.setdefault("HVDTRAIN_REPORT", "off")  # a second or two of each run; tests of the report switch it on

pytest_plugins = ["core_fixtures", "rerun"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """`world("mpi-2", "tensorflow")`: what that launch of worlds.LAUNCHES gave; each is started once a session."""
    from worlds import begin

    begun = {}

    def of(name, framework="torch"):
        key = f"{framework}-{name}"
        if key not in begun:
            begun[key] = None
            begun[key] = begin(framework, name, tmp_path_factory.mktemp(key))
        assert begun[key], f"the launch {key} failed before"
        return begun[key]

    return of


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Four nodes with a site's patience: SLURM itself calls a silent node down after five minutes."""
    from cluster import minicluster

    patience = ("--slurmd-timeout", 300, "--kill-wait", 5)
    with minicluster(tmp_path_factory.mktemp("cluster"), "--nodes", 4, *patience) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def train_here():
    """`train_here("tensorflow", *argv)`: a run of one process, which serves all of them in turn."""
    from ranks import Trainer

    trainers = {}

    def train(framework, *argv):
        if framework not in trainers:
            trainers[framework] = Trainer(framework)
        return trainers[framework].train(*argv)

    yield train
    for trainer in trainers.values():
        trainer.close()


LATER = ("launched", "lab", "slow", "cluster")


def pytest_collection_modifyitems(items):
    """Marks those slow whose names hold a word of their module's SLOW. The fast tests first: those that start ranks or
    notebooks come last."""
    for item in items:
        if any(word in item.name for word in getattr(getattr(item, "module", None), "SLOW", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: any(map(item.get_closest_marker, LATER)))
