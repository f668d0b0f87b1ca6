"""Tables as commands print them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from django.core.management import BaseCommand


def write_table(
    command: BaseCommand,
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    bad: Container[str] = (),
) -> None:
    """Columns as wide as they must be; those whose head begins with ">" are of numbers.

    :param lines: as many cells as heads; a line of one cell may be of any width.
    :param bad: a line with such a cell is printed as an error.
    """
    right = [head.startswith(">") for head in heads]
    full = [[head.lstrip(">") for head in heads], *lines]
    widths = [max(len(line[n]) for line in full if len(line) > 1) for n in range(len(heads))]
    for number, line in enumerate(full):
        text = "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=False)
        ).rstrip()
        if number == 0:
            text = command.style.MIGRATE_HEADING(text)
        elif any(cell in bad for cell in line):
            text = command.style.ERROR(text)
        command.stdout.write(text)
