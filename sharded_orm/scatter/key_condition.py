"""The condition by which a statement reads rows of given keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharded_orm.scatter.facade import PK_MARK

if TYPE_CHECKING:
    from django.db.models.sql.query import Query


class KeyAmong:
    """The condition ``key IN (…)`` on one column, such as the primary key.

    It chooses the rows that a statement reads. Its SQL has a placeholder for the keys. The
    condition is the last one in the statement, so the keys are the last parameters.
    """

    contains_aggregate = False
    contains_over_clause = False
    conditional = True

    def __init__(self, query: Query, field: Any) -> None:
        self.col = field.get_col(query.get_initial_alias())

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        sql, params = compiler.compile(self.col)
        return f"{sql} IN ({PK_MARK})", params
