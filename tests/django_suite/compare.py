"""Compares the outcomes of the two runs test by test. Its only side effect is to read two files."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

#: From good to bad. If a test has several lines, the worst counts.
ORDER = ("ok", "expected failure", "skip", "unexpected success", "fail", "error", "unfinished")
PASSED = frozenset(["ok", "expected failure"])
MISSING = "missing"


@dataclass
class Outcomes:
    """The outcomes that a run has written."""

    by_test: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    #: Seconds per label.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Tests that were started and had no outcome when the run ended.
    unfinished: list[str] = field(default_factory=list)
    #: Whether the run came to its end.
    ended: bool = False
    #: Seconds of the whole run, and those of the processor.
    cost: tuple[float, float] = (0.0, 0.0)

    def record(self, test: str, outcome: str, detail: str) -> None:
        """Add an outcome. If the test has one, the worse counts."""
        before = self.by_test.get(test)
        if before is None or ORDER.index(outcome) > ORDER.index(before):
            self.by_test[test] = outcome
            self.details[test] = detail

    def add(self, other: Outcomes) -> None:
        """Add the outcomes of another run."""
        for test, outcome in other.by_test.items():
            self.record(test, outcome, other.details[test])
        for label, seconds in other.seconds.items():
            self.seconds[label] = self.seconds.get(label, 0.0) + seconds
        self.unfinished += other.unfinished

    def by_label(self) -> dict[str, Counter[str]]:
        """Return the number of tests by outcome, by label."""
        counts: dict[str, Counter[str]] = {}
        for test, outcome in self.by_test.items():
            counts.setdefault(label_of(test), Counter())[outcome] += 1
        return counts


def label_of(test: str) -> str:
    """Return the label of a test id. For an error in a class's setUp, return the label of the
    class.

    >>> label_of("queries.tests.Queries1Tests.test_ticket1050")
    'queries'
    >>> label_of("setUpClass (queries.tests.Queries1Tests)")
    'queries'
    """
    return test.rpartition("(")[2].partition(".")[0]


def read_outcomes(path: Path) -> Outcomes:
    """Read the file of the recorder; an incomplete last line is ignored."""
    outcomes = Outcomes()
    started: dict[str, None] = {}
    for line in path.read_text().splitlines():
        try:
            what, *values = json.loads(line)
        except ValueError:
            continue
        if what == "end":
            outcomes.ended = True
        elif what == "cost":
            outcomes.cost = (values[0], values[1])
        elif what == "start":
            started[values[0]] = None
        else:
            test, detail, seconds = values
            label = label_of(test)
            outcomes.seconds[label] = outcomes.seconds.get(label, 0.0) + seconds
            outcomes.record(test, what, detail)
            started.pop(test, None)
    # A test whose subtests all passed has a success like any other. The tests left here were
    # running when the process ended.
    outcomes.unfinished = list(started)
    for test in started:
        outcomes.record(test, "unfinished", "the run ended during this test")
    return outcomes


@dataclass(frozen=True)
class Difference:
    """A test whose outcome differs between the two sides."""

    test: str
    stock: str
    ours: str
    detail: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether the test passes on stock, and on ours fails, is skipped or did not run.

        Also whether something fails on ours that is no test on stock: the end of a class or module.
        """
        if self.stock == MISSING:
            return self.ours in ("fail", "error", "unfinished")
        return self.stock in PASSED and self.ours not in PASSED


def differences(stock: Outcomes, ours: Outcomes) -> list[Difference]:
    """Return all tests with different outcomes, sorted by name."""
    differing = []
    for test in sorted({*stock.by_test, *ours.by_test}):
        left, right = stock.by_test.get(test, MISSING), ours.by_test.get(test, MISSING)
        if left != right:
            detail = ours.details.get(test) or stock.details.get(test) or ""
            differing.append(Difference(test, left, right, detail))
    return differing


@dataclass(frozen=True)
class Allowed:
    """A documented difference."""

    test: str
    reason: str
    decision: str


def lost(differences: Iterable[Difference], allowed: Container[str]) -> list[Difference]:
    """Return the losses that are not documented."""
    return [each for each in differences if each.is_loss and each.test not in allowed]


def read_allowed(path: Path, decisions: Path) -> dict[str, Allowed]:
    """Return the documented differences: test id -> reason and page under ``decisions``.

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
