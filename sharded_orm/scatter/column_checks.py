"""Checks of columns on the servers, before a scatter (a query of many shards) is sent.

They depend on the actual columns, because tables may be older than the models, or made by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError
from django.db.models import Max, Min
from django.db.models.expressions import Case, Col, ExpressionWrapper, Ref, When
from django.db.models.functions import Coalesce, Greatest, Least, NullIf

from sharded_orm.backends import key_guard
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.backends.group.test_databases import prepare_shards
from sharded_orm.scatter.failures import is_failure
from sharded_orm.scatter.refusals import refuse

if TYPE_CHECKING:
    from sharded_orm.scatter.comparison import Column
    from sharded_orm.scatter.plan import Branch

# The types of MariaDB and MySQL whose values the merge compares as the server does.
_COMPARED = frozenset({
    "tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "double",
    "date", "datetime", "timestamp", "time", "year",
    "char", "varchar", "tinytext", "text", "mediumtext", "longtext",
    "binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob",
})  # fmt: skip
# Types by whose numbers a column is sorted. But an expression with such a column is a text.
_NUMBERED = frozenset(["enum", "set"])
# The values of these expressions have the type of an operand.
_SAME_TYPE = (
    Case, Coalesce, ExpressionWrapper, Greatest, Least, Max, Min, NullIf, Ref, When,
)  # fmt: skip

# The columns that were checked: (node, table, column, kind of values). Only columns that the merge
# can compare are in it, so a column that was corrected is not refused any more.
_checked: set[tuple[str, str, str, str]] = set()


def text_key_failure(branches: Sequence[Branch]) -> DatabaseError | None:
    """Check that the node of ``branches`` compares text shard keys as exactly as the router does.

    For the router, ``Ada`` and ``ada`` are different keys. But they are equal in a column with a
    case-insensitive collation. Return the database's error if the node does not answer, else None.

    :param branches: SELECTs for one shard each, all for the same node.
    :raises InexactShardKey: the node compares text keys less exactly than the router.
    """
    shards = [branch.shard for branch in branches]
    # A node has few templates, mostly one.
    tables = frozenset().union(*{branch.template.tables for branch in branches})
    try:
        key_guard.check(connection_of(shards[0].alias), shards, tables)
    except DatabaseError as error:
        if not is_failure(error):
            raise
        return error
    return None


def value_type_failure(branch: Branch) -> DatabaseError | None:
    """Check that the merge compares values of the columns' types as MariaDB and MySQL do.

    For example, these servers sort an ENUM by the numbers of its values, but its column in a UNION
    is a text. And they send a FLOAT with six digits only, which may be equal where the values
    differ. Return the database's error if the node does not answer, else None.

    Costs one query for columns that this process has not compared yet on the node.

    :param branch: the SELECT for one shard. The other shards of its node are not checked.
    :raises ScatterNotSupported: the merge cannot compare the values of a column.
    """
    shard, template = branch.shard, branch.template
    if not (compared := template.compared):
        return None
    connection: Any = connection_of(shard.alias)
    if features_of(connection).text_compared_by != "weights":
        return None
    sources = [
        (column, col)
        for column in map(template.columns.__getitem__, compared)
        for col in _columns_of_type(column.expression)
        if _key(shard.node, column, col) not in _checked
    ]
    if not sources:
        return None
    tables = {_table_and_name(col)[0] for _, col in sources}
    prepare_shards(shard.group, (shard,))
    try:
        types = connection.column_types(
            (shard,), tables, {_table_and_name(col)[1] for _, col in sources}
        )
    except DatabaseError as error:
        if not is_failure(error):
            raise
        return error
    for column, col in sources:
        table, name = _table_and_name(col)
        kind = types.get(shard.alias, {}).get(table.lower(), {}).get(name.lower())
        if kind is None or (kind.data_type in _NUMBERED and col is not column.expression):
            continue
        if kind.data_type not in _COMPARED and kind.data_type != column.kind:
            raise refuse(
                f"a comparison of values of {table}.{name}, whose type on the server is"
                f" {kind.data_type.upper()}",
                "compare Cast(field, CharField()), or a Cast() to a number",
            )
        _checked.add(_key(shard.node, column, col))
    return None


def _columns_of_type(expression: Any) -> Iterator[Col]:
    """Yield the columns in ``expression`` whose type its values may have."""
    if isinstance(expression, Col):
        yield expression
    elif isinstance(expression, _SAME_TYPE):
        for part in expression.get_source_expressions():
            yield from _columns_of_type(part)


def _table_and_name(col: Col) -> tuple[str, str]:
    return col.target.model._meta.db_table, str(col.target.column)


def _key(node: str, column: Column, col: Col) -> tuple[str, str, str, str]:
    return node, *_table_and_name(col), column.kind
