"""An ear hears what the main thread cannot, and its children hear nothing of it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from hvdtrain.signals import ASKING_TO_STOP, NEAR, Ear


@pytest.fixture
def ear():
    ear = Ear()
    ear.open(lambda: None)
    yield ear
    ear.close()


@pytest.fixture
def taken(ear):
    """Another thread takes the warnings, as the line's does."""
    done = threading.Event()

    def take():
        ear.listen_here()
        done.wait()

    thread = threading.Thread(target=take)
    thread.start()
    yield
    done.set()
    thread.join()


def heard(ear):
    select.select([ear.hears], [], [], 10)
    return ear.read()


@pytest.mark.parametrize("number", ASKING_TO_STOP)
def test_a_signal_is_heard(ear, taken, number):
    os.kill(os.getpid(), number)
    assert heard(ear) == [number]
    assert ear.read() == []


def test_another_signal_is_not(ear, taken):
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGCHLD)
    assert heard(ear) == []
    signal.signal(signal.SIGCHLD, before)


def test_it_can_be_woken(ear):
    ear.wake()
    assert heard(ear) == []


def test_the_signals_are_given_back():
    before = [signal.signal(number, lambda number, frame: None) for number in ASKING_TO_STOP]
    ours = [signal.getsignal(number) for number in ASKING_TO_STOP]
    ear = Ear()
    ear.open(lambda: None)
    assert [signal.getsignal(number) for number in ASKING_TO_STOP] != ours
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(NEAR)
    ear.close()
    assert [signal.getsignal(number) for number in ASKING_TO_STOP] == ours
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(NEAR)
    assert signal.set_wakeup_fd(-1) == -1
    for number, handler in zip(ASKING_TO_STOP, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_started_program_outlives_the_warning(ear, taken, number, code):
    # SLURM may signal every process of a step, readers of data too.
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        child.send_signal(number)
        time.sleep(0.05)
        child.communicate(b"\n")
    assert child.returncode == code
    assert ear.read() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 3), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_forked_child_tells_its_parent_nothing(number, code):
    ear = Ear()
    told, tells = os.pipe()
    ear.open(lambda: os.write(tells, b"in child"))
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        os._exit(3)
    assert os.read(told, 100) == b"in child"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert ear.read() == []
    ear.close()
    os.close(told), os.close(tells)


def test_in_another_thread_it_is_deaf():
    before = [signal.getsignal(number) for number in ASKING_TO_STOP]
    ear = Ear()
    thread = threading.Thread(target=ear.open, args=(lambda: None,))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in ASKING_TO_STOP] == before
    ear.close()
