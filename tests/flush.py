"""The flush after each test with transactions of its own, without what is the same each time.

Django's test cases call the command ``flush`` for each database. It builds a parser, imports the module
``management`` of each app, and asks the router for each model. Then it empties the tables and sends
``post_migrate``, and ``contenttypes`` and ``auth`` look at all models and write the same rows again. All
that takes nine tenths of the processor time. Here the tables are emptied by the same statements, and
``contenttypes`` and ``auth`` compute their rows at the first flush; later ones insert those rows.

A test that calls the command itself gets the command, with those rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.core.management.color import no_style
from django.core.management.commands import flush
from django.core.management.sql import emit_post_migrate_signal
from django.db import connections, router
from django.db.models.signals import post_migrate
from django.test import testcases


@contextmanager
def same_rows_after_each_flush() -> Iterator[None]:
    """For the block, insert the rows of the first flush after each other flush in this process."""
    rows = _StoredRows()

    def command_of_test_case(name: str, *args: Any, **options: Any) -> Any:
        if name != "flush":
            return call_command(name, *args, **options)
        return _flush(rows, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush, "emit_post_migrate_signal", rows.after_flush)
        patch.setattr(testcases, "call_command", command_of_test_case)
        yield


def _flush(
    rows: _StoredRows,
    *,
    database: str,
    allow_cascade: bool,
    inhibit_post_migrate: bool,
    reset_sequences: bool,
    **options: Any,
) -> None:
    """Do what the command ``flush`` does for a test case."""
    connection = connections[database]
    statements = connection.ops.sql_flush(
        no_style(),
        _tables(connection),
        reset_sequences=reset_sequences,
        allow_cascade=allow_cascade,
    )
    connection.ops.execute_sql_flush(statements)
    if statements and not inhibit_post_migrate:
        rows.after_flush(0, False, database)


def _tables(connection: Any) -> list[str]:
    """Return the tables of the database that belong to models.

    They do not depend on the router: a table that is not where the router wants it is emptied as well.
    """
    models = frozenset(apps.get_models(include_auto_created=True))
    if models not in _names:
        _names[models] = sorted({m._meta.db_table for m in models if m._meta.managed})
    introspection = connection.introspection
    existing = set(introspection.table_names(include_views=False))
    return [name for name in _names[models] if introspection.identifier_converter(name) in existing]


#: Tables by the models.
_names: dict[Any, list[str]] = {}


class _StoredRows:
    """Rows of ``ContentType`` and ``Permission``, which depend on the alias and the models only."""

    def __init__(self) -> None:
        self._rows: dict[Any, list[tuple[Any, list[tuple[Any, ...]]]]] = {}

    def after_flush(self, verbosity: int, interactive: bool, db: str) -> None:
        if not apps.is_installed("django.contrib.auth"):
            emit_post_migrate_signal(verbosity, interactive, db)
            return
        with _without_receivers():
            self._restore(db)
            emit_post_migrate_signal(verbosity, interactive, db)

    def _restore(self, alias: str) -> None:
        from django.contrib.auth.models import Permission
        from django.contrib.contenttypes.models import ContentType

        models: tuple[Any, ...] = (ContentType, Permission)
        if not all(router.allow_migrate_model(alias, model) for model in models):
            return
        key = alias, frozenset(apps.get_models())
        if key in self._rows:
            ContentType.objects.clear_cache()
            for model, rows in self._rows[key]:
                _insert(alias, model, rows)
        else:
            for receiver in _receivers():
                for app in apps.get_app_configs():
                    receiver(app, verbosity=0, interactive=False, using=alias)
            self._rows[key] = [
                (model, list(model.objects.using(alias).values_list(*_columns(model))))
                for model in models
            ]


def _columns(model: Any) -> list[str]:
    return [field.column for field in model._meta.concrete_fields]


def _insert(alias: str, model: Any, rows: list[tuple[Any, ...]]) -> None:
    quote = connections[alias].ops.quote_name
    columns = _columns(model)
    if not rows:
        return
    row = f"({', '.join(['%s'] * len(columns))})"
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {quote(model._meta.db_table)} ({', '.join(map(quote, columns))})"
            f" VALUES {', '.join([row] * len(rows))}",
            [value for values in rows for value in values],
        )


def _receivers() -> list[Any]:
    from django.contrib.auth.management import create_permissions
    from django.contrib.contenttypes.management import create_contenttypes

    return [create_contenttypes, create_permissions]


@contextmanager
def _without_receivers() -> Iterator[None]:
    create_contenttypes, create_permissions = _receivers()
    # As in AppConfig.ready() of both apps.
    identity = "django.contrib.auth.management.create_permissions"
    post_migrate.disconnect(create_contenttypes)
    post_migrate.disconnect(dispatch_uid=identity)
    try:
        yield
    finally:
        post_migrate.connect(create_contenttypes)
        post_migrate.connect(create_permissions, dispatch_uid=identity)
