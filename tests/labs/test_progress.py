"""The file in which a teacher sees where a class stands: what a check appends, what is read back and shown."""

import json
import os
import subprocess
import sys

import paths
import pytest

from labtools import LabError, progress
from labtools.exercises import large_batches
from labtools.progress import Checked


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The file of a class, as its teacher makes it."""
    file = tmp_path / "class"
    file.touch()
    monkeypatch.setenv(progress.VARIABLE, str(file))
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    return file


def test_a_check_appends_who_which_gap_and_the_named_mistake(shared, capsys):
    check = large_batches.Check()
    assert f"Each check appends a line to {shared}" in capsys.readouterr().out
    for filling in (lambda *_: None, lambda examples, batch, epochs: examples / batch * epochs):
        with pytest.raises(LabError):
            check.updates(filling)
    check.updates(lambda examples, batch, epochs: examples // batch * epochs)
    empty, kept, right = progress.read(shared)
    assert empty == Checked("ada", 4, "1 updates", empty.mistake)
    assert empty.mistake.startswith("is still empty")
    assert kept.mistake
    assert "Gap" not in kept.mistake
    assert right == Checked("ada", 4, "1 updates", "")


def test_nothing_is_written_without_the_variable(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    large_batches.Check().updates(lambda examples, batch, epochs: examples // batch * epochs)
    assert list(tmp_path.iterdir()) == []
    assert "appends" not in capsys.readouterr().out


def test_learners_who_write_at_once_lose_no_line(shared):
    program = """import sys
from labtools import progress
for number in range(40):
    progress.note(2, "2 shard", "x" * 500, {"HVDTRAIN_LAB_PROGRESS": sys.argv[1], "JUPYTERHUB_USER": sys.argv[2]})"""
    command = [sys.executable, "-c", program, str(shared)]
    learners = [subprocess.Popen([*command, f"learner {n}"], cwd=paths.LABS) for n in range(4)]
    assert [learner.wait(100) for learner in learners] == [0] * 4
    checks = progress.read(shared)
    assert len(checks) == 160
    assert {check.mistake for check in checks} == {checks[0].mistake}
    assert len(checks[0].mistake) in (progress.MISTAKE - 1, progress.MISTAKE)


def linked(file):
    file.rename(file.with_name("another"))
    file.symlink_to(file.with_name("another"))


def twice(file):
    os.link(file, file.with_name("another"))


def pipe(file):
    file.unlink()
    os.mkfifo(file)
    os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # somebody reads from it


@pytest.mark.parametrize("change", [linked, twice, pipe, os.unlink], ids=["a link", "two names", "a pipe", "missing"])
def test_a_check_follows_no_link_creates_nothing_and_never_fails(shared, capsys, change):
    change(shared)
    progress.note(4, "1 updates", "")
    assert f"Your teacher does not see this check, as HVDTRAIN_LAB_PROGRESS says {shared}: " in capsys.readouterr().out
    assert all(path.stat().st_size == 0 for path in shared.parent.iterdir())


HOSTILE = {
    "no JSON": b"\xff{",
    "no mapping": b"[1]",
    "too long": json.dumps({"who": "eve", "lab": 2, "gap": "1 init", "mistake": "x" * 5000}).encode(),
    "deep": b"[" * 3000,
    "no one": b'{"who": "", "lab": 2, "gap": "1 init", "mistake": ""}',
    "a list": b'{"who": ["eve"], "lab": 2, "gap": "1 init", "mistake": ""}',
    "no lab": b'{"who": "eve", "lab": 1e400, "gap": "1 init", "mistake": ""}',
    "no result": b'{"who": "eve", "lab": 2, "gap": "1 init"}',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_line_of_a_check_is_left_out(shared, line):
    progress.note(2, "1 init", "")
    shared.write_bytes(line + b"\n" + shared.read_bytes())
    assert progress.read(shared) == [Checked("ada", 2, "1 init", "")]


def test_what_is_shown_is_printable_and_bounded(shared):
    with shared.open("ab") as file:
        for number in range(300):
            line = {
                "who": f"\x1b[2J{number}\u202e" + "w" * 99,
                "lab": number % 40,
                "gap": f"\x07{number}",
                "mistake": "\x1b]0;x\x07",
            }
            file.write(json.dumps(line).encode() + b"\n")
            file.write(json.dumps({**line, "lab": 1}).encode() + b"\n")
    shown = progress.table(progress.read(shared))
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert len(shown.splitlines()) < 1000
    assert max(map(len, shown.splitlines())) < 500
    assert "others" in shown


def test_the_table_shows_where_a_class_stands(shared):
    wrong = "gives every rank the same local batch: no rank ever sees the other 150."
    checks = [("ada", "1 init", ""), ("ada", "2 shard", wrong), ("ada", "2 shard", ""), ("bob", "1 init", "")]
    for who, gap, mistake in [*checks, ("bob", "2 shard", wrong), ("bob", "2 shard", wrong), ("eve", "2 shard", wrong)]:
        progress.note(2, gap, mistake, {**os.environ, "JUPYTERHUB_USER": who})
    command = [sys.executable, "-m", "labtools.progress", str(shared)]
    done = subprocess.run(command, cwd=paths.LABS, text=True, capture_output=True, check=True, timeout=100)
    assert [line.split() for line in done.stdout.splitlines()[:4]] == [
        ["lab", "2", "1", "init", "2", "shard"],
        ["ada", "right", "right"],
        ["bob", "right", "2", "wrong"],
        ["eve", ".", "1", "wrong"],
    ]
    assert done.stdout.splitlines()[4:] == [
        "1 init: 2 of 3 right",
        "2 shard: 1 of 3 right; 2 x gives every rank the same local batch",
    ]


def test_a_file_that_cannot_be_read_is_named_in_a_line(tmp_path):
    huge = tmp_path / "huge"
    with huge.open("w") as file:
        file.truncate(2**40)
    for path, message in ((tmp_path / "none", "No such file"), (huge, "at most"), (tmp_path, "Is a directory")):
        command = [sys.executable, "-m", "labtools.progress", str(path)]
        done = subprocess.run(command, cwd=paths.LABS, text=True, capture_output=True, check=False, timeout=100)
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
