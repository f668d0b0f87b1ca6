"""The table that a run prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.timing import Measured


@dataclass(frozen=True)
class Line:
    """One line of the table. ``reached`` is None for a line that is for comparison only."""

    what: str
    against: str
    measured: str
    to_reach: str = ""
    reached: bool | None = None
    detail: str = ""
    cpu: str = ""


def at_most(
    limit: float,
    what: str,
    against: str,
    measured: Measured,
    *,
    goal: bool = True,
    of_cpu: bool = False,
) -> Line:
    """A line about time: ours / stock must not exceed ``limit``.

    :param of_cpu: whether ``limit`` is about the processor time of this process.
    """
    ratio = measured.cpu if of_cpu and measured.cpu is not None else measured.ratio
    return Line(
        what,
        against,
        f"{measured.ratio:.2f}x",
        f"<= {limit:.2f}x{' CPU' if of_cpu else ''}" if goal else "",
        ratio <= limit if goal else None,
        _detail(measured),
        _cpu(measured),
    )


def at_least(
    limit: float, what: str, against: str, measured: Measured, *, goal: bool = True
) -> Line:
    """A line about speed: stock / ours must reach ``limit``."""
    speed = 1 / measured.ratio
    return Line(
        what,
        against,
        f"{speed:.2f}x as fast",
        f">= {limit:.2f}x" if goal else "",
        speed >= limit if goal else None,
        _detail(measured),
        _cpu(measured),
    )


def _cpu(measured: Measured) -> str:
    return "" if measured.cpu is None else f"{measured.cpu:.2f}x"


def _detail(measured: Measured) -> str:
    low, high = measured.spread
    return (
        f"{_seconds(measured.ours)} / {_seconds(measured.stock)}, quartiles of ours/stock"
        f" {low:.2f}-{high:.2f}"
    )


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def show(lines: Sequence[Line]) -> str:
    """The lines as a table of plain text."""
    head = ("what", "against", "measured", "CPU", "to reach", "reached?", "ours / stock")
    cells = [head] + [
        (
            line.what,
            line.against,
            line.measured,
            line.cpu,
            line.to_reach,
            {True: "yes", False: "NO", None: ""}[line.reached],
            line.detail,
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    rows = [" | ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([rows[0], "-|-".join("-" * width for width in widths), *rows[1:]])
