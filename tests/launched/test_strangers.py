"""Other users of the same node know job, step and ports. They neither join a run, nor end or delay it."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
from paths import SUPPORT

pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("waits")]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to play another user: run the tests as root")
NOBODY = 65534
HOST = socket.gethostname()
HOSTS = ["127.0.0.1"]


@pytest.fixture
def start(start_ranks):
    """`start(3, steps=50)`: how those ranks ended."""

    def start(size, **spec):
        constants = {"HEARTBEAT": 0.2, "SILENCE": 10, "GRACE": 1, "HANDSHAKE": 1, **spec.pop("constants", {})}
        return start_ranks(size, constants=constants, **spec)

    return start


def ports_of(job):
    """The ports on which rank 0 of the job's first step may listen: it takes the first free one."""
    first = 10_000 + job * 8 % 20_000
    return range(first, first + 7)


@contextlib.contextmanager
def stranger(what, **options):
    """Runs stranger.py beside the block."""
    command = [sys.executable, "-IS", SUPPORT / "stranger.py", what, json.dumps({"uid": NOBODY, **options})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", env={})
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
        assert what not in CONNECTING or "connected" in process.stdout.read()
    finally:
        process.kill()
        process.communicate()


CONNECTING = ("joins", "idles", "floods")


STRANGERS = {  # what another user does, and the ranks that start beside it
    "joins": (lambda job: {"token": f"{job}.0", "hosts": HOSTS}, {"steps": 600, "delay": {"1": 1}}),
    "idles": (
        lambda job: {"count": 1500, "hosts": HOSTS},
        {"steps": 600, "delay": {"2": 2}, "constants": {"HANDSHAKE": 5}, "files": True},
    ),
    "floods": (
        lambda job: {"hosts": HOSTS},
        {"steps": 20, "delay": {"1": 2, "2": 2}, "constants": {"HANDSHAKE": 600}},
    ),
    "squats": (lambda job: {"count": 6}, {"steps": 20, "constants": {"HANDSHAKE": 600}}),
}


@needs_root
@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_neither_becomes_a_rank_nor_delays_one(what, start, job):
    options, spec = STRANGERS[what]
    with stranger(what, port=ports_of(job)[0], **options(job)):
        ended = start(3, job=job, **spec)
    assert (ended["codes"], ended["err"]) == ([0] * 3, [""] * 3)
    assert max(ended["files"]) < 100


@needs_root
def test_a_stranger_who_takes_the_port_first_does_not_become_rank_0(start, job):
    with stranger("leads", port=ports_of(job)[0], token=f"{job}.0", size=3):
        ended = start(3, job=job, steps=300)
    assert ended["codes"] == [0, 0, 0], ended
    assert ended["err"][0] == ""
    for rank in (1, 2):
        noted = f"warning (rank {rank} on {HOST}): who answers at 127.0.0.1:{ports_of(job)[0]} has another key than"
        assert ended["err"][rank] == "" or ended["err"][rank].startswith(noted)
        assert len(ended["err"][rank].splitlines()) <= 1


@needs_root
def test_nobody_comes_between_a_rank_and_rank_0(start, job):
    with stranger("relays", port=ports_of(job)[0], to=ports_of(job)[1], hosts=HOSTS) as relay:
        ended = start(3, job=job, steps=300)
        relay.kill()
        assert "passed" in relay.stdout.read()
    assert ended["codes"] == [0, 0, 0], ended


def test_a_name_that_no_host_can_have_is_named(start):
    ended = start(2, nodelist="x..y", nodes=[0, 1], constants={"ARRIVAL": 1, "FAREWELL": 1, "RANK_0_REPORT": 1})
    assert ended["codes"] == [2, 2], ended
    assert "must have 1 to 63 characters between its dots, got 'x..y'" in ended["err"][0]


def test_a_rank_that_reports_what_it_is_busy_with_is_waited_for(start):
    ended = start(3, steps=20, reads={"1": 12}, constants={"ARRIVAL": 8})
    assert ended["codes"] == [0, 0, 0], ended
    waiting = f"warning (rank 0 on {HOST}): waiting for rank 1 on {HOST}, which prepares the data set linear."
    assert set(ended["err"][0].splitlines()) == {waiting}
    assert ended["err"][1:] == ["", ""]


def test_a_rank_that_lives_but_is_not_ready_is_named(start):
    ended = start(3, steps=20, idles={"1": 60}, constants={"ARRIVAL": 4, "RANK_0_REPORT": 1})
    assert ended["codes"][0] == 2
    assert f"rank 1 on {HOST} was not ready within 4 seconds" in ended["err"][0]


@pytest.mark.parametrize("where", ["HVDTRAIN_KEY", "home", "insecure"])
def test_where_the_key_is(where, start, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    environ = {"HOME": str(home), "XDG_CONFIG_HOME": ""}
    environ |= {"HVDTRAIN_KEY": "ab" * 32} if where == "HVDTRAIN_KEY" else {}
    argv = ["linear", "--output", str(tmp_path / "run"), *(["--insecure-rendezvous"] if where == "insecure" else [])]
    ended = start(3, steps=20, environ=environ, argv={str(rank): argv for rank in range(3)})
    assert ended["codes"] == [0, 0, 0], ended
    assert (home / ".config/hvdtrain/key").exists() == (where == "home")
    assert ended["err"][0].startswith("warning") == (where == "insecure")
    assert len(ended["err"][0].splitlines()) == (where == "insecure")
    assert ended["err"][1:] == ["", ""]


def test_without_a_key_a_run_is_refused_at_once(start):
    environ = {"HOME": "/proc/none", "XDG_CONFIG_HOME": "", "PATH": ""}
    ended = start(2, environ=environ, constants={"ARRIVAL": 600})
    assert ended["codes"] == [2, 2]
    assert ended["err"][0].startswith(
        f"WorldError (rank 0 on {HOST}): no key of this user's (/proc/none: no such home), and munge does not answer; "
    )
    assert len(ended["err"][0].splitlines()) == 1


def test_ranks_with_another_key_do_not_join(start, tmp_path):
    """As where nodes share no home."""
    keys = {"0": {"HVDTRAIN_KEY": "ab" * 32}, "1": {"HVDTRAIN_KEY": "cd" * 32}}
    ended = start(2, nodes=[0, 1], environs=keys, constants={"ARRIVAL": 4, "FAREWELL": 1, "RANK_0_REPORT": 1})
    assert ended["codes"] == [2, 2], ended
    assert "rank 1 of 2 did not come" in ended["err"][0]
    assert "has another key than this rank" in ended["err"][1]


def test_what_a_rank_reports_is_printed_without_escape_codes(start):
    ended = start(3, acts=[[2, 20, "escape"]])
    assert r"\x1b[31mred" in ended["err"][0]
    assert "\x1b" not in ended["err"][0]
    assert ended["codes"] == [2, 2, 2]
