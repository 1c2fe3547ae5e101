"""A watcher notices what the main thread cannot, and its children notice nothing of it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from hvdtrain.ranks.stop import SignalWatcher
from hvdtrain.terminal import STOP_SIGNALS, TIME_LIMIT_SIGNALS


@pytest.fixture
def watcher():
    watcher = SignalWatcher()
    watcher.open(lambda: None)
    yield watcher
    watcher.close()


@pytest.fixture
def taken(watcher):
    """Another thread takes the warnings, as the monitor's does."""
    done = threading.Event()

    def take():
        watcher.unblock_here()
        done.wait()

    thread = threading.Thread(target=take)
    thread.start()
    yield
    done.set()
    thread.join()


def seen(watcher):
    select.select([watcher.readable], [], [], 10)
    return watcher.read()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_seen(watcher, taken, number):
    os.kill(os.getpid(), number)
    assert seen(watcher) == [number]
    assert watcher.read() == []


def test_nohup_stays():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    watcher = SignalWatcher()
    watcher.open(lambda: None)
    watcher.unblock_here()
    os.kill(os.getpid(), signal.SIGHUP)
    watcher.wake()
    assert seen(watcher) == []
    watcher.close()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_another_signal_is_not(watcher, taken):
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGCHLD)
    assert seen(watcher) == []
    signal.signal(signal.SIGCHLD, before)


def test_the_signals_are_given_back():
    before = [signal.signal(number, lambda number, frame: None) for number in STOP_SIGNALS]
    ours = [signal.getsignal(number) for number in STOP_SIGNALS]
    watcher = SignalWatcher()
    watcher.open(lambda: None)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != ours
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(TIME_LIMIT_SIGNALS)
    watcher.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == ours
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(TIME_LIMIT_SIGNALS)
    assert signal.set_wakeup_fd(-1) == -1
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 3), (signal.SIGUSR2, 3), (signal.SIGTERM, -15)])
def test_a_warning_after_the_end_kills_nobody(number, code):
    pid = os.fork()
    if not pid:
        signal.signal(number, signal.SIG_DFL)
        watcher = SignalWatcher()
        watcher.open(lambda: None)
        watcher.close()
        os.kill(os.getpid(), number)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR2, 0), (signal.SIGHUP, 0), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_started_program_outlives_the_warning(watcher, taken, number, code):
    # SLURM may signal every process of a step, readers of data too.
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        child.send_signal(number)
        time.sleep(0.05)
        child.communicate(b"\n")
    assert child.returncode == code
    assert watcher.read() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 3), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_forked_child_reports_nothing_to_its_parent(number, code):
    watcher = SignalWatcher()
    read, written = os.pipe()
    watcher.open(lambda: os.write(written, b"in child"))
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        os._exit(3)
    assert os.read(read, 100) == b"in child"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert watcher.read() == []
    watcher.close()
    os.close(read), os.close(written)


def test_in_another_thread_it_sees_none():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    watcher = SignalWatcher()
    thread = threading.Thread(target=watcher.open, args=(lambda: None,))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    watcher.close()
