"""The ranks that the labs' tests share, and clusters of ipyparallel engines."""

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ranks():
    """Three ranks as a notebook starts them."""
    from labtools import Ranks

    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture
def start_engines(tmp_path, monkeypatch):
    """`start_engines(engines="mpi")`: a cluster of two ipyparallel engines, which ends with the test."""
    import ipyparallel

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for library in ("OMPI", "PRTE"):
        monkeypatch.setenv(f"{library}_ALLOW_RUN_AS_ROOT", "1")
        monkeypatch.setenv(f"{library}_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    started = []

    def start(**settings):
        cluster = ipyparallel.Cluster(n=2, log_level=40, **settings)
        cluster.start_cluster_sync()
        started.append(cluster)
        cluster.connect_client_sync().wait_for_engines(2, timeout=240)
        return cluster

    yield start
    for cluster in started:
        cluster.stop_cluster_sync()
