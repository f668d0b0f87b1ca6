"""Finds calls of functions in SQL. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def may_call(
    sql: str,
    ends_in_call: Callable[[str], bool],
    comments: Iterable[str],
    without_quotes: Callable[[str], str | None],
) -> bool:
    """Whether ``sql`` may call one of the functions whose names ``ends_in_call`` recognizes.

    :param ends_in_call: a function that gets the text before a parenthesis, in upper case. It
        returns whether this text ends in the name of such a function.
    :param comments: the marks that begin comments.
    :param without_quotes: a function that returns a statement without comments and quoted text. It
        returns None if it cannot find out where these end. It is called only if ``sql`` has a
        comment, or if the name of a function is before a parenthesis, perhaps in quoted text.
    """
    if not any(mark in sql for mark in comments) and not _has_call(sql, ends_in_call):
        # No parenthesis of the whole text, including quoted text, comes after the name of such a
        # function. So the statement makes no such call, wherever its quoted text begins and ends.
        return False
    bare = without_quotes(sql)
    return bare is None or _has_call(bare, ends_in_call)


def _has_call(sql: str, ends_in_call: Callable[[str], bool]) -> bool:
    # Split at each parenthesis. A regular expression for a name before a parenthesis would be slow
    # on long texts.
    return any(map(ends_in_call, sql.upper().split("(")[:-1]))
