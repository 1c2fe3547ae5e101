"""A plugin of pytest for `.ci/run`, which runs some tests by turns, and failed tests once more with `--flaky`.

Tests that pass then are named as flaky. More than MOST of them are a failure, and so is a test that is skipped then.
Tests of one launch of worlds.py count as one, because the launch failed once for all of them."""

import os
import zlib

import pytest

MOST = 3  # of five thousand, on a machine that others use too
UNTIL = "HVDTRAIN_TEST_UNTIL"
"""Names a file. Once it exists, no further test is begun."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaky", action="store_true", help="name what passes as FLAKY: it has failed before")
    parser.addoption("--turn", metavar="K/N", help="only those of turn K, from 0 on, where N turns run all tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if turn := config.getoption("--turn"):
        number, turns = map(int, turn.split("/"))
        # The cases of a function share launches.
        functions = [item.nodeid.partition("[")[0] for item in items]
        left_out = [zlib.crc32(name.encode()) % turns != number for name in functions]
        config.hook.pytest_deselected(items=[item for item, is_out in zip(items, left_out, strict=True) if is_out])
        items[:] = [item for item, is_out in zip(items, left_out, strict=True) if not is_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.path.exists(os.environ.get(UNTIL, "")):  # noqa: PTH110  a Path of "" is the current folder
        pytest.skip("what it runs beside has ended; make test-all runs it")
    if isinstance(item, pytest.Function) and "world" in item.fixturenames and hasattr(item, "callspec"):
        given = item.callspec.params
        if "launch" in given:
            item.user_properties.append(("launch", f"{given.get('framework', 'torch')}-{given['launch']}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skips = session.config.getoption("--flaky") and reporter.stats.get("skipped")
    if skips or _count(session.config) > MOST:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
