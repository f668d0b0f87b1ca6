"""Plans of new rows: the INSERT of one row, as SQL that Django has compiled once.

INSERTs of the same fields, with values of the same types, have the same SQL. The *shape* of an
INSERT contains these fields and types, and each shape can have a plan. A plan only saves the time
to compile the SQL. Django's compiler still sends the statement, and reads the ids that the database
has generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from django.apps import apps
from django.db.models.sql import InsertQuery

from sharded_orm import compat, runtime
from sharded_orm.models.fields.timestamped import ColumnDefault
from sharded_orm.models.plans.shapes import plan_of
from sharded_orm.models.plans.updates import PLAIN_TYPES, are_same, has_placeholder

#: The maximum number of plans for the new rows of one model. Django compiles the other INSERTs.
MAX_INSERTS = 200

_Statements = list[tuple[str, tuple[Any, ...]]]


class _InsertPlan(NamedTuple):
    """The SQL of an INSERT of one row.

    :param table: the table that is written.
    :param columns: the columns of the fields.
    :param sql: the SQL without the clause that returns values.
    :param kinds: the type of each prepared value.
    :param fields: the written fields. Plans are found by the ``id()`` of each field. Because the plan keeps
        references to its fields, Python cannot give their ``id()`` to other fields.
    :param backend: the class of the connections on which the plan may be used.
    """

    table: str
    columns: list[str]
    sql: str
    kinds: list[type]
    fields: Sequence[Any]
    backend: type


_SEEN: Any = object()
#: The plans, by model and shape. A shape consists of whether the INSERT returns values, the ``id()`` of
#: each field, and the types of the fields' values. If a shape was inserted only once, ``_SEEN`` is in the
#: place of its plan. None means that Django compiles each INSERT of the shape.
_inserts: dict[Any, dict[tuple[Any, ...], Any]] = {}


def forget() -> None:
    """Drop all plans of INSERTs, because the settings have changed."""
    _inserts.clear()


runtime.on_reset(forget)


def insert_row(
    model: Any, row: Any, fields: Sequence[Any], returning: Sequence[Any], raw: bool, using: str
) -> Any:
    """Insert ``row``, and return what Django's ``QuerySet._insert()`` returns for it.

    :param fields: the fields to be written.
    :param returning: the fields whose values the INSERT returns.
    :param raw: whether the values are written without ``pre_save()`` of the fields.
    """
    query = InsertQuery(model)
    query.insert_values(fields, [row], raw=raw)
    compiler: Any = query.get_compiler(using=using)
    if model._meta.apps is apps:
        compiler.as_sql = partial(_statements_of, compiler, compiler.as_sql)
    return compiler.execute_sql(returning)


def _statements_of(compiler: Any, compile_by_django: Callable[[], _Statements]) -> _Statements:
    """Return the INSERT and its parameters, from a plan or, if there is none, from Django."""
    query, connection = compiler.query, compiler.connection
    (row,) = query.objs
    values: dict[int, Any] = {}
    prepared: dict[int, Any] = {}
    # Prepare each value as Django's compiler does, and in the same order.
    for field in query.fields:
        value = values[id(field)] = compiler.pre_save_val(field, row)
        if type(value) in PLAIN_TYPES:
            prepared[id(field)] = field.get_db_prep_save(value, connection=connection)
        elif type(value) is not ColumnDefault:
            return _compile(compiler, compile_by_django, values, prepared)
    returning, returning_parameters = _returning(compiler)
    if returning_parameters:
        return _compile(compiler, compile_by_django, values, prepared)
    shape = (bool(returning), *values, *map(type, values.values()))
    plans = _inserts.setdefault(query.model, {})
    plan = plans.get(shape)
    parameters = tuple(prepared.values())
    table, columns = query.get_meta().db_table, [field.column for field in query.fields]
    if (
        type(plan) is _InsertPlan
        and plan.kinds == list(map(type, parameters))
        and plan.backend is type(connection)
        and plan.table == table
        and plan.columns == columns
    ):
        compiler.returning_params = returning_parameters
        return [(f"{plan.sql} {returning}" if returning else plan.sql, parameters)]
    statements = _compile(compiler, compile_by_django, values, prepared)
    if plan is not None:  # It was seen once, or its plan does not fit.
        plans[shape] = plan_of(
            f"INSERT of {query.model.__name__}",
            lambda: _new_plan(statements, returning, parameters, query, table, columns, connection),
        )
    elif shape not in plans and len(plans) < MAX_INSERTS:
        plans[shape] = _SEEN
    return statements


def _compile(
    compiler: Any,
    compile_by_django: Callable[[], _Statements],
    values: dict[int, Any],
    prepared: dict[int, Any],
) -> _Statements:
    """Let Django compile the INSERT, but do not let it compute the known values a second time.

    A second call of ``pre_save()`` of a field could return another value, such as a later time.

    :param values: what ``pre_save()`` has returned, keyed by the ``id()`` of the field.
    :param prepared: the values that were prepared for the database, keyed by the ``id()`` of the field.
    """
    pre_save, prepare = compiler.pre_save_val, compiler.prepare_value

    def known_value(field: Any, row: Any) -> Any:
        return values[id(field)] if id(field) in values else pre_save(field, row)

    def known_prepared_value(field: Any, value: Any) -> Any:
        return prepared[id(field)] if id(field) in prepared else prepare(field, value)

    compiler.pre_save_val, compiler.prepare_value = known_value, known_prepared_value
    return compile_by_django()


def _returning(compiler: Any) -> tuple[str, Sequence[Any]]:
    """Return the clause of the INSERT that returns values, and its parameters."""
    connection = compiler.connection
    if not compiler.returning_fields or not connection.features.can_return_columns_from_insert:
        return "", ()
    return compat.returning_columns(connection.ops, compiler.returning_fields)


def _new_plan(
    statements: _Statements,
    returning: str,
    parameters: Sequence[Any],
    query: Any,
    table: str,
    columns: list[str],
    connection: Any,
) -> _InsertPlan | None:
    """Return the plan of the INSERT that Django has compiled to ``statements``.

    Return None if it is unclear which parameter of the SQL belongs to which value, or if the SQL
    may be different for other values.
    """
    if len(statements) != 1 or any(has_placeholder(f, connection) for f in query.fields):
        return None
    sql, compiled = statements[0]
    clause = f" {returning}" if returning else ""
    if (
        not are_same(compiled, parameters)
        or not sql.endswith(clause)
        or any(hasattr(value, "as_sql") for value in parameters)
    ):
        return None
    return _InsertPlan(
        table,
        columns,
        sql.removesuffix(clause),
        list(map(type, parameters)),
        list(query.fields),
        type(connection),
    )
