"""A site whose keys and shards both move, and a direct look at what its nodes have."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.integration.imports.site import PREAMBLE
from tests.integration.moves import site as moves_site
from tests.integration.shard_moves import site as shard_moves_site
from tests.integration.storm.ledger import RowName
from tests.python_process import PythonProcess
from tests.services.mariadb import MariaDBServer
from tests.services.postgresql import PostgreSQLServer

DatabaseServer = MariaDBServer | PostgreSQLServer

#: Seconds for which processes remember where a key is.
LEASE = 0.4
#: Seconds without a sign of life after which a command may take over the work of a paused one.
SILENCE = 2.0
#: Seconds for which SQLite keeps the fence of a moved key. No process is paused for longer.
FENCE_KEPT = 10.0

_FILL = """
from sharded_orm import runtime
runtime.strategy("books").store.place("books", {str(n): n % 4 for n in range(1, 9)})
for writer in range(1, 9):
    Book.objects.create(writer_id=writer, title="shared", pages=0)
names = {}
for n in range(40):
    names.setdefault(runtime.strategy("accounts").locate(f"account {n}"), []).append(f"account {n}")
for shard in range(4):
    Account.objects.bulk_create(Account(name=name) for name in names[shard][:2])
"""
_COMMAND = """
import sys
from datetime import timedelta
from django.core.management import execute_from_command_line
from sharded_orm.operations.moves import leftovers
from sharded_orm.operations.runs import lease
lease.INTERVAL, lease.EXPIRES = {silence} / 5, {silence}
leftovers.FENCE_KEPT = timedelta(seconds={fence_kept})
sys.argv = ["manage.py", *{arguments!r}]
execute_from_command_line(sys.argv)
"""
_PLACES = """
from sharded_orm import runtime
from sharded_orm.models import Placement
print(json.dumps({
    "books": dict(Placement.objects.using("directory").filter(group="books").values_list("key", "shard")),
    "accounts": {name: runtime.strategy("accounts").locate(name)
        for name in Account.objects.scatter().values_list("name", flat=True)},
    "nodes": {group: {n: runtime.shard(group, n).node for n in range(4)} for group in ("books", "accounts")},
}))
"""
#: Rows of each table: owner, number, value.
_TABLES = {
    "topic": "SELECT writer_id, id, name FROM {s}library_topic",
    "link": "SELECT b.writer_id, l.topic_id, 1 FROM {s}library_book_topics l"
    " LEFT JOIN {s}library_book b ON b.id = l.book_id",
    "novel": "SELECT b.writer_id, b.title, n.genre FROM {s}library_book b"
    " LEFT JOIN {s}library_novel n ON n.book_ptr_id = b.id WHERE b.title <> 'shared'",
    "order": "SELECT account_id, amount, 1 FROM {s}library_order",
    "shared": "SELECT writer_id, 0, pages FROM {s}library_book WHERE title = 'shared'",
    "orphan": "SELECT '', book_ptr_id, 1 FROM {s}library_novel WHERE book_ptr_id NOT IN"
    " (SELECT id FROM {s}library_book)",
}
#: Queries of the names of all tables.
_TABLE_NAMES = {
    "sqlite_master": "SELECT name FROM sqlite_master WHERE type = 'table'",
    "mysql": "SHOW TABLES FROM {schema}",
    "pg_tables": "SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'",
}


class StormSite(shard_moves_site.Site):
    """As the sites of moves of keys and of shards, with a cache.

    :param cache: an entry of ``CACHES``.
    """

    servers: list[DatabaseServer]

    def set_up(self, cache: dict[str, Any]) -> None:
        self.content["caches"] = {"default": cache}
        setting = self.content["sharded_orm"]
        setting["PLACEMENT_LEASE"] = LEASE
        # Whatever takes longer hangs: then a write that is not in a transaction fails, and the test.
        setting["MOVE_WAIT"] = 60
        setting["TICKET_OPTIONS"] = {"TIMEOUT": 30}
        setting["CACHE"] |= {"TIMEOUT": 2, "COMMIT_WITHIN": 5, "QUARANTINE": 11}
        setting["TOPOLOGY"]["OPTIONS"] |= {"INTERVAL": 1, "TIMEOUT": 4}
        self.save()
        self.prepare()
        self.run(_FILL)

    def command(self, *arguments: str) -> PythonProcess:
        """Start a command of the operator."""
        code = _COMMAND.format(silence=SILENCE, fence_kept=FENCE_KEPT, arguments=arguments)
        return self.start("run", code)

    def application(self, number: int, folder: Path, seed: int) -> PythonProcess:
        return self.start(
            "run",
            PREAMBLE
            + "from tests.integration.storm import application\n"
            + f"application.run({number}, {str(folder)!r}, {seed})",
        )

    def places(self) -> dict[str, Any]:
        places: dict[str, Any] = json.loads(self.run(_PLACES))
        return places

    def left(self) -> str:
        nodes = self.places()["nodes"]["books"]
        left = [self.run(moves_site._LEFT)]
        for line in super().left().splitlines():
            alias, node, tables = line.split(" ", 2)
            is_there = alias.startswith("books") and nodes[str(int(alias[-5:]))] == node
            # Copies of keys leave empty tables on the shard.
            if not (
                is_there
                and tables.endswith(" []")
                and tables.count("'") == 2 * tables.count("_rows_")
            ):
                left.append(line)
        return "\n".join(filter(None, left))

    def stored(self) -> Iterator[tuple[str, str, RowName, Any]]:
        """Yield the schema, node, name and value of each row on all nodes, without the library."""
        for node in self.nodes:
            for schema, rows in self._rows_on(node):
                for table, (owner, token, value) in rows:
                    yield schema, node, RowName(table, str(owner), int(token)), value

    def _rows_on(self, node: str) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
        if self.backend == "sqlite3":
            for path in sorted((self.folder / node).glob("*.sqlite3")):
                with closing(sqlite3.connect(path)) as connection:
                    yield path.stem, self._rows_in(connection.cursor(), "sqlite_master", "")
            return
        address: Any = self.servers[list(self.nodes).index(node)].address
        if self.backend == "postgresql":
            import psycopg

            with psycopg.connect(**address.psycopg(f"{self.prefix}node")) as connection:
                names = connection.execute("SELECT nspname FROM pg_namespace")
                for schema in [name for (name,) in names if re.search(r"_000\d\d$", name)]:
                    yield schema, self._rows_in(connection.cursor(), "pg_tables", schema)
            return
        import MySQLdb

        with closing(MySQLdb.connect(**address.mysqldb(), charset="utf8mb4")) as connection:
            cursor = connection.cursor()
            cursor.execute("SHOW DATABASES LIKE '%\\_000__'")
            for (schema,) in cursor.fetchall():
                yield schema, self._rows_in(cursor, "mysql", schema)

    @staticmethod
    def _rows_in(cursor: Any, catalog: str, schema: str) -> list[tuple[str, Any]]:
        cursor.execute(_TABLE_NAMES[catalog].format(schema=schema))
        present = {name for (name,) in cursor.fetchall()}
        rows: list[tuple[str, Any]] = []
        for table, query in _TABLES.items():
            if ("library_order" if table == "order" else "library_book") in present:
                cursor.execute(query.format(s=f"{schema}." if schema else ""))
                rows += [(table, row) for row in cursor.fetchall()]
        return rows
