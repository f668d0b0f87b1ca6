"""One run in its process: its input, its result, and what a second run takes over."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.django_suite import source
from tests.django_suite.__main__ import compare, parse
from tests.django_suite.backends import BACKENDS
from tests.django_suite.labels import chunks, every_label
from tests.django_suite.run import FolderInUse, Plan, Run, alone, result_name, run
from tests.services.mariadb import Address

START = """
import json, os, sys
from pathlib import Path
given = json.loads(os.environ["SHARDED_ORM_YARDSTICK"])
def write(*line):
    with open(given["results"], "a") as results:
        results.write(json.dumps(line) + "\\n")
"""
PASSES = 'write("start", "a.A.x"); write("ok", "a.A.x", "", 0.1); write("end")'
MYSQL, SQLITE, POSTGRESQL = BACKENDS["mysql"], BACKENDS["sqlite"], BACKENDS["postgresql"]


@pytest.fixture
def plan(tmp_path):
    """Return a plan whose ``runtests.py`` the test has written."""
    source = tmp_path / "unpacked" / "django"
    (source / "tests").mkdir(parents=True)
    results = tmp_path / "results"
    results.mkdir()
    return Plan(source, MYSQL, Address("127.0.0.1", 1, "u", "p"), results, timeout=30)


def runtests(plan: Plan, text: str) -> None:
    (plan.source / "tests" / "runtests.py").write_text(START + text)


def on_ours(plan: Plan) -> Run:
    return run(plan, plan.backend.ours, ["basic"], pytest.fail)


def on_stock(plan: Plan) -> Run:
    return run(plan, plan.backend.stock, ["basic"], pytest.fail)


def test_to_its_end(plan):
    runtests(plan, PASSES)
    done = on_stock(plan)
    assert done.troubles == ()
    assert done.outcomes.by_test == {"a.A.x": "ok"}
    assert done.cpu > 0
    assert done.kept == 0


def test_failed_tests_are_no_trouble(plan):
    runtests(plan, 'write("fail", "a.A.x", "", 0.1); write("end"); sys.exit(1)')
    assert on_stock(plan).troubles == ()


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ('write("start", "a.A.x"); os.kill(os.getpid(), 9)', "was ended by signal 9 in a.A.x"),
        ("raise ImportError('nothing to test')", "ended with exit code 1"),
        ('write("end")', "ran no test"),
        (
            'write("error", "unittest.loader._FailedTest.basi", "", 0); write("end"); sys.exit(1)',
            "could not import 'basi'",
        ),
    ],
)
def test_trouble_is_not_kept(plan, text, trouble):
    runtests(plan, text)
    (found,) = on_ours(plan).troubles
    assert f": the run {trouble}; " in found
    runtests(plan, PASSES)
    assert on_ours(plan).troubles == ()


def test_crash_keeps_the_test(plan):
    runtests(plan, 'write("start", "a.A.x"); os.kill(os.getpid(), 9)')
    assert on_ours(plan).outcomes.by_test == {"a.A.x": "unfinished"}


def test_trouble_shows_the_log(plan):
    runtests(plan, "raise ImportError('nothing to test')")
    assert "nothing to test" in on_ours(plan).troubles[0]


def test_too_long_is_killed(plan):
    runtests(plan, "sys.stdin.close(); import signal; signal.pause()")
    hurried = dataclasses.replace(plan, timeout=0.2)
    reports: list[str] = []
    done = run(hurried, MYSQL.ours, ["basic"], reports.append)
    assert "the run took longer than 0.2 s and was killed" in done.troubles[0]
    assert reports


def test_result_is_kept(plan):
    runtests(plan, PASSES)
    first = on_ours(plan)
    runtests(plan, "raise AssertionError('runs again')")
    second = on_ours(plan)
    assert second.outcomes.by_test == first.outcomes.by_test
    assert second.kept == 1
    assert (second.seconds, second.cpu) == (first.seconds, first.cpu)


def test_results_are_not_mixed(plan, tmp_path, monkeypatch):
    def name(plan: Plan = plan, ours: bool = True, labels: tuple[str, ...] = ("basic",)) -> str:
        return result_name(plan, plan.backend.ours if ours else plan.backend.stock, labels)

    names = [
        name(),
        name(ours=False),
        name(labels=("basic", "queries")),
        name(labels=("basic/tests", "queries")),
        name(dataclasses.replace(plan, backend=SQLITE, server=None)),
        name(dataclasses.replace(plan, backend=POSTGRESQL)),
        name(dataclasses.replace(plan, backend=POSTGRESQL, pooler=plan.server)),
        name(dataclasses.replace(plan, scramble=3)),
        name(dataclasses.replace(plan, parallel=2)),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(source, "version", lambda: "1.2.3")
        names += [name(), name(ours=False)]
    with monkeypatch.context() as patch:
        patch.setattr("platform.python_version", lambda: "2.7.18")
        names += [name(), name(ours=False)]
    other = tmp_path / "sharded_orm"
    other.mkdir()
    (other / "__init__.py").touch()
    monkeypatch.setattr("tests.django_suite.run._package", lambda: other)
    stock = name(ours=False)
    names.append(name())
    (other / "new.py").touch()
    names.append(name())
    assert len(set(names)) == len(names)
    assert not any("/" in each for each in names)
    # Stock does not run our code; a server has another port each time.
    assert stock == names[1]
    elsewhere = dataclasses.replace(plan, server=Address("10.0.0.1", 2, "w", "q"))
    assert name(elsewhere, ours=False) == names[1]


def test_two_chunks_are_compared(plan, capsys):
    runtests(
        plan,
        """
