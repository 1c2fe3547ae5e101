"""What a run is made with, where the current folder is one that somebody else packed."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from hvdtrain.launch.topology import Topology
from hvdtrain.record import journal

SETTINGS = {  # of a repository: each names a program that git would run here
    "core.fsmonitor": "touch {}; false",
    "filter.his.clean": "touch {}; cat",
    "filter.his.process": "touch {}",
    "core.hooksPath": "hooks",
    "core.pager": "touch {}",
    "diff.external": "touch {}",
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A commit of a.txt, and git(...) in it."""
    folder = tmp_path / "repository"
    (folder / "hooks").mkdir(parents=True)

    def git(*words):
        own = ("user.name=x", "user.email=x@x", "core.fsmonitor=false", "core.hooksPath=/dev/null")
        command = ["git", *(word for setting in own for word in ("-c", setting)), *words]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (folder / "a.txt").write_text("a")
    (folder / ".gitattributes").write_text("*.txt filter=his\n")
    git("add", "a.txt", ".gitattributes")
    git("commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return SimpleNamespace(folder=folder, git=git)


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_program_of_a_repository_is_run(setting, repository, tmp_path):
    ran = tmp_path / "ran"
    commit = repository.git("rev-parse", "HEAD").strip()
    hook = repository.folder / "hooks/post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    subprocess.run(["git", "config", setting, SETTINGS[setting].format(ran)], check=True)
    (repository.folder / "a.txt").write_text("a")  # again, so that git must look whether it has changed
    assert journal.git_commit() == {"commit": commit, "dirty": False}
    (repository.folder / "a.txt").write_text("b")
    assert journal.git_commit() == {"commit": commit, "dirty": True}
    assert not ran.exists()


def test_a_worktree_and_a_folder_within(repository, tmp_path, monkeypatch):
    commit = repository.git("rev-parse", "HEAD").strip()
    repository.git("worktree", "add", "-q", str(tmp_path / "tree"))
    (tmp_path / "tree/within").mkdir()
    for folder in ("tree", "tree/within", "repository/hooks"):
        monkeypatch.chdir(tmp_path / folder)
        assert journal.git_commit() == {"commit": commit, "dirty": False}
    (tmp_path / "repository/new").write_text("")
    assert journal.git_commit() == {"commit": commit, "dirty": False}
    repository.git("add", "new")
    assert journal.git_commit() == {"commit": commit, "dirty": True}
    monkeypatch.chdir(tmp_path)
    assert journal.git_commit() is None


def test_the_recorded_command_has_no_secrets(monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--api-key", "hunter2", "--lr=3"])
    record = journal.launch_record(Topology.alone(), "torch", "local", 0, None, None, 0.0)
    assert record["command"] == ["python", "train.py", "--api-key", "***", "--lr=3"]
    assert "hunter2" not in json.dumps(record)
