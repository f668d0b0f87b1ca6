"""Quote names and texts as parts of SQL."""

from __future__ import annotations


def quoted(name: str) -> str:
    """Return ``name`` as a quoted SQL identifier."""
    return '"{}"'.format(name.replace('"', '""'))


def literal(text: str) -> str:
    """Return ``text`` as an SQL literal. It is valid whether the server's setting
    ``standard_conforming_strings`` is on or off.
    """
    if "\\" in text:
        return " E'{}'".format(text.replace("\\", "\\\\").replace("'", "''"))
    return "'{}'".format(text.replace("'", "''"))
