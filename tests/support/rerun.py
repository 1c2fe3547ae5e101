"""`--flaky`: tests that failed are run once more. Those that pass now are named; more than MOST of them are a failure,
and so is a test that is skipped now."""

import pytest

MOST = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaky", action="store_true", help="name what passes as FLAKY: it has failed before")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skips = session.config.getoption("--flaky") and reporter.stats.get("skipped")
    if skips or len(_passed(session.config)) > MOST:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name in _passed(config):
        terminalreporter.line(f"FLAKY {name}")
    if len(_passed(config)) > MOST:
        terminalreporter.line(f"at most {MOST} tests may be flaky in a run")


def _passed(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [report.nodeid for report in reporter.stats.get("passed", [])] if config.getoption("--flaky") else []
