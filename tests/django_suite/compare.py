"""Outcomes of the two runs, test by test. Pure but for reading two files."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: From good to bad: of several lines about a test the worst counts.
ORDER = ("ok", "expected failure", "skip", "unexpected success", "fail", "error", "unfinished")
PASSED = frozenset(["ok", "expected failure"])
MISSING = "missing"


@dataclass
class Outcomes:
    """What a run has written."""

    by_test: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    #: Label -> seconds.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Tests that were started and had no outcome when the run ended.
    unfinished: list[str] = field(default_factory=list)
    #: The run came to its end.
    ended: bool = False

    def by_label(self) -> dict[str, Counter[str]]:
        """Label -> how many tests had which outcome."""
        counts: dict[str, Counter[str]] = {}
        for test, outcome in self.by_test.items():
            counts.setdefault(label_of(test), Counter())[outcome] += 1
        return counts


def label_of(test: str) -> str:
    """The label of a test id; of an error in a class's setUp, that of the class.

    >>> label_of("queries.tests.Queries1Tests.test_ticket1050")
    'queries'
    >>> label_of("setUpClass (queries.tests.Queries1Tests)")
    'queries'
    """
    return test.rpartition("(")[2].partition(".")[0]


def read_outcomes(path: Path) -> Outcomes:
    """Read what the recorder wrote; an incomplete last line is ignored."""
    outcomes = Outcomes()
    started: dict[str, None] = {}
    for line in path.read_text().splitlines():
        try:
            what, *rest = json.loads(line)
        except ValueError:
            continue
        if what == "end":
            outcomes.ended = True
        elif what == "start":
            started[rest[0]] = None
        else:
            test, detail, seconds = rest
            label = label_of(test)
            outcomes.seconds[label] = outcomes.seconds.get(label, 0.0) + seconds
            before = outcomes.by_test.get(test)
            if before is None or ORDER.index(what) > ORDER.index(before):
                outcomes.by_test[test] = what
                outcomes.details[test] = detail
            started.pop(test, None)
    # A test whose subtests all passed has its success as any other; what is left here
    # was running when the process ended.
    outcomes.unfinished = list(started)
    for test in started:
        outcomes.by_test[test] = "unfinished"
        outcomes.details[test] = "the run ended during this test"
    return outcomes


@dataclass(frozen=True)
class Difference:
    """A test whose outcome is not the same on both sides."""

    test: str
    stock: str
    ours: str
    detail: str = ""

    @property
    def is_loss(self) -> bool:
        """It passes on stock, and on ours it fails, is skipped or did not run."""
        return self.stock in PASSED and self.ours not in PASSED


def differences(stock: Outcomes, ours: Outcomes) -> list[Difference]:
    """All tests that had different outcomes, in the order of their names."""
    found = []
    for test in sorted({*stock.by_test, *ours.by_test}):
        left, right = stock.by_test.get(test, MISSING), ours.by_test.get(test, MISSING)
        if left != right:
            detail = ours.details.get(test) or stock.details.get(test) or ""
            found.append(Difference(test, left, right, detail))
    return found


@dataclass(frozen=True)
class Allowed:
    """A documented difference."""

    test: str
    reason: str
    decision: str


def read_allowed(path: Path, decisions: Path) -> dict[str, Allowed]:
    """The documented differences: test id -> reason and page under ``decisions``.

    :raises ValueError: an entry lacks one of the two, or its page does not exist.
    """
    allowed = {}
    for test, entry in tomllib.loads(path.read_text()).items():
        if not isinstance(entry, dict) or set(entry) != {"reason", "decision"}:
            raise ValueError(f"{path.name}: {test!r} needs exactly 'reason' and 'decision'.")
        if not (decisions / entry["decision"]).is_file():
            raise ValueError(f"{path.name}: {test!r}: no page {entry['decision']!r}.")
        allowed[test] = Allowed(test, entry["reason"], entry["decision"])
    return allowed
