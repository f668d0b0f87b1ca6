"""Finds calls of functions in SQL. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def may_call(
    sql: str,
    ends_in_call: Callable[[str], bool],
    comments: Iterable[str],
    without_quotes: Callable[[str], str | None],
) -> bool:
    """Whether ``sql`` may call one of the functions that ``ends_in_call`` recognises.

    :param ends_in_call: gets the text before a parenthesis, in upper case. Returns whether the text
        ends in the name of such a function.
    :param comments: the marks that begin comments.
    :param without_quotes: returns a statement without comments and quoted text; None if nobody can
        know where these end. Called only if the whole text does not show the answer.
    """
    if not any(mark in sql for mark in comments) and not _has_call(sql, ends_in_call):
        # Quoted text need not be removed, wherever it ends: it can only add calls to those that the
        # statement makes.
        return False
    bare = without_quotes(sql)
    return bare is None or _has_call(bare, ends_in_call)


def _has_call(sql: str, ends_in_call: Callable[[str], bool]) -> bool:
    # Split at each parenthesis, because a search for words before one would read long texts slowly.
    return any(map(ends_in_call, sql.upper().split("(")[:-1]))
