"""Quote names and texts as parts of SQL."""

from __future__ import annotations


def quoted(name: str) -> str:
    """Return ``name`` as a quoted SQL identifier."""
    return '"{}"'.format(name.replace('"', '""'))


def literal(text: str) -> str:
    """Return ``text`` as an SQL literal that is valid with any value of
    ``standard_conforming_strings``.
    """
    if "\\" in text:
        return " E'{}'".format(text.replace("\\", "\\\\").replace("'", "''"))
    return "'{}'".format(text.replace("'", "''"))
