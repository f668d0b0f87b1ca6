"""Checks of columns on the servers, before a scatter (a query of many shards) is sent.

They depend on the actual columns, because tables may be older than the models, or made by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import DatabaseError
from django.db.models import Exists, Max, Min, Subquery
from django.db.models.expressions import Case, Col, ExpressionWrapper, Ref, Value, When
from django.db.models.functions import Coalesce, Greatest, Least, NullIf

from sharded_orm import runtime
from sharded_orm.backends import key_guard
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.backends.group.test_databases import prepare_shards
from sharded_orm.scatter.failures import is_failure
from sharded_orm.scatter.refusals import refuse

if TYPE_CHECKING:
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
# The SQL of these expressions is that of their operand.
_WRAPPERS = (ExpressionWrapper, Ref)
# The values of these expressions have the type of an operand.
_SAME_TYPE = (Case, Coalesce, Greatest, Least, Max, Min, NullIf, When)


class _Checked(NamedTuple):
    """A column that the merge can compare, and how it compares it.

    :param kind: how the values are compared, see :class:`Column`.
    :param is_ordered: whether the rows are sorted by the values.
    :param is_whole: whether the values are those of the column. Otherwise the column is only a part
        of an expression.
    :param is_double: whether the column is a part of an expression that turns values of the type
        FLOAT into those of the type DOUBLE.
    """

    group: str
    node: str
    table: str
    name: str
    kind: str
    is_ordered: bool
    is_whole: bool
    is_double: bool


# Columns that the merge cannot compare are not in it, so one that was corrected is not refused any
# more.
_checked: set[_Checked] = set()


def forget() -> None:
    """Forget which columns were checked, because settings or tables may have changed."""
    _checked.clear()


runtime.on_reset(forget)


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
    ordered = {key.column for key in template.order}
    unchecked = {
        key
        for index in compared
        for column in (template.columns[index],)
        for col, is_whole, is_double in _columns_of_type(column.expression)
        if (
            key := _Checked(
                group=shard.group,
                node=shard.node,
                table=col.target.model._meta.db_table,
                name=str(col.target.column),
                kind=column.kind,
                is_ordered=index in ordered,
                is_whole=is_whole,
                is_double=is_double,
            )
        )
        not in _checked
    }
    if not unchecked:
        return None
    tables, names = {key.table for key in unchecked}, {key.name for key in unchecked}
    prepare_shards(shard.group, (shard,))
    try:
        types = connection.column_types((shard,), tables, names)
    except DatabaseError as error:
        if not is_failure(error):
            raise
        return error
    sorts_uuids = connection.features.has_native_uuid_field
    for key in unchecked:
        column = types.get(shard.alias, {}).get(key.table.lower(), {}).get(key.name.lower())
        if column is None:
            continue
        kind = column.data_type
        is_compared = (
            kind in _COMPARED
            or kind == key.kind
            or (kind in _NUMBERED and not key.is_whole)
            or (kind == "float" and key.is_double)
        )
        if key.kind == "uuid" and key.is_ordered and sorts_uuids:
            # The merge sorts by the server's order of its type for UUIDs, which is not that of texts.
            is_compared = kind == "uuid"
        if not is_compared:
            raise refuse(
                f"a comparison of values of {key.table}.{key.name}, whose type on the server is"
                f" {kind.upper()}",
                "compare Cast(field, CharField()), or a Cast() to a number",
            )
        _checked.add(key)
    return None


def _columns_of_type(
    expression: Any, *, is_whole: bool = True, is_double: bool = False
) -> Iterator[tuple[Col, bool, bool]]:
    """Yield the columns in ``expression`` whose type its values may have.

    Each comes with :attr:`_Checked.is_whole` and :attr:`_Checked.is_double`.
    """
    if isinstance(expression, Col):
        yield expression, is_whole, is_double
        return
    parts: Iterable[Any] = ()
    if isinstance(expression, _WRAPPERS):
        parts = expression.get_source_expressions()
    elif isinstance(expression, _SAME_TYPE):
        parts, is_whole = expression.get_source_expressions(), False
        is_double = is_double or _may_be_a_float(expression)
    elif isinstance(expression, Subquery) and not isinstance(expression, Exists):
        query = expression.query
        parts, is_whole = (*query.select, *query.annotation_select.values()), False
    for part in parts:
        yield from _columns_of_type(part, is_whole=is_whole, is_double=is_double)


def _may_be_a_float(expression: Any) -> bool:
    """Whether one of the values of a ``Coalesce()`` or a ``Case()`` is a float of Python.

    The server takes such a float for a DOUBLE, which is then the type of all values.
    """
    if not isinstance(expression, Coalesce | Case):
        return False
    values = (
        part.result if isinstance(part, When) else part
        for part in expression.get_source_expressions()
    )
    return any(isinstance(value, Value) and type(value.value) is float for value in values)
