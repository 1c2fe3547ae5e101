"""Fixtures that several test files share."""

import pytest

pytest_plugins = ["core_fixtures"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """`world("mpi-2")`: what that start of torch_worlds.STARTS gave; each is started once a session."""
    from torch_worlds import begin

    begun = {}

    def of(name):
        if name not in begun:
            begun[name] = None
            begun[name] = begin(name, tmp_path_factory.mktemp(name))
        assert begun[name], f"the start {name} failed before"
        return begun[name]

    return of


def pytest_collection_modifyitems(items):
    """The fast tests first: those that start ranks come last."""
    slow = ("test_torch_", "test_bench", "test_build_horovod")
    items.sort(key=lambda item: item.path.name.startswith(slow))
