"""Tests wait with one bound, far above their needs; a test has no bound of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parents[1]
WAITING = {"wait", "wait_for", "join", "result", "communicate", "Barrier"}
# A number may stand in the next line.
CALL = re.compile(rf"\b(?:{'|'.join(WAITING)})\(\s*[\d.]|\btimeout\s*=\s*[\d.]")
#: Shorter waits are pauses between two polls, or waits for something that must not come.
SHORT = 1.0


def bounds(call: ast.Call) -> Iterator[float]:
    """Return the numbers that are written as bounds of a waiting call."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in WAITING:
        # With two numbers it is a command of Redis.
        alone = len(call.args) == 1 and name in ("wait", "join", "result")
        first = call.args if alone else []
        for value in [*first, *(word.value for word in call.keywords if word.arg == "timeout")]:
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                yield value.value


def test_no_wait_has_a_bound_of_its_own() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.parts[len(TESTS.parts)] not in ("benchmarks", "django_suite")
        # Most files have no such call, and parsing them takes the time.
        if CALL.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and any(bound >= SHORT for bound in bounds(node))
    ]
    assert found == [], "use tests.patience.PATIENCE"


def test_generated_cases_have_no_time_limit() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