bad = "sharded_orm" in given["databases"]["default"]["ENGINE"] and sys.argv[-1] == "b"
write("fail" if bad else "ok", f"{sys.argv[-1]}.A.x", "", 0.1)
write("end")
""",
    )
    on_sqlite = dataclasses.replace(plan, backend=SQLITE, server=None)
    assert compare(on_sqlite, [["a"]]) == 0
    capsys.readouterr()
    assert compare(on_sqlite, [["a"], ["b"]]) == 1
    report, progress = capsys.readouterr()
    assert "1 tests pass on stock and not on ours" in report
    assert "ours: 2 tests" in report
    assert "chunk 2 of 2, b to b: b.A.x passes on stock and not on ours" in progress
    assert [
        "kept" in line
        for line in progress.splitlines()
        if ": stock: " in line or ": ours: " in line
    ] == [True, True, False, False]


def test_trouble_of_both_sides_is_not_agreement(plan, capsys):
    runtests(plan, "raise ImportError('nothing to test')")
    assert compare(dataclasses.replace(plan, backend=SQLITE, server=None), [["a"]]) == 1
    assert "ended with exit code 1" in capsys.readouterr().out


def test_two_runs_do_not_share_a_folder(tmp_path):
    with alone(tmp_path), pytest.raises(FolderInUse, match="another folder"), alone(tmp_path):
        pytest.fail("both are in it")
    with alone(tmp_path):
        pass


def test_killed_run_leaves_no_result(plan):
    runtests(plan, f'{PASSES}; print("ready"); os.kill(os.getppid(), 9); sys.stdin.read()')
    code = f"""
from pathlib import Path
from tests.django_suite.backends import BACKENDS
from tests.django_suite.run import Plan, run
plan = Plan(Path({str(plan.source)!r}), BACKENDS["sqlite"], None, Path({str(plan.folder)!r}))
run(plan, plan.backend.ours, ["basic"], print)
"""
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ})
    assert killed.returncode == -signal.SIGKILL
    assert not list(plan.folder.glob("*.jsonl"))
    runtests(plan, PASSES)
    again = dataclasses.replace(plan, backend=SQLITE, server=None)
    assert on_ours(again).kept == 0


@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        (MYSQL, "sharded_orm.backends.mysql"),
        (SQLITE, "sharded_orm.backends.sqlite3"),
        (POSTGRESQL, "sharded_orm.backends.postgresql"),
    ],
)
def test_what_a_run_is_given(plan, backend, engine):
    runtests(
        plan,
        """
