"""Print tables in management commands."""

from __future__ import annotations

from collections.abc import Container, Sequence

from django.core.management import BaseCommand


def write_table(
    command: BaseCommand,
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
    bad: Container[str] = (),
) -> None:
    """Print a table. Each column is as wide as its longest cell.

    :param headings: the headings. A heading that begins with ">" aligns its column to the right,
        for numbers.
    :param lines: the rows, with a cell for each heading. A row may also be a single cell; such a
        row does not affect the widths of the columns.
    :param bad: cell texts that mark a problem, for example ``{"failed"}``. If one of the cells of a
        row is such a text, the row is printed in the style of errors. The default is empty.
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
