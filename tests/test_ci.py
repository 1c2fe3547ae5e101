"""`.ci/run` runs failed tests once more, and fails where one fails twice, or too many failed once."""

import collections
import json
import os
import shutil
import subprocess
import sys

import pytest
from marks import marked, rows
from paths import REPOSITORY, SUPPORT
from rerun import SECONDS, turns_of

PYTEST = f"\t{sys.executable} -m pytest -q -p rerun"
MAKEFILE = f"""
check minicluster coverage:
\t@echo checked
test:
{PYTEST} -p xdist.plugin --numprocesses 1 --dist loadgroup -m 'not cluster and not slow'
cluster-test:
{PYTEST} -m cluster
test-all:
{PYTEST} $(PYTEST_FLAGS)
"""
TESTS = """
import os, pathlib, time, pytest

@pytest.mark.parametrize("number", range({flaky}))
@pytest.mark.launched
@pytest.mark.xdist_group("waits")
def test_flaky(number):
    seen = pathlib.Path(f"seen-{{number}}")
    passes = seen.exists()
    seen.touch()
    assert passes

@pytest.fixture(scope="session")
def world():
    seen = pathlib.Path("seen-launch")
    comes = seen.exists() or not {of_a_launch}
    seen.touch()
    return comes

@pytest.mark.parametrize("launch", ["gloo-2"])
@pytest.mark.parametrize("number", range({of_a_launch}))
@pytest.mark.launched
def test_flaky_launch(world, launch, number):
    assert world

@pytest.mark.cluster
def test_of_a_cluster():
    while not os.path.exists("begun"):
        time.sleep(0.01)
    assert {right}

@pytest.mark.lab
@pytest.mark.slow
def test_right():  # of turn 0, which is taken where there is no commit
    pass

@pytest.mark.slow
def test_alone():
    pathlib.Path("begun").touch()
    while not os.path.exists(os.environ["HVDTRAIN_TEST_UNTIL"]):  # the end of those of the cluster
        time.sleep(0.01)

@pytest.mark.slow
@pytest.mark.only_ci
def test_second_of_a_kind():
    pass

@pytest.mark.slow
def test_too_late():
    assert False

def test_what_matters():
    pass
"""
OF_TURN_1 = """
import pytest

@pytest.mark.lab
@pytest.mark.slow
def test_notebook():
    assert False
"""
RUNS = {  # flaky tests, flaky tests of one launch, whether the others pass; exit code, FLAKY lines, pytest's last line
    "all pass": (0, 0, True, 0, 0, "1 passed"),
    "three are flaky": (3, 0, True, 0, 3, "3 passed"),
    "four are flaky": (4, 0, True, 1, 4, "4 passed"),
    "four of one launch are flaky": (0, 4, True, 0, 4, "4 passed"),
    "four of one launch are flaky, and three": (3, 4, True, 1, 7, "7 passed"),
    "one fails twice": (1, 0, False, 1, 1, "1 failed, 1 passed"),
    "one of the cluster fails twice": (0, 0, False, 1, 0, "1 failed"),
}


def prepare(folder):
    """A checkout with `.ci/run`, and stand-ins for what it would install."""
    (folder / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", folder / ".ci" / "run")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for path, script in ((".venv/bin/python", f'exec {sys.executable} "$@"'), ("ccache", "")):
        (folder / path).write_text(f"#!/bin/sh\n{script}\n")
        (folder / path).chmod(0o755)


def ci(folder):
    # Variables of the make and the pytest that run this test would change what the inner ones do.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))}
    environ = {**kept, "PYTHONPATH": str(SUPPORT), "PATH": f"{folder}:{os.environ['PATH']}"}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # notebooks' takes seconds to load
    return subprocess.run(["bash", ".ci/run"], cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("flaky", "of_a_launch", "right", "code", "named", "last"),
    marked(rows(RUNS), fast={"three are flaky"}),
)
def test_what_fails_is_run_once_more(tmp_path, flaky, of_a_launch, right, code, named, last):
    prepare(tmp_path)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "test_it.py").write_text(TESTS.format(flaky=flaky, of_a_launch=of_a_launch, right=right))
    (tmp_path / "test_later.py").write_text(OF_TURN_1)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -p rerun\nmarkers =\n    cluster\n    launched\n    lab\n    slow\n    only_ci\n"
    )
    done = ci(tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("FLAKY test_it.py::test_flaky") == named
    assert done.stdout.splitlines()[-1].strip("= ").startswith(last), done.stdout


def test_its_last_line_says_where_nothing_was_audited(tmp_path):
    prepare(tmp_path)
    targets = ("test", "coverage", "minicluster", "cluster-test", "test-all")
    made = "".join(f"{target}:\n\t@echo made\n" for target in targets)
    (tmp_path / "Makefile").write_text(f"{made}check:\n\t@echo pip-audit: NOT AUDITED, none known\n")
    done = ci(tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "pip-audit: NOT AUDITED, none known"), done.stderr


@pytest.mark.parametrize("breaks", marked(["test", "check", "cluster-test", "test-all"], slow={"check", "test-all"}))
def test_what_is_no_failed_test_ends_it(tmp_path, breaks):
    prepare(tmp_path)
    targets = ["test", "coverage", "check", "minicluster", "cluster-test", "test-all"]
    recipes = {target: "\texit 2\n" if target == breaks else "\techo made\n" for target in targets}
    (tmp_path / "Makefile").write_text("".join(f"{target}:\n{recipe}" for target, recipe in recipes.items()))
    done = ci(tmp_path)
    assert done.returncode != 0
    assert f"[Makefile:{2 * targets.index(breaks) + 2}: {breaks}] Error 2" in done.stdout + done.stderr


def test_turns_take_about_equally_long():
    seconds, turns = json.loads(SECONDS.read_text()), 12
    assert [file for file in seconds if not (REPOSITORY / file).exists()] == []
    of, took = turns_of(seconds, turns, seconds), collections.Counter()
    for file in seconds:
        took[of[file]] += seconds[file]
    assert max(took.values()) - min(took.values()) <= max(seconds.values()) and len(took) == turns
    assert turns_of(["b", "a", "c"], 2, {"a": 1, "c": 3}) == {"c": 0, "b": 1, "a": 1}  # b counts 2


def test_how_long_files_take_is_updated(tmp_path):
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass")
    (path := tmp_path / "seconds.json").write_text(json.dumps({"test_a.py": 7777, "test_b.py": 9, "test_gone.py": 3}))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rerun", "--write-seconds", path, "test_a.py"]
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    found = json.loads(path.read_text())
    assert found.pop("test_a.py") < 7777 and found == {"test_b.py": 9}
