"""Ticket servers of a test's own: other databases under the existing aliases."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.db import connections

from sharded_orm import runtime
from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from tests.integration.tickets.conftest import in_order
from tests.patience import PATIENCE
from tests.photos.models import Photo

#: An alias that tests may use for a third server.
THIRD = "directory"


@contextmanager
def spare_servers(folder: Path, *aliases: str) -> Iterator[None]:
    """Let the aliases name empty databases."""
    with ExitStack() as stack:
        for alias in aliases:
            if connections[alias].vendor == "sqlite":
                name = str(folder / f"{alias}.sqlite3")
            else:
                name = f"test_spare_{secrets.token_hex(6)}"
                run(alias, f"CREATE DATABASE {name}")
                # Connections of this process may still be open, and PostgreSQL would refuse then.
                force = " WITH (FORCE)" if connections[alias].vendor == "postgresql" else ""
                stack.callback(run, alias, f"DROP DATABASE {name}{force}")
            stack.enter_context(redirected(alias, NAME=name))
        yield


@contextmanager
def redirected(alias: str, **settings: Any) -> Iterator[None]:
    """Let new connections to ``alias`` reach another database.

    Django's existing connection stays where it is.
    """
    right = connections.settings[alias]
    connections.settings[alias] = {**right, **settings}
    try:
        yield
    finally:
        connections.settings[alias] = right


@contextmanager
def down(generator: TicketGenerator, index: int) -> Iterator[None]:
    """Make one of the servers unreachable."""
    server = generator.servers[index]
    server.close()
    with redirected(server.alias, **unreachable(server.alias)):
        yield
    server.close()


def unreachable(alias: str) -> dict[str, Any]:
    """Return the settings of an unreachable database for ``alias``."""
    if connections[alias].vendor == "sqlite":
        return {"NAME": "/dev/null/none.sqlite3"}
    return {"PORT": closed_port(), "HOST": "127.0.0.1"}


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(alias: str, sql: str, params: Sequence[Any] = ()) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params)


def administer(server: TicketServer, sql: str, *params: Any) -> None:
    """Change the database of one server without the generator's knowledge."""
    deadline = time.monotonic() + PATIENCE
    with server.session(deadline) as lent:
        lent.ask(lambda session: session.execute(sql, params, deadline))


def set_back(server: TicketServer, name: str, value: int) -> None:
    """Set a server back, like one that was restored from a backup."""
    if connections[server.alias].vendor == "postgresql":
        administer(server, f"SELECT setval('\"sharded_orm_sequence_{name}\"', {value})")
    else:
        administer(
            server, "UPDATE sharded_orm_sequence SET value = %s WHERE name = %s", value, name
        )


def lose(server: TicketServer, name: str) -> None:
    """Empty a server, like one that was replaced."""
    administer(server, "DELETE FROM sharded_orm_sequence WHERE name = %s", name)


@contextmanager
def generator_of(aliases: Sequence[str]) -> Iterator[TicketGenerator]:
    generator = TicketGenerator(aliases, TicketOptions(backoff=0.001), turns=in_order)
    try:
        yield generator
    finally:
        generator.close()


@contextmanager
def old_table(table: str, *ids: int) -> Iterator[None]:
    """A table of the global database, from the time before its model was sharded."""
    run("default", f"CREATE TABLE {table} (id BIGINT NOT NULL PRIMARY KEY)")
    try:
        for number in ids:
            run("default", f"INSERT INTO {table} (id) VALUES (%s)", [number])
        yield
    finally:
        run("default", f"DROP TABLE {table}")


@contextmanager
def a_shard_down() -> Iterator[str]:
    """Make the node of ``photos_00012`` unreachable; on SQLite, make its file unreadable."""
    Photo.objects.scatter().count()  # creates the test databases
    shard = runtime.shard("photos", 12)
    if connections[shard.alias].vendor == "sqlite":
        connections[shard.alias].close()
        path = Path(connections[shard.alias].settings_dict["NAME"])
        path.rename(path.with_suffix(".kept"))
        path.mkdir()
        try:
            yield shard.alias
        finally:
            path.rmdir()
            path.with_suffix(".kept").rename(path)
        return
    topology = runtime.topology()
    nodes = {
        **topology.nodes,
        shard.node: {**topology.nodes[shard.node], **unreachable(shard.alias)},
    }
    aliases = [s.alias for s in runtime.group("photos").shards()]

    def forget() -> None:
        for alias in aliases:
            connections[alias].close()
            del connections[alias]

    runtime.swap(replace(topology, nodes=nodes))
    forget()
    try:
        yield shard.alias
    finally:
        runtime.swap(topology)
        forget()
