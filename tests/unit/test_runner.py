"""``python -m tests`` counts right, so that its last line can be trusted."""

from __future__ import annotations

import pytest

from tests.__main__ import NO_TESTS_COLLECTED, Outcome

REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10">
<testcase name="one"/></testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return path


def test_a_run_is_counted_from_its_report(report):
    outcome = Outcome()
    outcome.pytest("on SQLite", 1, report)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (4, 3, 3)
    assert outcome.trouble == ["on SQLite"]


def test_a_run_that_ends_without_a_report_is_a_failure(tmp_path):
    outcome = Outcome()
    outcome.pytest("on SQLite", 3, tmp_path / "absent.xml")
    assert (outcome.passed, outcome.failed) == (0, 1)


def test_a_run_without_tests_is_no_failure(tmp_path):
    outcome = Outcome()
    outcome.pytest("on MariaDB", NO_TESTS_COLLECTED, tmp_path / "absent.xml")
    assert outcome == Outcome()


def test_a_check_counts_as_one():
    outcome = Outcome()
    outcome.check("mypy", 0)
    outcome.check("ruff", 1)
    assert (outcome.passed, outcome.failed, outcome.trouble) == (1, 1, ["ruff"])
