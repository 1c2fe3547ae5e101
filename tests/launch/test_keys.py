"""The key of a run: where it is kept, who else could have it, and the message to ranks without one."""

import multiprocessing
import os
import shutil
import stat
import subprocess
import sys

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.launch import keys
from hvdtrain.launch.topology import Topology

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to play another user: run the tests as root")
ALONE = Topology.alone()


@pytest.fixture
def home(tmp_path):
    return {"HOME": str(tmp_path)}


def test_a_key_is_made_once_and_closed_to_others(home):
    before = os.umask(0)
    try:
        key = keys.of_user(home)
    finally:
        os.umask(before)
    file = keys.path(home)
    assert len(key) == 32
    assert keys.of_user(home) == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (file.parent, file.parent.parent)} == {0o700}
    assert [path.name for path in file.parent.iterdir()] == ["key"]


def test_all_ranks_may_make_it_at_once(home):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        assert len(set(pool.map(keys.of_user, [home] * 8, chunksize=1))) == 1


def spoilt(how, file):
    match how:
        case "open to the group":
            file.chmod(0o640)
        case "in a folder of all":
            file.parent.chmod(0o777)
        case "another's":
            os.chown(file, 65534, 65534)
        case "short":
            file.write_bytes(b"x" * 31)
        case "long":
            file.write_bytes(b"x" * 33)
        case "a link":
            file.rename(file.with_name("other"))
            file.symlink_to("other")
        case "a folder":
            file.unlink()
            file.mkdir()
        case "a pipe":
            file.unlink()
            os.mkfifo(file, 0o600)


SPOILT = ["open to the group", "in a folder of all", "short", "long", "a link", "a folder", "a pipe"]


@pytest.mark.parametrize("how", [*SPOILT, pytest.param("another's", marks=needs_root)])
def test_a_key_that_others_may_know_is_refused(how, home):
    keys.of_user(home)
    spoilt(how, keys.path(home))
    with pytest.raises(WorldError, match=r"^\S+/(key|hvdtrain) must be .*; remove it") as refused:
        keys.of_user(home)
    assert not refused.value.everywhere  # the home of one host may be the cause
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null", "/nonexistent/x", "/proc/1"])
def test_no_home(home, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")  # where munge would be
    with pytest.raises(OSError, match=r"no such home|Not a directory|No such file"):
        keys.of_user({"HOME": home})
    with pytest.raises(
        WorldError, match=r"^no key of this user's \(.*\), and munge does not answer; give all ranks one"
    ):
        keys.of_run({"HOME": home}, ALONE)


@needs_root
def test_a_uid_without_a_home():
    program = "import os; from hvdtrain.launch import keys; os.setuid(4242); keys.of_user({})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "FileNotFoundError: [Errno 2] uid without a home: 'uid 4242'" in ended.stderr


@pytest.mark.parametrize("folder", [".", "", "relative"])
def test_a_config_folder_that_is_not_absolute_is_passed_over(folder, home):
    assert keys.path({**home, "XDG_CONFIG_HOME": folder}) == keys.path(home)


@pytest.mark.parametrize("value", ["", "ab", "g" * 64, "a" * 63, "a" * 65, "é" * 64, "a" * 10_000])
@pytest.mark.parametrize("name", keys.INHERITED)
def test_an_inherited_key_that_is_none(name, value):
    with pytest.raises(WorldError, match=f"{name} must be 64 hexadecimal digits, got {len(value)} characters"):
        keys.inherited({name: value})


def test_an_inherited_key_goes_first(home):
    assert keys.of_run({**home, "HVDTRAIN_KEY": "0A" * 32}, ALONE) == (b"\n" * 32, None)
    assert keys.inherited({"HOROVOD_RENDEZVOUS_KEY": "0b" * 32, "HVDTRAIN_KEY": "0a" * 32}) == b"\n" * 32
    assert not keys.path(home).exists()


def test_no_other_words_give_the_same_key():
    made = {keys.derived(b"k", *purpose) for purpose in [("a", 1), ("a", 11), ("a1",), ("a", "1", ""), ("", "a", 1)]}
    assert len(made) == 5
    assert keys.derived(b"other", "a", 1) not in made
    assert len(keys.derived(b"k", "\udcff")) == 32  # an environment may hold any byte


needs_munge = pytest.mark.skipif(
    not (shutil.which("munge") and keys.wrapped(bytes(32))),
    reason="needs munged running: apt install munge, or make cluster-test, whose nodes have it",
)


@needs_munge
def test_munge_carries_a_key_to_this_user_alone():
    key = os.urandom(32)
    credential = keys.wrapped(key)
    assert keys.unwrapped(credential) == key
    assert keys.unwrapped(credential) == key  # every rank of a node reads it
    assert key.hex() not in credential


@needs_munge
@needs_root
def test_munge_carries_nothing_to_or_from_another_user():
    credential = keys.wrapped(os.urandom(32))
    other = {"user": 65534, "group": 65534, "extra_groups": []}
    read = subprocess.run(["unmunge"], input=credential, capture_output=True, text=True, check=False, **other)
    assert read.returncode != 0
    forged = subprocess.run(
        ["munge", "--restrict-uid=0"], input="ab" * 32, capture_output=True, text=True, check=True, **other
    )
    assert keys.unwrapped(forged.stdout) is None


@pytest.mark.parametrize("text", ["", "MUNGE:::", "\0", "\ud800", "MUNGE:" + "A" * 2000])
def test_what_is_no_credential(text):
    assert keys.unwrapped(text) is None
