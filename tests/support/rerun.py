"""A plugin of pytest for `.ci/run`, which runs some tests by turns, and failed tests once more with `--flaky`.

Tests that pass then are named as flaky. More than MOST of them are a failure, and so is a test that is skipped then.
Tests of one launch of worlds.py count as one, because the launch failed once for all of them."""

import collections
import json
import os
import statistics
from collections.abc import Collection
from pathlib import Path

import pytest

MOST = 3  # of five thousand, on a machine that others use too
UNTIL = "HVDTRAIN_TEST_UNTIL"
"""Names a file. Once it exists, no further test is begun."""
SECONDS = Path(__file__).with_name("seconds.json")
"""How long the slow tests of a file take that start ranks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaky", action="store_true", help="name what passes as FLAKY: it has failed before")
    parser.addoption("--turn", metavar="K/N", help="only the files of turn K, from 0 on, where N turns run all")
    parser.addoption("--write-seconds", metavar="FILE", help="update there how long each file of tests takes")


def turns_of(files: Collection[str], turns: int, seconds: dict[str, float]) -> dict[str, int]:
    """The turn of each file, so that turns take about equally long. Tests of one file share launches. A file without
    recorded seconds counts as the mean of those that have some."""
    mean, sums = statistics.fmean(seconds.values() or [1]), [0.0] * turns
    of = {}
    for file in sorted(files, key=lambda file: (-seconds.get(file, mean), file)):
        of[file] = sums.index(min(sums))
        sums[of[file]] += seconds.get(file, mean)
    return of


@pytest.hookimpl(trylast=True)  # of the tests that -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if turn := config.getoption("--turn"):
        number, turns = map(int, turn.split("/"))
        of = turns_of({_file(item) for item in items}, turns, json.loads(SECONDS.read_text()))
        config.hook.pytest_deselected(items=[item for item in items if of[_file(item)] != number])
        items[:] = [item for item in items if of[_file(item)] == number]


def _file(ran: pytest.Item | pytest.TestReport) -> str:
    return ran.nodeid.partition("::")[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.path.exists(os.environ.get(UNTIL, "")):  # noqa: PTH110  a Path of "" is the current folder
        pytest.skip("what it runs beside has ended; make test-all runs it")
    if isinstance(item, pytest.Function) and "world" in item.fixturenames and hasattr(item, "callspec"):
        given = item.callspec.params
        if "launch" in given:
            item.user_properties.append(("launch", f"{given.get('framework', 'torch')}-{given['launch']}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (path := session.config.getoption("--write-seconds")) and reporter:
        _write_seconds(Path(path), session.config.rootpath, reporter.stats)
    skips = session.config.getoption("--flaky") and reporter.stats.get("skipped")
    if skips or _count(session.config) > MOST:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write_seconds(path: Path, root: Path, stats: dict[str, list[pytest.TestReport]]) -> None:
    took = collections.Counter[str]()
    for report in (each for reports in stats.values() for each in reports if isinstance(each, pytest.TestReport)):
        took[_file(report)] += report.duration
    before = json.loads(path.read_text()) if path.exists() else {}
    known = {file: round(each) for file, each in {**before, **took}.items() if (root / file).exists()}
    path.write_text(f"{json.dumps(known, indent=0, sort_keys=True)}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for report in _passed(config):
        terminalreporter.line(f"FLAKY {report.nodeid}")
    if _count(config) > MOST:
        terminalreporter.line(f"at most {MOST} tests may be flaky in a run, those of one launch counted as one")


def _passed(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("passed", []) if config.getoption("--flaky") else []


def _count(config: pytest.Config) -> int:
    return len({dict(report.user_properties).get("launch", report.nodeid) for report in _passed(config)})
