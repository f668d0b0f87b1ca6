"""A test runner that writes each outcome to a file as soon as it is known.

One JSON list per line: ``["start", id]`` or ``[outcome, id, detail, seconds]``. A test may
have several lines: its subtests, or an error in its tearDown.
"""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any, TextIO
from unittest import TestCase, TextTestResult

from django.conf import settings
from django.test.runner import DiscoverRunner


class Recorder(TextTestResult):
    """Records the outcomes that unittest reports, and passes them on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Line-buffered: a written line survives a crash of this process.
        path = settings.YARDSTICK_RESULTS
        self._file: TextIO = open(path, "a", buffering=1)  # noqa: SIM115  # closed by end()
        self._began = time.monotonic()

    def _write(self, outcome: str, test: Any, detail: str = "") -> None:
        now = time.monotonic()
        # The seconds since the line before: the first test of a class includes the setup of the
        # class.
        line = [outcome, test.id(), detail, round(now - self._began, 4)]
        self._file.write(json.dumps(line) + "\n")
        self._began = now

    def startTest(self, test: TestCase) -> None:
        super().startTest(test)
        self._file.write(json.dumps(["start", test.id()]) + "\n")

    def end(self) -> None:
        self._file.write(json.dumps(["end"]) + "\n")
        self._file.close()

    def addSuccess(self, test: TestCase) -> None:
        super().addSuccess(test)
        self._write("ok", test)

    def addFailure(self, test: TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._write("fail", test, self.failures[-1][1])

    def addError(self, test: TestCase, err: Any) -> None:
        super().addError(test, err)
        self._write("error", test, self.errors[-1][1])

    def addSkip(self, test: TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        # A skipped subtest is reported here. Its own id may have addresses of objects in it.
        self._write("skip", getattr(test, "test_case", test), reason)

    def addExpectedFailure(self, test: TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._write("expected failure", test)

    def addUnexpectedSuccess(self, test: TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._write("unexpected success", test)

    def addSubTest(self, test: TestCase, subtest: TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            failed = issubclass(err[0], test.failureException)
            detail = (self.failures if failed else self.errors)[-1][1]
            self._write("fail" if failed else "error", test, f"{subtest.id()}\n{detail}")


class Runner(DiscoverRunner):
    """Django's runner with the recorder; ``runtests.py`` finds it in the settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if plans := getattr(settings, "YARDSTICK_PLANS", ""):
            # Not in the settings: the modules of the package need them.
            import_module("yardstick_plans").install(compares=plans == "compared")

    def get_resultclass(self) -> type[Recorder]:
        return Recorder

    def suite_result(self, suite: Any, result: Any, **kwargs: Any) -> int:
        # The last call of DiscoverRunner.run_tests(): all tests have run, and the test databases are
        # destroyed. An error before it leaves the run without its end.
        result.end()
        if getattr(settings, "YARDSTICK_PLANS", ""):
            print(import_module("yardstick_plans").planned, "reads by plans")
        return super().suite_result(suite, result, **kwargs)
