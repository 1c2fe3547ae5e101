"""launches.jsonl: the time of a launch adds up, what a thread writes is whole, and what a run is made with, where the
current folder is one that somebody else packed."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from hvdtrain.launch.topology import Topology
from hvdtrain.record import journal
from hvdtrain.record.journal import NAME, Journal


@pytest.fixture
def open_launch(tmp_path):
    """`open_launch()`: a launch whose records go into tmp_path."""

    def make():
        launch = Journal(0.0)
        launch.open(tmp_path, lambda age: {"kind": "launch"})
        return launch

    return make


def written(folder):
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def test_the_phases_add_up_to_the_clock(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    launch = Journal(1.0)
    launch.enter("import")
    now[0] += 2
    with launch.within("data"):
        now[0] += 4
    now[0] += 8
    assert launch.phases() == {"start": 1.0, "import": 10.0, "data": 4.0}
    assert launch.clock == 15


def test_records_follow_the_launch_in_their_order(open_launch, tmp_path):
    launch = open_launch()
    launch.event("slow", "rank 1 on node2 is slow", rank=1)
    launch.mark(20, always=True)
    launch.end("finished")
    launch.event("late", "of another thread")
    launch.end("failed", "and so is this")
    launch.close()
    records = written(tmp_path)
    assert [each["kind"] for each in records] == ["launch", "event", "phases", "end"]
    assert records[1].items() >= {"event": "slow", "rank": 1, "step": 0, "text": "rank 1 on node2 is slow"}.items()
    assert records[3].items() >= {"state": "finished", "step": 20, "replica_checks": 0}.items()
    assert sum(records[3]["phases"].values()) == pytest.approx(records[3]["clock"], abs=0.01)


def test_a_killed_launchs_unfinished_line_stays_apart(open_launch, tmp_path):
    (tmp_path / NAME).write_text('{"kind":"launch"}\n{"kind":"pha')
    launch = open_launch()
    launch.close()
    assert (tmp_path / NAME).read_text().splitlines() == ['{"kind":"launch"}', '{"kind":"pha', '{"kind":"launch"}']


def test_records_that_come_again_are_a_hundredth_of_the_time_apart(open_launch, monkeypatch):
    launch = open_launch()
    now = 0.0
    monkeypatch.setattr(Journal, "clock", property(lambda self: now))
    due = []
    for now in range(100_000):
        due += [now] if launch.is_due("ranks") else []
    assert due[:4] == [0, 5, 10, 15]
    assert len(due) < 700
    assert due[-1] - due[-2] == pytest.approx(journal.PART * due[-2], abs=1)


@pytest.mark.parametrize("kind", ["folder", "link", "fifo", "missing"])
def test_a_file_that_cannot_be_written_ends_no_run(open_launch, tmp_path, kind):
    path = tmp_path / NAME
    {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "fifo": lambda: os.mkfifo(path),
        "missing": lambda: tmp_path.rename(tmp_path.with_name("gone")),
    }[kind]()
    for launch in (open_launch(), Journal()):  # the latter has no file
        launch.event("slow", "text")
        launch.mark(1, always=True)
        launch.end("finished")
        launch.close()
    assert not (tmp_path / "elsewhere").exists()
    assert 0 < journal.process_age() < 10_000


def test_a_second_run_of_a_process_begins_anew(open_launch, tmp_path):
    launch = Journal(100.0)
    launch.open(tmp_path, lambda age: {"kind": "launch", "age": age})
    launch.end("finished")
    launch.open(tmp_path, lambda age: {"kind": "launch", "age": age})
    launch.end("finished")
    launch.close()
    ends = [each["clock"] for each in written(tmp_path) if each["kind"] == "end"]
    assert ends[0] > 100
    assert ends[1] < 1


JOBS = {  # what squeue prints: the record
    "a job": ("80|90.5", {"submit": 80.0, "start": 90.5}),
    "no start yet": ("80|N/A", None),
    "no answer": ("", None),
}


@pytest.mark.parametrize(("printed", "times"), JOBS.values(), ids=JOBS)
def test_what_slurm_says_of_the_job_is_recorded_and_its_script_kept(printed, times, tmp_path, monkeypatch):
    for name, does in (("squeue", f'echo "{printed}"'), ("scontrol", 'printf "%s\\377" "$*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "22")
    records = []
    journal.record_job(tmp_path, lambda kind, **values: records.append((kind, values)))
    assert records == ([("job", times)] if times else [])
    kept = tmp_path / journal.JOB_SCRIPT
    assert kept.read_text() == "write batch_script 22 -\ufffd"
    assert kept.stat().st_mode & 0o777 == 0o600


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
