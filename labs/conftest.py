"""`make test-all` executes the labs at a small scale; the exercises' own tests are in tests/labs."""

import os

import pytest

os.environ.setdefault("HVDTRAIN_LAB_SCALE", "0.1")
collect_ignore_glob = ["*-exercise-*", "work/*"]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.lab)
            item.add_marker(pytest.mark.slow)
