"""Uses everything public of a connection object while its server is down.

``python -m tests.integration.mysql.walk fresh|idle|held ALIAS…``, under ``tests.settings.mysql``,
prints as JSON the names that raised something else than Django's errors.

- ``fresh``: this process has never reached the server.
- ``idle``: each name is used on a connection that has run a statement. The process prints "ready"
  and waits for a line, which it gets after the server went down.
- ``held``: the same in a transaction that has begun.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management.color import no_style
from django.db import DatabaseError, InterfaceError, connections, models
from django.db.backends.mysql.introspection import FieldInfo
from django.db.models import Index, Q, Value

from sharded_orm.backends.group.alias import GroupAliasMixin

#: Parts of a connection object that may query the server; the first is the object itself.
PARTS = ("", "features", "ops", "introspection", "creation", "client", "validation", "schema")
#: Private names that Django calls from outside.
ALSO = frozenset({"_cursor", "_nodb_cursor", "_rollback", "_commit", "_savepoint"})
#: Names that are left out, and the reason.
LEFT_OUT = {
    "client.runshell": "starts another program",
    "creation.log": "prints",
    "copy": "makes another object like what is walked",
    "get_new_connection": "is the driver's side of connect(), which wraps it",
    "create_cursor": "is the driver's side of cursor(), which wraps it",
    "init_connection_state": "is the driver's side of connect(), which wraps it",
    "connection": "is the driver's own object",
    "dec_thread_sharing": "counts, and refuses to go below zero",
    **dict.fromkeys(
        (
            "add_hook",
            "block_options",
            "add_participant",
            "remove_participant",
            "record_broken",
            "record_transaction",
        ),
        "keeps the books of a group's transaction",
    ),
    **dict.fromkeys(
        ("coordinator", "begin_branch", "begin_decider", "prepare_branch", "leave_branch"),
        "keeps the books of a transaction in two phases",
    ),
}
#: Names that only the connection of a shard uses.
OF_SHARDS = frozenset({"join_group_transaction", "leave_group_levels"})
#: Errors that are right, although they are no database errors.
ALSO_RIGHT = (NotImplementedError, ImproperlyConfigured)


class Cursor:
    """Opens a cursor at its first use, as ``with connection.cursor()`` does."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.cursor(), name)


def arguments(connection: Any) -> dict[str, Any]:
    """Return arguments for the parameters without a default, by their names."""
    from sharded_orm.backends.snapshot import SchemaSnapshot
    from sharded_orm.backends.two_phase.branch import BranchName
    from sharded_orm.backends.write_hooks.session_id import SessionID
    from tests.samples.models import Part, Sample

    meta: Any = Sample._meta
    DEFAULTED.model = Sample
    number, name = meta.get_field("number"), meta.get_field("name")
    table, sql = meta.db_table, "SELECT 1"
    snapshot = SchemaSnapshot(
        {table: f"CREATE TABLE `{table}` (`id` int)"}, "utf8mb4 utf8mb4_general_ci"
    )
    shard = connections["photos_00000"].shard  # type: ignore[attr-defined]
    writer = SessionID("server", "account", 7)
    index, other_index = Index(fields=["number"], name="one"), Index(fields=["number"], name="two")
    return {
        **dict.fromkeys(("field", "lhs_field", "rhs_field", "old_field", "output_field"), number),
        **dict.fromkeys(("table", "table_name", "lhs_table", "rhs_table", "name", "schema"), table),
        **dict.fromkeys(("old_db_table", "new_db_table", "suffix", "tablespace"), table),
        **dict.fromkeys(("old_db_tablespace", "new_db_tablespace", "pk_name", "column"), "x"),
        **dict.fromkeys(("old_db_table_comment", "new_db_table_comment", "msg", "sid"), "x"),
        **dict.fromkeys(("placeholder", "alias", "procedure_name", "x", "value", "data"), "x"),
        **dict.fromkeys(("returning_params", "placeholder_rows", "sequences", "objs"), ()),
        **dict.fromkeys(("update_fields", "unique_fields", "params", "parameters"), ()),
        **dict.fromkeys(("autocommit", "commit", "rollback"), True),
        **dict.fromkeys(("old_index_together", "old_unique_together"), (("id", "number"),)),
        **dict.fromkeys(("new_index_together", "new_unique_together"), (("id", "owner"),)),
        **dict.fromkeys(("definitions", "known"), snapshot),
        **dict.fromkeys(
            ("settings_dict", "primary_settings_dict", "node"), connection.settings_dict
        ),
        **dict.fromkeys(("low_mark", "depth", "generation", "seconds"), 0),
        **dict.fromkeys(("lhs", "rhs"), ("x", [])),
        "options": {}, "following": "2", "new_field": name, "fields": [number], "shard": shard, "shards": [shard], "model": Sample,
        "tables": [table], "firsts": {table: 1}, "columns": ["number"], "model_list": [Sample, Part], "cursor": Cursor(connection),
        "connection": connection, "expression": Value(1), "sub_expressions": ["1", "2"],
        "connector": "+", "compiler_name": "SQLCompiler", "internal_type": "IntegerField",
        "lookup_type": "year", "tzname": "Europe/Berlin", "on_conflict": None, "encoder": None,
        "confirm": lambda: None, "error": DatabaseError(), "field_type": "int", "db_type": "int", "data_type": 3, "sql": sql, "sql_list": [sql],
        "style": no_style(), "high_mark": 5, "func": print, "_worker_id": 1, "writer": writer,
        "writers": [writer], "wrapper": lambda execute, *args: execute(*args),
        "constraint": models.CheckConstraint(condition=Q(number=1), name="one"),
        # Since Django 6.0 or 6.1.
        "branch": BranchName("0.photos_00000", "x"), "transaction": "0.photos_00000",
        "operation": "CASCADE", "num": 1, "key_transforms": ["key"],
        "compiler": Sample.objects.all().query.get_compiler(connection=connection),
        "index": index, "old_index": index, "new_index": other_index,
        "description": FieldInfo(*[None] * (len(FieldInfo._fields) - 1), data_type="int")._replace(
            extra="auto_increment"
        ),
    }  # fmt: skip


