"""Printing tables in commands."""

from __future__ import annotations

from collections.abc import Container, Sequence

from django.core.management import BaseCommand


def write_table(
    command: BaseCommand,
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
    bad: Container[str] = (),
) -> None:
    """Print a table with columns that are as wide as necessary.

    :param headings: a heading that begins with ">" aligns its column to the right, for numbers.
    :param lines: rows with a cell for each heading; a row of one cell may have any width.
    :param bad: a row with such a cell is printed as an error.
    """
    right_aligned = [head.startswith(">") for head in headings]
    rows = [[head.lstrip(">") for head in headings], *lines]
    widths = [max(len(line[n]) for line in rows if len(line) > 1) for n in range(len(headings))]
    for index, line in enumerate(rows):
        text = "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right_aligned, strict=False)
        ).rstrip()
        if index == 0:
            text = command.style.MIGRATE_HEADING(text)
        elif any(cell in bad for cell in line):
            text = command.style.ERROR(text)
        command.stdout.write(text)
