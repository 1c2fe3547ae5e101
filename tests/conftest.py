"""Fixtures that several test files share."""

import pytest

pytest_plugins = ["core_fixtures"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """`world("mpi-2", "tensorflow")`: what that start of worlds.STARTS gave; each is started once a session."""
    from worlds import begin

    begun = {}

    def of(name, framework="torch"):
        key = f"{framework}-{name}"
        if key not in begun:
            begun[key] = None
            begun[key] = begin(framework, name, tmp_path_factory.mktemp(key))
        assert begun[key], f"the start {key} failed before"
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


SLOW = (
    "test_agreement", "test_bench", "test_build_horovod", "test_cluster_", "test_doctor", "test_engines",
    "test_frameworks", "test_input", "test_labs_", "test_launch", "test_lifeline", "test_lightning_ranks",
    "test_pictures", "test_restart", "test_tensorflow_", "test_torch_",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption(
        "--cluster", action="store_true", help="also the tests on a SLURM of several nodes, brought up here"
    )


def pytest_collection_modifyitems(config, items):
    """The fast tests first: those that start ranks come last. Those of a cluster only where they are asked for."""
    items.sort(key=lambda item: item.path.suffix == ".ipynb" or item.path.name.startswith(SLOW))
    if not config.getoption("--cluster"):
        for item in items:
            if item.get_closest_marker("cluster"):
                item.add_marker(pytest.mark.skip(reason="needs root and a SLURM of several nodes: make cluster-test"))
