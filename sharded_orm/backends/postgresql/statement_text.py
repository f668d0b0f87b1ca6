"""The text of a statement without what must not be taken for its words: comments, literals, names."""

from __future__ import annotations

import re

# Matches quoted text and comments. The order of the alternatives is that of the server's scanner. A
# backslash is an escape only in E'…'. For a comment /* … */, the pattern matches only the
# beginning, because such comments can be nested. The last alternative matches an opening quote that
# is never closed.
_QUOTED = re.compile(
    r"(?P<literal>\b[Ee]'(?:[^'\\]|\\.|'')*'|'[^']*'"
    r"|(?<![\w$\x80-\U0010ffff])\$(?P<tag>[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?\$"
    r".*?\$(?(tag)(?P=tag))\$)"
    r'|"(?P<name>(?:[^"]|"")*)"'
    r"|(?P<comment>--[^\n\r]*)"
    r"|(?P<nesting>/\*)"
    r"|(?P<open>['\"]|(?<![\w$\x80-\U0010ffff])\$(?:[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?\$)",
    re.DOTALL,
)
# If a text contains none of these marks, it has only literals and quoted names of standard SQL.
# These are found by the simpler pattern _STANDARD_QUOTED.
_BEYOND_STANDARD = ("--", "/*", "$", "\\", "E'", "e'")
_STANDARD_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"]|\"\")*\"")
_COMMENT_MARK = re.compile(r"/\*|\*/")


def without_comments(sql: str) -> str:
    """Return ``sql`` without comments, and without semicolons at its end."""
    return (strip(sql, literals=True, names=True) or sql).rstrip("; \t\r\n")


def strip(sql: str, *, literals: bool = False, names: bool = False) -> str | None:
    """Return ``sql`` without comments, and with ``?`` in place of each literal and each quoted
    name.

    Return None if it cannot be known where literals or comments end.

    :param literals: if True, literals are kept.
    :param names: if True, quoted names are kept.
    """
    if not (literals or names or any(mark in sql for mark in _BEYOND_STANDARD)):
        # Try a simple pattern first, to save time: a statement over hundreds of shards has
        # thousands of quoted names.
        bare = _STANDARD_QUOTED.sub("?", sql)
        return None if "'" in bare or '"' in bare else bare.strip()
    parts: list[str] = []
    start = 0
    while (match := _QUOTED.search(sql, start)) is not None:
        parts.append(sql[start : match.start()])
        start = match.end()
        if match["open"] is not None:
            return None
        if match["comment"] is not None:
            parts.append(" ")
        elif match["nesting"] is not None:
            depth = 1
            while depth:
                mark = _COMMENT_MARK.search(sql, start)
                if mark is None:
                    return None
                depth += 1 if mark[0] == "/*" else -1
                start = mark.end()
            parts.append(" ")
        elif match["literal"] is not None:
            parts.append(match[0] if literals else "?")
        else:
            parts.append(match[0] if names else "?")
    parts.append(sql[start:])
    return "".join(parts).strip()
