"""Checks that run before rows are imported, and before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import Error, connections, transaction

from sharded_orm import runtime
from sharded_orm.backends.features import features_of
from sharded_orm.models.fields import TicketField
from sharded_orm.models.sharding.options import group_of, target_field
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports import source_checks
from sharded_orm.operations.imports.request import ImportRequest
from sharded_orm.operations.imports.source_tables import SourceTable
from sharded_orm.operations.migrate import MigrateOptions, Migrator, migration_run
from sharded_orm.operations.runs import journal
from sharded_orm.operations.selection import numbers_text
from sharded_orm.operations.shards.status import error_line
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class ImportPlan:
    """What an import would do.

    :param tables: the label and the number of rows of each table, in the order in which the tables
        are copied.
    :param problems: sentences about why the import would be refused; empty if it would be accepted.
    :param left_out: labels of sharded models of the group that have a table on the source (the
        database with the rows) but are not imported.
    """

    tables: list[tuple[str, int]]
    problems: list[str]
    left_out: list[str]


def plan_import(request: ImportRequest) -> ImportPlan:
    """Return what an import of ``request`` would do.

    Reads the source (the database with the unsharded rows) and the shards, and changes nothing.
    Cost: each table of the source is scanned several times, but most of the queries return only a
    count or a few examples.
    """
    problems = list(_problems(request))
    tables: list[tuple[str, int]] = []
    left_out: list[str] = []
    if not _source_problem(request.source):
        names = _table_names(request.source)
        tables = [
            (table.label, table.query().count())
            for table in request.tables
            if table.model._meta.db_table in names
        ]
        left_out = _left_out(request, names)
    return ImportPlan(tables, problems, left_out)


def check_import(request: ImportRequest) -> None:
    """Check that the rows of the requested tables can be imported. Changes nothing.

    :raises ImportRefused: the rows cannot be imported. The error lists every reason.
    """
    problems = list(_problems(request))
    if problems:
        raise ImportRefused(problems)


def check_source(request: ImportRequest) -> None:
    """Check that the requested tables can be read on the source (the database with the rows), and
    on all shards.

    :raises ImportRefused: a table cannot be read. The error lists every reason.
    """
    problems = [*_structure_problems(request), *_target_problems(request)]
    if problems:
        raise ImportRefused(problems)


def _problems(request: ImportRequest) -> Iterator[str]:
    structure = list(_structure_problems(request))
    yield from structure
    yield from _target_problems(request)
    if not structure:
        yield from source_checks.row_problems(request)


def _structure_problems(request: ImportRequest) -> Iterator[str]:
    problem = _source_problem(request.source)
    if problem:
        yield problem
        return
    names = _table_names(request.source)
    for table in request.tables:
        yield from _table_problems(table, names)


def _source_problem(alias: str) -> str:
    """Return the reason why rows cannot be imported from the database ``alias``; "" if they can."""
    topology = runtime.topology()
    if topology.resolve(alias) is not None or alias in topology.groups:
        return (
            f"{alias!r} is a shard or a group of shards: only rows of an unsharded database can be"
            " imported"
        )
    if not dict.__contains__(settings.DATABASES, alias):
        return f"DATABASES has no alias {alias!r}; name the database with the old tables"
    return ""


def _table_names(alias: str) -> set[str]:
    connection = connections[alias]
    with connection.cursor() as cursor:
        return set(connection.introspection.table_names(cursor))


def _table_problems(table: SourceTable, names: set[str]) -> Iterator[str]:
    name = table.model._meta.db_table
    if name not in names:
        yield f"{table.alias!r} has no table {name!r} of {table.label}"
        return
    connection = connections[table.alias]
    with connection.cursor() as cursor:
        there = {
            column.name: column
            for column in connection.introspection.get_table_description(cursor, name)
        }
    own = {str(field.column) for field in table.model._meta.local_concrete_fields}
    if missing := sorted(own - set(there)):
        yield (
            f"the table {name!r} on {table.alias!r} lacks the columns {missing!r} of {table.label}:"
            " add and fill them there by a migration"
        )
    if more := sorted(set(there) - own):
        yield (
            f"the table {name!r} on {table.alias!r} has the columns {more!r}, which {table.label}"
            " has not, so their values would be lost: drop them, or add them to the model"
        )
    for column in table.columns:
        if column.plain_field is None:
            yield f"values of {table.label}.{column.field.name} cannot be copied: its type is unknown"
    for field in table.pk_fields:
        # The field class may change a value that is read from the database; for example, it may
        # decrypt the value. The import copies the stored form of a primary key, but looks the row
        # up by the changed form. So it might not find the row, and such a primary key is refused.
        if hasattr(target_field(field), "from_db_value"):
            yield (
                f"the primary key {field.name!r} of {table.label} cannot be copied: its field class"
                " changes the values that it reads. Import with a field class that does not"
            )


def _target_problems(request: ImportRequest) -> Iterator[str]:
    """Yield the reasons why an import would fail on the shards.

    For example, a shard is not migrated, or no ticket server could give ids to rows that are
    created after the import.
    """
    group = runtime.group(request.group)
    shards = list(group.shards())
    migrator = Migrator(group, MigrateOptions(), journal.Scripts())
    state = migrator.applied_state(shards)
    for why, some in (("do not exist", state.missing), ("are not migrated", state.behind)):
        if some:
            numbers = numbers_text(sorted(some, key=lambda shard: shard.number))
            yield (
                f"shards {numbers} of group {group.name!r} {why}: run 'manage.py migrate_shards"
                f" --create --group {group.name}'"
            )
    for alias, exc in state.unreachable.items():
        yield f"shard {alias!r} does not answer: {error_line(exc)}"
    yield from _privilege_problems(
        [s for s in shards if s.alias not in state.unreachable and s not in state.missing]
    )
    last = journal.last_run(migration_run.KIND, group.name)
    if last is not None and last.state in ("running", "broken off"):
        yield (
            f"the migration of group {group.name!r} (run {last.id}) is not finished: wait for it, or"
            f" run 'manage.py migrate_shards --group {group.name}'"
        )
    uses_tickets = [
        column.field
        for table in request.tables
        for column in table.columns
        if isinstance(column.field, TicketField)
    ]
    if uses_tickets and not runtime.config().tickets:
        yield "SHARDED_ORM['TICKETS'] names no ticket server, but new rows need ids from them"


def _privilege_problems(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield a sentence for each node whose account may not switch off the check of foreign keys.

    An import needs this, because it may store a row before the rows to which it refers.
    """
    for shard in {shard.node: shard for shard in shards}.values():
        connection = connections[shard.alias]
        statement = features_of(connection).foreign_keys_off
        if not statement:
            continue
        try:
            with transaction.atomic(using=shard.alias), connection.cursor() as cursor:
                cursor.execute(statement)
        except Error as exc:
            user = connection.settings_dict["USER"] or _current_user(connection)
            yield (
                f"the account {user!r} of the node {shard.node!r} cannot store rows before the rows to"
                f" which they refer ({error_line(exc)}): GRANT SET ON PARAMETER session_replication_role"
                f' TO "{user}", as long as the import lasts (PostgreSQL 15 and later; a superuser may do'
                " so always)"
            )
        finally:
            connection.close()


def _current_user(connection: Any) -> str:
    # Without the setting USER, the client library takes the account from its environment. So ask
    # the server for the account.
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_user")
            return str(cursor.fetchone()[0])
    except Error:
        return ""  # The server does not answer any more.


def _left_out(request: ImportRequest, names: set[str]) -> list[str]:
    models = {table.model for table in request.tables}
    labels: list[str] = [
        model._meta.label
        for model in apps.get_models(include_auto_created=True)
        if group_of(model) == request.group
        and not model._meta.proxy
        and model not in models
        and model._meta.db_table in names
    ]
    return sorted(labels)