import importlib.util
write("ok", given["databases"]["other"]["ENGINE"], "", 0)
write("ok", " ".join(sys.argv[1:]), "", 0)
for name in ("sharded_orm", "yardstick_settings", "yardstick_recorder"):
    assert importlib.util.find_spec(name), name
for folder in os.environ["PYTHONPATH"].split(os.pathsep):
    assert not (Path(folder) / "testproject").exists(), folder
write("end")
""",
    )
    done = on_ours(dataclasses.replace(plan, backend=backend))
    assert done.troubles == ()
    assert list(done.outcomes.by_test) == [
        engine,
        "--settings=yardstick_settings --noinput --parallel=1 --verbosity=1 basic",
    ]


def test_settings_are_those_of_the_version(plan):
    (plan.source / "tests" / "test_sqlite.py").write_text("DATABASES = {}; USE_TZ = 'as here'")
    runtests(
        plan,
        """
import yardstick_settings
write("ok", yardstick_settings.USE_TZ, "", 0)
write("ok", yardstick_settings.DATABASES["other"]["ENGINE"], "", 0)
write("end")
""",
    )
    done = on_stock(plan)
    assert done.troubles == ()
    assert list(done.outcomes.by_test) == ["as here", "django.db.backends.mysql"]


def test_server_is_in_the_settings():
    address = Address("127.0.0.1", 3306, "u", "p")
    database = MYSQL.databases(MYSQL.ours, address)["default"]
    assert database["PORT"] == "3306"
    assert database["TEST"] == {"NAME": "test_suite_leased_default", "CHARSET": "utf8mb4"}
    assert SQLITE.databases(SQLITE.ours, None)["other"] == {
        "ENGINE": "sharded_orm.backends.sqlite3"
    }


def test_only_our_side_is_behind_the_pooler(plan):
    runtests(plan, 'write("ok", given["databases"]["other"]["PORT"], "", 0); write("end")')
    pooled = dataclasses.replace(
        plan, backend=POSTGRESQL, pooler=dataclasses.replace(plan.server, port=2)
    )
    assert list(on_stock(pooled).outcomes.by_test) == ["1"]
    assert list(on_ours(pooled).outcomes.by_test) == ["2"]


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_names_of_databases_are_equally_long(backend):
    assert len(backend.stock.prefix) == len(backend.ours.prefix)


def test_labels_are_those_of_the_version(plan):
    runtests(plan, "")
    path = plan.source / "tests" / "runtests.py"
    path.write_text("def get_test_modules(gis): return ['update', 'basic'] + ['gis'] * gis")
    assert every_label(plan.source) == ("basic", "update")


def test_chunks_have_all_labels():
    assert chunks("abcde", 2) == [("a", "b"), ("c", "d"), ("e",)]
    assert chunks("ab", 2) == [("a", "b")]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--all", "basic"], "either --all or labels"),
        (["--chunk", "0"], "at least one label"),
        (["--backend", "sqlite", "--scramble", "3"], "leave it out"),
        (["--backend", "mysql", "--pgbouncer"], "leave it out"),
        (["--backend", "oracle"], "'mysql', 'sqlite', 'postgresql'"),
    ],
)
def test_wrong_options(arguments, remedy, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert remedy in capsys.readouterr().err


def test_repository_is_left_alone(plan):
    runtests(plan, PASSES)
    on_ours(plan)
    assert not (Path(__file__).parents[3] / "library").exists()
    assert (plan.source.parent / "library" / "sharded_orm" / "__init__.py").exists()
