"""Refuses queries of many shards if the results of the shards cannot be merged exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.db.models import CompositePrimaryKey
from django.db.models.aggregates import Aggregate
from django.db.models.constants import LOOKUP_SEP
from django.db.models.expressions import ColPairs, ExpressionWrapper, F, Func, RawSQL

from sharded_orm import compat
from sharded_orm.exceptions import ScatterNotSupported

if TYPE_CHECKING:
    from django.db.models.sql.query import Query


# A window function in SQL text: ``OVER (…)``, or ``OVER`` and the name of a window.
_OVER = re.compile(r"\bover\s*(\(|\s\w)", re.IGNORECASE)

# Functions in SQL text whose value depends on the time, or on chance. A project may call them by
# Func(function=…) or by a template.
_TIME = re.compile(
    r"\b(now|sysdate|curdate|curtime|utc_date|utc_time|utc_timestamp|clock_timestamp"
    r"|statement_timestamp|transaction_timestamp|timeofday)\s*\("
    r"|\b(current_timestamp|current_date|current_time|localtime|localtimestamp)\b",
    re.IGNORECASE,
)
_CHANCE = re.compile(
    r"\b(rand|random|randomblob|uuid|uuid_short|gen_random_uuid|uuid_generate_v\w+|uuidv\d)\s*\(",
    re.IGNORECASE,
)
# The score of a full-text search of MariaDB and MySQL.
_SCORE = re.compile(r"\bagainst\s*\(", re.IGNORECASE)


def refuse(feature: str, remedy: str) -> ScatterNotSupported:
    """Return the error for a query of many shards that uses ``feature``.

    Such a query (a scatter) is refused, because the merged result might be wrong.

    :param feature: the feature in words, for the text of the error.
    :param remedy: what the developer can do instead.
    """
    return ScatterNotSupported(
        f"A query of several shards cannot have {feature}: its merged result might not be that"
        f" of one database. Remedy: {remedy}."
    )


def check(query: Query) -> None:
    """Raise an error if ``query`` uses a feature that a scatter (a query of many shards) cannot
    merge.

    This function checks only features that can be seen before the query is compiled. The compiler
    of a scatter checks all other features.

    :raises ScatterNotSupported: the query uses such a feature.
    """
    if query.combinator:
        raise refuse(
            f"{query.combinator}()", "combine with Q objects and |, or combine lists in Python"
        )
    if query.select_for_update:
        raise refuse(
            "select_for_update()", "lock rows of one shard, in a transaction on that shard"
        )
    if query.extra or query.extra_order_by or query.extra_tables:
        raise refuse("extra()", "write it with expressions, or ask one shard")


def check_written(query: Query) -> None:
    """Raise an error if several shards are to update or delete rows that a window function chooses.

    Each shard would compute the window function from its own rows only, and so choose other rows
    than one database with all rows would.

    :raises ScatterNotSupported: ``query`` filters by a window function.
    """
    if query.where.contains_over_clause:
        raise refuse(
            "a filter on a window function",
            "choose the rows in Python and write them by their keys, or write on one shard",
        )


def check_values_of_time(query: Query, values: Iterable[Any]) -> None:
    """Raise an error if an update of several shards writes the time of the database (``Now()``).

    The update is one statement for each shard, and ``Now()`` is a different time in each statement.
    But with one database, all rows would get the same time.

    :param values: the new values of columns. ``F()`` may name an annotation of ``query``.
    :raises ScatterNotSupported: one of the values depends on ``Now()`` or ``TransactionNow()``.
    """
    pending, names = list(values), set[str]()
    while pending:
        value = pending.pop()
        if not hasattr(value, "resolve_expression"):
            continue
        for part in parts_of(value):
            if is_time(part):
                raise refuse(
                    "Now() among the values that it writes",
                    "pass the time as a value (timezone.now())",
                )
            name = getattr(part, "name", None) if isinstance(part, F) else None
            if name is not None and name not in names:
                names.add(name)
                pending.append(query.annotations.get(name))


def check_server(most_rows: int | None, *, sorts_short: bool) -> None:
    """Raise an error if the merge cannot do the same as a server with these settings.

    The rows of one statement for many shards would be cut, and so would the parts of an aggregate.
    And a merge cannot tell which texts are equal for the server's sort.

    :param most_rows: the server's ``sql_select_limit``; None if it sends all rows.
    :param sorts_short: whether the query sorts texts, and the server sorts them by fewer bytes than
        by default.
    :raises ScatterNotSupported: the server has such a setting.
    """
    if sorts_short:
        raise refuse(
            "an order by texts of a server whose max_sort_length is below 1024",
            "set max_sort_length to its default of 1024, or order by another column",
        )
    if most_rows is not None:
        raise refuse(
            f"the rows of a server whose sql_select_limit is {most_rows}",
            "set sql_select_limit to its default on all servers, and limit querysets by slices",
        )


def refuse_distinct_keys(query: Query) -> None:
    """Refuse ``distinct("pk")`` if the primary key is composite.

    For such a key, Django returns one column to the scatter, although the key has several columns.
    """
    for name in query.distinct_fields:
        *_, targets, _ = query.names_to_path(name.split(LOOKUP_SEP), query.get_meta())
        if any(isinstance(target, CompositePrimaryKey) for target in targets):
            raise refuse(
                f"distinct({name!r}) on a composite primary key", "name the columns of the key"
            )


def refuse_time_and_chance(expression: Any) -> None:
    """Refuse ``Now()``, ``Random()`` and random UUIDs in GROUP BY and DISTINCT.

    Each statement computes its own values for these functions. So the merge would take rows of two
    statements for different, even if one database would put them into one group.
    """
    if any(is_time(part) or is_chance(part) for part in parts_of(expression)):
        raise refuse(
            "groups or distinct rows that depend on Now() or Random()",
            "pass the time as a value (timezone.now())",
        )


def refuse_scores(expression: Any) -> None:
    """Refuse the scores of MariaDB's and MySQL's full-text search (``MATCH … AGAINST``).

    A score depends on how many rows of the table have the words, and each shard has a table of its
    own. A condition that only asks whether a row matches is the same on each shard.
    """
    if any(_SCORE.search(_text_of(part)) for part in parts_of(expression)):
        raise refuse(
            "the score of a full-text search, which depends on all rows of a table",
            "filter by the search, and order by another column",
        )


def is_time(part: Any) -> bool:
    """Whether ``part`` is a function whose value depends on the time of the statement."""
    return isinstance(part, compat.TIME_FUNCTIONS) or _TIME.search(_text_of(part)) is not None


def is_chance(part: Any) -> bool:
    """Whether ``part`` is a function whose value depends on chance."""
    return isinstance(part, compat.RANDOM_FUNCTIONS) or _CHANCE.search(_text_of(part)) is not None


def _text_of(part: Any) -> str:
    """Return the SQL text of a ``Func``, without its arguments; "" for other expressions."""
    if not isinstance(part, Func):
        return ""
    extra = part.extra
    function, template = extra.get("function", part.function), extra.get("template", part.template)
    # The default template calls the function.
    return f"{function}( {template or ''}" if function else template or ""


def parts_of(expression: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return ``expression`` and all expressions in it, except those inside subqueries.

    :param is_leaf: a function that is called with an expression. If it returns true, the
        expressions inside this expression are left out.
    """
    parts, pending = [], [expression]
    while pending:
        part = pending.pop()
        if part is None:
            continue
        parts.append(part)
        if getattr(part, "subquery", False) and not isinstance(part, Aggregate):
            continue
        if is_leaf is not None and is_leaf(part):
            continue
        if isinstance(part, ExpressionWrapper) or hasattr(part, "get_source_expressions"):
            pending += part.get_source_expressions()
    return parts


def columns_in(expression: Any) -> list[Any]:
    """Return the columns that ``expression`` selects: several for a composite primary key."""
    return expression.get_cols() if isinstance(expression, ColPairs) else [expression]


def has_window_text(expression: Any) -> bool:
    """Whether ``expression`` is SQL text with a window function, or a ``Func`` whose template
    has one.
    """
    if isinstance(expression, Func):
        template = expression.extra.get("template", expression.template)
        return _OVER.search(template or "") is not None
    if isinstance(expression, RawSQL):
        expression = expression.sql
    return isinstance(expression, str) and _OVER.search(expression) is not None
