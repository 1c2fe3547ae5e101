"""Fixtures that several test files share."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HVDTRAIN_REPORT", "off")  # it takes a second or two of each run; tests of it switch it on

pytest_plugins = ["core_fixtures", "rerun"]
pytest.register_assert_rewrite("fault_tolerance")


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """`world("mpi-2", "tensorflow")`: the results of that launch of worlds.LAUNCHES, which is started once."""
    from ranks import once
    from worlds import begin

    @once
    def of(framework, name):
        return begin(framework, name, tmp_path_factory.mktemp(f"{framework}-{name}"))

    return lambda name, framework="torch": of(framework, name)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A SLURM of four nodes, which calls a silent node down after five minutes, as at many sites."""
    from cluster import minicluster

    patience = ("--slurmd-timeout", 300, "--kill-wait", 5)
    with minicluster(tmp_path_factory.mktemp("cluster"), "--nodes", 4, *patience) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def train_here():
    """`train_here("tensorflow", *argv)`: a run of one rank, in a process that makes all such runs of the session."""
    from ranks import Trainer

    trainers = {}

    def train(framework, *argv):
        if framework not in trainers:
            trainers[framework] = Trainer(framework)
        return trainers[framework].train(*argv)

    yield train
    for trainer in trainers.values():
        trainer.close()


@pytest.fixture(autouse=True)
def signals_as_before():
    """A run in pytest's own process ignores the warnings of a time limit from its end on, and every process that is
    started later would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


STARTS_RANKS = ("launched", "lab", "cluster")
LATER = (*STARTS_RANKS, "slow")
GROUPS = {
    "keras": re.compile("keras|tensorflow/test_fault"),
    "tensorflow": re.compile("tensorflow|test_frameworks"),
    "lightning": re.compile("lightning"),
}


def group_of(item):
    """The framework that the test's file or parameters name. A function's name may mention another framework."""
    given = item.nodeid.partition("::")[0] + item.nodeid.partition("[")[2]
    return next((name for name, words in GROUPS.items() if words.search(given)), None)


@pytest.hookimpl(wrapper=True)  # before pytest-xdist looks for the groups
def pytest_collection_modifyitems(items):
    """Marks as slow what is only_ci. Groups the tests that start ranks: pytest-xdist runs a group in one process, where
    each launch is started once, and begins with the largest groups. In a single process the fast tests come first."""
    for item in items:
        if item.get_closest_marker("only_ci"):
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("xdist_group"):
            if group := group_of(item):
                item.add_marker(pytest.mark.xdist_group(group))
            elif any(map(item.get_closest_marker, STARTS_RANKS)):
                item.add_marker(pytest.mark.xdist_group("torch"))
    items.sort(key=lambda item: any(map(item.get_closest_marker, LATER)))
    return (yield)


def pytest_collection_finish():
    """Thousands of tests would be looked at by every collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Some libraries print what lives until the end."""
    gc.unfreeze()


def pytest_xdist_auto_num_workers():
    """One more than there are processors, because ranks and notebooks often wait. With a quota below one processor one
    test runs at a time: ranks that wait would use up what those of other tests need."""
    from hvdtrain import processors

    there = min(len(os.sched_getaffinity(0)), processors.quota())
    return 1 if there < 1 else min(6, int(there) + 1)


def memory_has_room():
    """Whether tests' folders, and programs in them, can be in /dev/shm. Some containers have 64 MiB of it."""
    try:
        memory = os.statvfs("/dev/shm")
    except OSError:
        return False
    return not memory.f_flag & (os.ST_NOEXEC | os.ST_RDONLY) and memory.f_bavail * memory.f_frsize > 4 * 2**30


def import_this_checkout():
    """The installed hvdtrain may be another checkout's. Programs that tests start import the one beside this folder."""
    checkout = Path(__file__).parents[1]
    find = "import importlib.util; print(getattr(importlib.util.find_spec('hvdtrain'), 'origin', None))"
    found = subprocess.run([sys.executable, "-c", find], cwd="/", capture_output=True, text=True, check=True)
    if found.stdout.rstrip("\n") != str(checkout / "hvdtrain/__init__.py"):
        others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), *others])


def pytest_configure(config):
    """Starts the session that all processes of pytest-xdist share. Their folders are in memory: every checkpoint waits
    until the disk has it, for other tests' files too. Programs that tests start get Ctrl-C as at a terminal, which a
    shell's background jobs ignore. A program that a failed test would wait for in a `with` is killed."""
    from ranks import session

    session()
    import_this_checkout()
    if config.getoption("numprocesses", None) and memory_has_room():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored behind nohup
    wait = subprocess.Popen.__exit__

    def end(process, kind, error, traceback):
        if kind:
            process.kill()
        wait(process, kind, error, traceback)

    subprocess.Popen.__exit__ = end
