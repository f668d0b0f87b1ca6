"""Copies of the databases of a site, so that a site is migrated and filled once in a test run.

A site costs a dozen processes otherwise, which is more than most tests themselves.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.integration.imports.site import Site

#: Files of SQLite by their path, or the prefix of the schemas on the servers; by what a site is.
_stored: dict[str, dict[str, bytes] | str] = {}


def set_up_once(site: Site, set_up: Callable[[], None]) -> None:
    """Call ``set_up``, or give ``site`` what an equal site has had after this call.

    Sites are equal if their classes and settings are.
    """
    content = json.dumps(site.content, sort_keys=True).replace(str(site.folder), "")
    if site.prefix:
        content = content.replace(site.prefix, "")
    key = f"{type(site).__module__} {content}"
    stored = _stored.get(key)
    if isinstance(stored, dict):
        for name, data in stored.items():
            (site.folder / name).write_bytes(data)
    elif isinstance(stored, str):
        copy_schemas(site, stored, site.prefix)
    else:
        set_up()
        if site.backend == "sqlite3":
            _stored[key] = {
                str(path.relative_to(site.folder)): path.read_bytes()
                for path in Path(site.folder).rglob("*.sqlite3")
            }
        else:
            prefix = f"stored{secrets.token_hex(4)}_"
            copy_schemas(site, site.prefix, prefix)
            _stored[key] = prefix


def copy_schemas(site: Site, source: str, target: str) -> None:
    """Copy the schemas whose names begin with ``source`` on each server of ``site``.

    :param target: what their names begin with afterwards.
    """
    if site.backend == "postgresql":
        copy_databases(site, source, target)
        return
    import MySQLdb

    for node in site.nodes.values():
        account = {"host": node["HOST"], "port": int(node["PORT"]), "user": node["USER"]}
        connection = MySQLdb.connect(**account, password=node["PASSWORD"], autocommit=True)
        with closing(connection), connection.cursor() as cursor:
            for (schema,) in _rows(cursor, f"SHOW DATABASES LIKE '{source}%'"):
                copy_schema(cursor, schema, target + schema.removeprefix(source))


def copy_schema(cursor: Any, schema: str, name: str) -> None:
    """Copy tables and rows of a schema of MariaDB to a new schema ``name`` of the same server."""
    cursor.execute("SET foreign_key_checks = 0, sql_mode = 'NO_AUTO_VALUE_ON_ZERO'")
    ((_, create),) = _rows(cursor, f"SHOW CREATE DATABASE `{schema}`")
    cursor.execute(create.replace(f"`{schema}`", f"`{name}`", 1))
    cursor.execute(f"USE `{name}`")
    for (table,) in _rows(cursor, f"SHOW TABLES FROM `{schema}`"):
        ((_, create),) = _rows(cursor, f"SHOW CREATE TABLE `{schema}`.`{table}`")
        cursor.execute(create)
        cursor.execute(f"INSERT INTO `{table}` SELECT * FROM `{schema}`.`{table}`")


def copy_databases(site: Site, source: str, target: str) -> None:
    """Copy the databases whose names begin with ``source``, with the schemas in them."""
    from tests.integration.imports.site import administrator, postgresql_databases

    for node in site.nodes.values():
        with administrator(node) as run:
            for database in postgresql_databases(run, source):
                name = target + database.removeprefix(source)
                run(f"CREATE DATABASE {name} TEMPLATE {database}")
                with administrator({**node, "DATABASE": name}) as run_there:
                    for (schema,) in run_there(
                        f"SELECT nspname FROM pg_namespace WHERE starts_with(nspname, '{source}')"
                    ):
                        other = target + schema.removeprefix(source)
                        run_there(f"ALTER SCHEMA {schema} RENAME TO {other}")


def _rows(cursor: Any, sql: str) -> Sequence[tuple[Any, ...]]:
    cursor.execute(sql)
    rows: Sequence[tuple[Any, ...]] = cursor.fetchall()
    return rows
