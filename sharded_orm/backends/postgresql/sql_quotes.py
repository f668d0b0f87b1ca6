"""Names and texts as parts of SQL, quoted."""

from __future__ import annotations


def quoted(name: str) -> str:
    """Return ``name`` as a quoted SQL identifier."""
    return '"{}"'.format(name.replace('"', '""'))


def literal(text: str) -> str:
    """Return ``text`` as an SQL literal, whatever ``standard_conforming_strings`` says."""
    if "\\" in text:
        return " E'{}'".format(text.replace("\\", "\\\\").replace("'", "''"))
    return "'{}'".format(text.replace("'", "''"))
