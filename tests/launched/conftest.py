"""Ranks without a framework, for tests of their world: support/world_ranks.py, in one process for all of them."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from paths import SUPPORT
from ranks import clean_environ

jobs = itertools.count(os.getpid() * 7)


@pytest.fixture(scope="session")
def starter():
    program = [sys.executable, SUPPORT / "world_ranks.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, env=clean_environ(), **pipes) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def start_ranks(starter, tmp_path):
    """`start_ranks(3, steps=50)`: how those ranks ended, and their job."""

    def start(size, **spec):
        given = {"folder": str(tmp_path), "size": size, "job": next(jobs), **spec}
        print(json.dumps(given), file=starter.stdin, flush=True)
        return {**json.loads(starter.stdout.readline()), "job": given["job"]}

    return start


@pytest.fixture
def job():
    """The number of a job that no other test has."""
    return next(jobs)
