"""One run in its process: its input, and its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.django_suite.run import OURS, STOCK, Plan, run
from tests.services.mariadb import Address

START = """
import json, os, sys
from pathlib import Path
given = json.loads(os.environ["SHARDED_ORM_YARDSTICK"])
def write(*line):
    with open(given["results"], "a") as results:
        results.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def plan(tmp_path):
    """Return a plan whose ``runtests.py`` the test has written."""
    source = tmp_path / "unpacked" / "django"
    (source / "tests").mkdir(parents=True)
    results = tmp_path / "results"
    results.mkdir()
    return Plan(source, Address("127.0.0.1", 1, "u", "p"), results, ["basic"], timeout=30)


def runtests(plan: Plan, text: str) -> None:
    (plan.source / "tests" / "runtests.py").write_text(START + text)


def test_to_its_end(plan):
    runtests(plan, 'write("start", "a.A.x"); write("ok", "a.A.x", "", 0.1); write("end")')
    done = run(plan, STOCK, pytest.fail)
    assert done.trouble == ""
    assert done.outcomes.by_test == {"a.A.x": "ok"}
    assert done.cpu > 0


def test_failed_tests_are_no_trouble(plan):
    runtests(plan, 'write("fail", "a.A.x", "", 0.1); write("end"); sys.exit(1)')
    assert run(plan, STOCK, pytest.fail).trouble == ""


def test_crash_names_the_test(plan):
    runtests(plan, 'write("start", "a.A.x"); os.kill(os.getpid(), 9)')
    done = run(plan, OURS, pytest.fail)
    assert done.trouble == "the run was ended by signal 9 in a.A.x"
    assert done.outcomes.by_test == {"a.A.x": "unfinished"}


def test_no_end_is_trouble(plan):
    runtests(plan, "raise ImportError('nothing to test')")
    done = run(plan, OURS, pytest.fail)
    assert done.trouble == "the run ended with exit code 1"
    assert "nothing to test" in done.log.read_text()


def test_too_long_is_killed(plan):
    runtests(plan, "sys.stdin.close(); import signal; signal.pause()")
    hurried = Plan(plan.source, plan.server, plan.folder, None, timeout=0.2)
    reports: list[str] = []
    done = run(hurried, OURS, reports.append)
    assert done.trouble == "the run took longer than 0.2 s and was killed"
    assert reports


def test_what_a_run_is_given(plan):
    runtests(
        plan,
        """
import importlib.util
write("ok", given["engine"], "", 0)
write("ok", " ".join(sys.argv[1:]), "", 0)
for name in ("sharded_orm", "yardstick_settings", "yardstick_recorder"):
    assert importlib.util.find_spec(name), name
for folder in os.environ["PYTHONPATH"].split(os.pathsep):
    assert not (Path(folder) / "testproject").exists(), folder
write("end")
""",
    )
    done = run(plan, OURS, pytest.fail)
    assert done.trouble == "", done.log.read_text()
    assert list(done.outcomes.by_test) == [
        "sharded_orm.backends.mysql",
        "--settings=yardstick_settings --noinput --parallel=1 --verbosity=1 basic",
    ]


def test_names_of_schemas_are_equally_long():
    assert len(STOCK.prefix) == len(OURS.prefix)


def test_repository_is_left_alone(plan):
    runtests(plan, 'write("end")')
    run(plan, OURS, pytest.fail)
    assert not (Path(__file__).parents[3] / "library").exists()
    assert (plan.source.parent / "library" / "sharded_orm" / "__init__.py").exists()
