"""``python -m tests`` counts right, so that its last line can be trusted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.__main__ import LANES, MARIADB, NO_TESTS_COLLECTED, POSTGRESQL, Backend, Outcome
from tests.pairs import ALL, LOWEST, PAIRS, lowest

ROOT = Path(__file__).parents[2]

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


def test_the_slowest_files_are_told(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite tests="3">'
        '<testcase file="a.py" time="1"/><testcase file="b.py" time="2.5"/>'
        '<testcase file="a.py" time="2"/></testsuite></testsuites>'
    )
    outcome = Outcome()
    outcome.pytest("on SQLite", 0, path)
    assert list(outcome.slowest()) == ["    3.0s a.py", "    2.5s b.py"]


def test_each_path_is_in_one_lane_on_sqlite():
    paths = [path for lane in LANES if not (lane.backend or lane.plugins) for path in lane.paths]
    assert len(paths) == len(set(paths))
    assert all((ROOT / path).exists() for lane in LANES for path in lane.paths)
    assert [lane.name for lane in LANES if not lane.paths] == ["all other tests"]


def test_a_lane_with_plugins_takes_no_tests_from_others():
    everything = next(lane for lane in LANES if not lane.paths)
    repeated = {path for lane in LANES if lane.plugins for path in lane.paths}
    elsewhere = {
        path for lane in LANES if not lane.backend and not lane.plugins for path in lane.paths
    }
    assert repeated and set(everything.elsewhere()) == elsewhere


@pytest.mark.parametrize("backend", [MARIADB, POSTGRESQL])
def test_all_that_is_marked_runs_on_its_backend(backend: Backend):
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(rf"mark\.(every_backend|{backend.name}_settings)", path.read_text())
    }
    paths = [f"{path}/" for lane in LANES if lane.backend is backend for path in lane.paths]
    files = [path for lane in LANES if lane.backend is backend for path in lane.paths]
    missing = {path for path in marked if not path.startswith(tuple(paths)) and path not in files}
    elsewhere = ("tests/integration/tickets/",) if backend is POSTGRESQL else ()
    missing = {path for path in missing if not path.startswith(elsewhere)}
    assert missing - {str(Path(__file__).relative_to(ROOT))} == set()


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_no_test_is_in_two_lanes_of_a_backend(lane):
    others = [path for other in LANES if other is not lane and other.backend is lane.backend
              for path in other.paths]  # fmt: skip
    shared = [path for path in others if path.startswith(tuple(f"{own}/" for own in lane.paths))]
    assert sorted({*shared}) == (lane.elsewhere() if lane.paths else [])


def test_each_pair_is_supported_and_has_an_environment():
    metadata, tox = (ROOT / "setup.cfg").read_text(), (ROOT / "tox.ini").read_text()
    for pair in PAIRS:
        (requirement,) = pair.requirements
        django = requirement.removeprefix("Django==").removesuffix(".*")
        assert f"Framework :: Django :: {django}\n" in metadata
        assert f"Programming Language :: Python :: {pair.python}\n" in metadata
        python, factor = pair.name.split("-dj")
        assert re.search(rf"{python}-dj\{{[\d,]*{factor}", tox)
        assert f"{factor}: {requirement}" in tox


def test_every_driver_has_its_lowest_version():
    metadata = (ROOT / "setup.cfg").read_text()
    for requirement in LOWEST.requirements:
        assert f"    {requirement.replace('==', '>=')}" in metadata
    names = {requirement.partition("==")[0] for requirement in LOWEST.requirements}
    drivers = {"mysqlclient", "psycopg", "django-redis", "hiredis", "pymemcache", "kazoo"}
    assert names >= {"Django", *drivers}
    assert f"python_requires = >={LOWEST.python}\n" in metadata


def test_a_requirement_without_a_lower_bound_is_refused(tmp_path):
    path = tmp_path / "setup.cfg"
    path.write_text(
        "[options]\npython_requires = >=3.11\ninstall_requires =\n    Django\n"
        "[options.extras_require]\n"
    )
    with pytest.raises(ValueError, match=r"'Django' in setup\.cfg has no lower bound"):
        lowest(path)


def test_the_short_lanes_have_what_they_name():
    paths = {
        path
        for versions in ALL
        for chosen in (versions.routine, versions.long)
        for path in (*chosen.on_sqlite, *chosen.on_mariadb, *chosen.on_postgresql)
    }
    assert [path for path in sorted(paths) if not (ROOT / path.partition("::")[0]).exists()] == []