DEFAULTED: Any = models.IntegerField(db_default=1, name="x")
#: Arguments for particular methods, where the value by name does not fit.
PARTICULAR: dict[str, dict[str, Any]] = {
    "check_parameters": {"params": {}},
    "schema.db_default_sql": {"field": DEFAULTED},
    "ops.adapt_datetimefield_value": {"value": None},
    "ops.adapt_durationfield_value": {"value": None},
    "ops.adapt_timefield_value": {"value": None},
    "ops.convert_datetimefield_value": {"value": None},
    "ops.convert_durationfield_value": {"value": None},
    "ops.convert_uuidfield_value": {"value": None},
    "ops.year_lookup_bounds_for_date_field": {"value": 2026},
    "ops.year_lookup_bounds_for_datetime_field": {"value": 2026},
}


class Walk:
    """Walks one connection object after the other, a new one for each name."""

    def __init__(self, alias: str, how: str) -> None:
        self._alias = alias
        self._names = list(self._found())
        self.problems: dict[str, str] = {}
        used = how != "fresh"
        self._used = {path: self._one_used(how) for path, _ in self._names} if used else {}

    def _new(self) -> Any:
        return connections.create_connection(self._alias)

    def _one_used(self, how: str) -> Any:
        connection = self._new()
        if isinstance(connection, GroupAliasMixin):
            connection.connect()  # It has no cursors.
            return connection
        connection.set_autocommit(how == "idle")
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        return connection

    def _found(self) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Find each path by introspection, and how to get its object."""
        one = self._new()
        for part in PARTS:
            cls = type(_part(one, part))
            for name in dir(cls):
                if name in OF_SHARDS and one.group_wrapper is None:
                    continue
                path = f"{part}.{name}" if part else name
                public = not name.startswith("_") or (not part and name in ALSO)
                if public and path not in LEFT_OUT and not inspect.isclass(getattr(cls, name)):
                    yield (
                        path,
                        lambda connection, part=part, name=name: getattr(  # type: ignore[misc]
                            _part(connection, part), name
                        ),
                    )

    def run(self) -> None:
        for path, get in self._names:
            connection = self._used[path] if self._used else self._new()
            try:
                _use(get(connection), path, connection)
            except (DatabaseError, InterfaceError, *ALSO_RIGHT):
                pass
            except BaseException as exc:
                self.problems[f"{self._alias}: {path}"] = f"{type(exc).__module__}: {exc!r}"


def queries() -> dict[str, Callable[[], Any]]:
    """Run queries that ask for the server's features before there is a cursor."""
    from tests.photos.models import Event, Person

    events = Event.objects.filter(account="a")
    return {
        "annotate": lambda: list(events.annotate(n=models.Count("number"))),
        "values": lambda: list(events.values("number").annotate(n=models.Count("pk"))),
        "global": lambda: list(Person.objects.annotate(n=models.Count("username"))),
        "explain": lambda: events.explain(),
        "explain as JSON": lambda: events.explain(format="json"),
        "regex": lambda: list(events.filter(account__regex="a")),
        "iregex": lambda: events.filter(account__iregex="a").count(),
        "lock": lambda: list(events.select_for_update(skip_locked=True)),
        "intersection": lambda: list(events.intersection(events)),
        "update": lambda: events.filter(pk__in=events.values("pk")).update(number=1),
        "create": lambda: Event.objects.create(account="a"),
        "bulk_create": lambda: Event.objects.bulk_create([Event(account="a")]),
        "scatter": lambda: list(
            Event.objects.scatter().values("account").annotate(n=models.Count("pk"))
        ),
        "aggregate": lambda: Event.objects.scatter().aggregate(n=models.Max("number")),
    }


def run_queries() -> dict[str, str]:
    problems = {}
    for name, query in queries().items():
        try:
            query()
        except DatabaseError:
            continue
        except Exception as exc:
            problems[name] = f"{type(exc).__module__}: {exc!r}"
        else:
            problems[name] = "no error"
    return problems


def _part(connection: Any, part: str) -> Any:
    if part == "schema":
        editor = connection.SchemaEditorClass(connection)
        editor.deferred_sql = []  # as __enter__ does
        return editor
    return getattr(connection, part) if part else connection


def _use(value: Any, path: str, connection: Any) -> None:
    """Call it, enter it, or read it to its end."""
    if callable(value) and not inspect.isclass(value):
        values = arguments(connection) | PARTICULAR.get(path, {})
        parameters = inspect.signature(value).parameters.values()
        value = value(**{
            p.name: values[p.name]
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        })  # fmt: skip
    if isinstance(value, AbstractContextManager):
        with value as entered:
            if hasattr(entered, "fetchall"):
                entered.execute("SELECT 1")
                entered.fetchall()
    elif isinstance(value, Iterator):
        list(value)


def main() -> None:
    how, *aliases = sys.argv[1:]
    django.setup()
    if how != "fresh":
        for alias in aliases:
            connection: Any = connections[alias]
            if not isinstance(connection, GroupAliasMixin):
                connection.create_shard_database()
    walks = [Walk(alias, how) for alias in aliases]
    if how != "fresh":
        print("ready", flush=True)
        sys.stdin.readline()
    problems = run_queries() if how == "fresh" else {}
    for walk in walks:
        walk.run()
        problems |= walk.problems
    print(json.dumps(problems), flush=True)


if __name__ == "__main__":
    main()
