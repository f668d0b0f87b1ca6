"""The comparison of two runs of Django's suite; the runs themselves take too long here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import django
import pytest

from tests.django_suite import report, source
from tests.django_suite.backends import BACKENDS
from tests.django_suite.compare import (
    Difference,
    Outcomes,
    differences,
    label_of,
    lost,
    read_allowed,
    read_outcomes,
)
from tests.django_suite.run import Run, together

ROOT = Path(__file__).parents[3]
SUITE = ROOT / "tests" / "django_suite"
SQLITE = BACKENDS["sqlite"]

TESTS = """
import unittest

class Case(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.fail("no")
    def test_breaks(self): raise ValueError
    def test_skipped(self): self.skipTest("why")
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    def test_parts(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)
    def test_skips_a_part(self):
        with self.subTest(value=object()):
            self.skipTest("part")

class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise RuntimeError
    def test_never_runs(self): pass
"""
RUN = """
import unittest, yardstick_recorder, some_tests
from django.conf import settings
settings.configure(YARDSTICK_RESULTS="results")
suite = unittest.defaultTestLoader.loadTestsFromModule(some_tests)
runner = yardstick_recorder.Runner()
result = runner.run_suite(suite)
assert '["end"]' not in open("results").read()  # the databases are still to be destroyed
runner.suite_result(suite, result)
"""


def test_recorder_writes_each_outcome(tmp_path):
    (tmp_path / "some_tests.py").write_text(TESTS)
    (tmp_path / "run.py").write_text(RUN)
    env = {**os.environ, "PYTHONPATH": str(SUITE / "inside")}
    subprocess.run([sys.executable, "run.py"], cwd=tmp_path, env=env, check=True)
    outcomes = read_outcomes(tmp_path / "results")
    assert outcomes.ended
    assert outcomes.unfinished == []
    assert outcomes.by_test == {
        "some_tests.Case.test_passes": "ok",
        "some_tests.Case.test_fails": "fail",
        "some_tests.Case.test_breaks": "error",
        "some_tests.Case.test_skipped": "skip",
        "some_tests.Case.test_expected": "expected failure",
        "some_tests.Case.test_parts": "fail",
        "some_tests.Case.test_skips_a_part": "skip",
        "setUpClass (some_tests.Broken)": "error",
    }
    assert outcomes.details["some_tests.Case.test_skipped"] == "why"
    assert "(number=1)" in outcomes.details["some_tests.Case.test_parts"]
    assert outcomes.by_label()["some_tests"].total() == 8


def test_crash_leaves_what_was_written(tmp_path):
    results = tmp_path / "results"
    lines = [["start", "a.A.x"], ["ok", "a.A.x", "", 0.1], ["start", "a.A.y"]]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines) + '["ok", "a')
    outcomes = read_outcomes(results)
    assert not outcomes.ended
    assert outcomes.unfinished == ["a.A.y"]
    assert outcomes.by_test == {"a.A.x": "ok", "a.A.y": "unfinished"}


def test_worst_outcome_counts(tmp_path):
    results = tmp_path / "results"
    lines = [["ok", "a.A.x", "", 0.1], ["error", "a.A.x", "in tearDown", 0.2]]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_outcomes(results).by_test == {"a.A.x": "error"}
    assert read_outcomes(results).seconds == {"a": pytest.approx(0.3)}
    assert read_outcomes(results).details == {"a.A.x": "in tearDown"}


@pytest.mark.parametrize(
    ("stock", "ours", "loss"),
    [
        ("ok", "fail", True),
        ("ok", "error", True),
        ("ok", "skip", True),
        ("ok", None, True),
        ("ok", "unfinished", True),
        ("expected failure", "unexpected success", True),
        ("skip", "fail", False),
        ("fail", "ok", False),
        ("error", "fail", False),
        (None, "fail", True),
        (None, "ok", False),
    ],
)
def test_what_is_a_loss(stock, ours, loss):
    def outcomes(outcome):
        return Outcomes({"a.A.x": outcome} if outcome else {})

    found = differences(outcomes(stock), outcomes(ours))
    assert [each.is_loss for each in found] == [loss]
    assert bool(lost(found, allowed=[])) is loss
    assert lost(found, allowed=["a.A.x"]) == []


def test_equal_outcomes_are_no_difference():
    same = Outcomes({"a.A.x": "ok", "a.A.y": "fail"})
    assert differences(same, same) == []


@pytest.mark.parametrize(
    ("test", "label"),
    [
        ("queries.tests.Q.test_a", "queries"),
        ("setUpClass (schema.tests.SchemaTests)", "schema"),
        ("unittest.loader._FailedTest.backends", "unittest"),
    ],
)
def test_label(test, label):
    assert label_of(test) == label


def test_exceptions_are_documented():
    for name in ("exceptions.toml", "exceptions_pgbouncer.toml", "exceptions_plans.toml"):
        allowed = read_allowed(SUITE / name, ROOT / "docs" / "decisions")
        assert all(entry.reason for entry in allowed.values())


def test_exception_without_a_page(tmp_path):
    path = tmp_path / "exceptions.toml"
    path.write_text('["a.A.x"]\nreason = "because"\n')
    with pytest.raises(ValueError, match="needs exactly"):
        read_allowed(path, tmp_path)
    path.write_text('["a.A.x"]\nreason = "because"\ndecision = "0999-none.md"\n')
    with pytest.raises(ValueError, match=r"no page '0999-none\.md'"):
        read_allowed(path, tmp_path)
    (tmp_path / "0999-none.md").touch()
    assert read_allowed(path, tmp_path)["a.A.x"].reason == "because"


def test_report_names_losses_and_decisions():
    both = {"a.A.z": "error"}
    allowed = {"a.A.y": SimpleNamespace(reason="because", decision="0999.md")}
    stock = Run(SQLITE.stock, Outcomes({**both, "a.A.x": "ok", "a.A.y": "ok"}), 1.0, 0.5)
    bad = Outcomes({**both, "a.A.x": "fail", "a.A.y": "skip"})
    ours = Run(SQLITE.ours, bad, 2.0, 0.5, ("ours-a: ended",), kept=2)
    found = [Difference("a.A.x", "ok", "fail", "E: no"), Difference("a.A.y", "ok", "skip")]
    text = "\n".join(report.show(stock, ours, found, allowed))
    assert "a.A.x: ok on stock, fail on ours\n      E: no" in text
    assert "because (0999.md)" in text
    assert "Fail on both: a.A.z\n" in text
    assert "ours-a: ended" in text
    assert "ours: 3 tests in 2s (0s of the processor), 2 of them kept from before" in text
    assert "1 tests pass on stock and not on ours; 1 more are documented." in text


def test_chunks_of_a_side_add_up():
    first = Run(
        SQLITE.ours,
        Outcomes({"a.A.x": "ok"}, {"a.A.x": ""}, {"a": 1.0}),
        2.0,
        1.0,
        ("a: was ended",),
    )
    second = Run(
        SQLITE.ours,
        Outcomes(
            {"a.A.x": "fail", "b.B.x": "unfinished"},
            {"a.A.x": "no", "b.B.x": ""},
            {"a": 0.5, "b": 1.0},
            ["b.B.x"],
        ),
        3.0,
        2.0,
        kept=2,
    )
    both = together([first, second])
    assert both.outcomes.by_test == {"a.A.x": "fail", "b.B.x": "unfinished"}
    assert both.outcomes.details["a.A.x"] == "no"
    assert both.outcomes.seconds == {"a": 1.5, "b": 1.0}
    assert both.outcomes.unfinished == ["b.B.x"]
    assert (both.seconds, both.cpu, both.troubles, both.kept) == (5.0, 3.0, ("a: was ended",), 2)


def test_source_is_taken_from_the_cache(tmp_path):
    archive = tmp_path / f"Django-{django.get_version()}.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("django-x/tests/runtests.py"), io.BytesIO())
    assert source.fetch(tmp_path) == archive
    assert source.unpack(archive, tmp_path / "here") == tmp_path / "here" / "django-x"


def test_archive_without_tests(tmp_path):
    archive = tmp_path / "some.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("django-x/setup.py"), io.BytesIO())
    with pytest.raises(source.SourceMissing, match=r"no tests/runtests\.py"):
        source.unpack(archive, tmp_path / "here")
