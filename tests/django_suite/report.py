"""The report of a comparison, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.django_suite.compare import PASSED, Allowed, Difference, lost
from tests.django_suite.run import Run

_BAD = ("fail", "error", "unexpected success", "unfinished")
_DETAIL_LINES = 12


def show(
    stock: Run, ours: Run, differences: list[Difference], allowed: dict[str, Allowed]
) -> Iterator[str]:
    """Return the lines: numbers per label, each difference, errors of the runs, the sum."""
    yield from _table(stock, ours)
    losses = lost(differences, allowed)
    yield from _section("Pass on stock and not on ours:", losses, details=True)
    documented = [
        difference
        for difference in differences
        if difference.is_loss and difference.test in allowed
    ]
    yield from _section("The same, by a decision:", documented)
    for difference in documented:
        yield f"    {allowed[difference.test].reason} ({allowed[difference.test].decision})"
    yield from _section(
        "Other differences:", [difference for difference in differences if not difference.is_loss]
    )
    failed = sorted(
        test
        for test, outcome in stock.outcomes.by_test.items()
        if outcome in _BAD and ours.outcomes.by_test.get(test) == outcome
    )
    if failed:
        yield f"\nFail on both: {', '.join(failed)}"
    unused = sorted(
        test
        for test in allowed
        if stock.outcomes.by_test.get(test) and ours.outcomes.by_test.get(test) in PASSED
    )
    if unused:
        yield f"\nIn exceptions.toml, but pass: {', '.join(unused)}"
    for run in (stock, ours):
        for trouble in run.troubles:
            yield f"\n{trouble}"
    yield (
        f"\n{len(losses)} tests pass on stock and not on ours; {len(documented)} more are"
        f" documented. {_effort(stock)}; {_effort(ours)}."
    )


def outcome(run: Run) -> str:
    """Return the result of a chunk in one line."""
    if run.troubles:
        return " ".join(run.troubles)
    failed = sum(outcome in _BAD for outcome in run.outcomes.by_test.values())
    return f"{_effort(run)}, {failed} failed"


def _effort(run: Run) -> str:
    kept = f", {run.kept} of them kept from before" if run.kept else ""
    return (
        f"{run.side.name}: {len(run.outcomes.by_test)} tests in {run.seconds:.0f}s"
        f" ({run.cpu:.0f}s of the processor){kept}"
    )


def _table(stock: Run, ours: Run) -> Iterator[str]:
    yield f"{'':32}{'stock':^32}{'ours':^32}"
    yield f"{'label':32}" + f"{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>8}" * 2
    sides = [stock.outcomes, ours.outcomes]
    counts = [side.by_label() for side in sides]
    for label in sorted({*counts[0], *counts[1]}):
        yield f"{label:32}" + "".join(
            _numbers(count.get(label, Counter()), side.seconds.get(label, 0.0))
            for count, side in zip(counts, sides, strict=True)
        )
    yield f"{'all':32}" + "".join(
        _numbers(Counter(side.by_test.values()), sum(side.seconds.values())) for side in sides
    )


def _numbers(count: Counter[str], seconds: float) -> str:
    passed = sum(count[outcome] for outcome in PASSED)
    failed = sum(count[outcome] for outcome in _BAD)
    return f"{passed:8}{failed:8}{count['skip']:8}{seconds:8.1f}"


def _section(title: str, differences: list[Difference], details: bool = False) -> Iterator[str]:
    if not differences:
        return
    yield f"\n{title}"
    for difference in differences:
        yield f"  {difference.test}: {difference.stock} on stock, {difference.ours} on ours"
        if details:
            for line in difference.detail.strip().splitlines()[-_DETAIL_LINES:]:
                yield f"      {line}"
