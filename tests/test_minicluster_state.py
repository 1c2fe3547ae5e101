"""slurm/minicluster, which runs as root, refuses a state folder that another user could fill."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from paths import REPOSITORY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as minicluster does: run the tests as root")

STRANGER = 65534


@pytest.fixture
def shared():
    """A folder like /tmp, with a folder of root's and one of another user's in it."""
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-shared-"))
    folder.chmod(0o1777)
    for name, owner in (("roots", 0), ("strangers", STRANGER)):
        (folder / name).mkdir()
        os.chown(folder / name, owner, owner)
    yield folder
    shutil.rmtree(folder)


def minicluster(state, command):
    command_line = [sys.executable, REPOSITORY / "slurm" / "minicluster", "--state", state, command]
    return subprocess.run(command_line, capture_output=True, text=True, timeout=60, check=False)


def cluster_of(folder, process):
    """Makes the folder report that this process is a node of a cluster."""
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[19])
    fields = {"nodes": [], "networks": {}, "suffix": "", "shares": [], "description": ""}
    (folder / "cluster.json").write_text(json.dumps(fields | {"processes": {"nid001": [process.pid, start]}}))


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_another_users_folder_ends_no_process_of_roots(shared, command):
    with subprocess.Popen(["sleep", "600"]) as precious:
        try:
            cluster_of(shared / "strangers", precious)
            done = minicluster(shared / "strangers", command)
            assert precious.poll() is None
        finally:
            precious.kill()
    message = (
        f"belongs to user {STRANGER}: --state must be a folder that root alone can change, got {shared}/strangers."
    )
    assert (done.returncode, done.stderr) == (2, f"minicluster: {shared}/strangers {message}\n")
    assert (shared / "strangers" / "cluster.json").exists()


def link(shared):
    (shared / "link").symlink_to(shared / "roots")
    os.chown(shared / "link", STRANGER, STRANGER, follow_symlinks=False)
    return shared / "link"


def behind_a_link(shared):
    (shared / "link").symlink_to(shared / "strangers")
    return shared / "link"


def of_a_group(shared):
    os.chown(shared / "roots", 0, STRANGER)
    (shared / "roots").chmod(0o775)
    return shared / "roots"


def open_to_all(shared):
    (shared / "roots").chmod(0o777)
    return shared / "roots" / "state"


REFUSED = {  # what --state is, the folder that is at fault
    "another's link": (link, "link belongs to user 65534"),
    "a link to another's": (behind_a_link, "strangers belongs to user 65534"),
    "below another's": (lambda shared: shared / "strangers" / "state", "strangers belongs to user 65534"),
    "through another's": (lambda shared: shared / "strangers" / ".." / "roots", "strangers belongs to user 65534"),
    "a group's": (of_a_group, "roots can be written by others"),
    "below what all write to": (open_to_all, "roots can be written by others"),
    "what all write to": (lambda shared: shared, " can be written by others"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_another_user_could_fill_is_refused(shared, make, message):
    done = minicluster(make(shared), "status")
    assert done.returncode == 2
    assert done.stderr.startswith(f"minicluster: {shared}{'/' if message[0] != ' ' else ''}{message}: --state must be ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["roots", "new", "roots/new/er"])
def test_roots_own_folder_is_taken(shared, name):
    done = minicluster(shared / name, "status")
    assert done.stderr.startswith(f"minicluster: no cluster in {shared}/{name}: ")
