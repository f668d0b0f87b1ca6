"""The databases of the example: SQLite files by default, servers where the environment says so.

``SHARDED_ORM_DEMO_DIR``
    The folder of the SQLite files; by default ``testproject/var``.
``SHARDED_ORM_DEMO_MYSQL``
    MariaDB servers instead of files: a JSON list of one or two
    ``{"host": …, "port": …, "user": …, "password": …}``. The shards are spread over them.
``SHARDED_ORM_DEMO_POSTGRESQL``
    The same for PostgreSQL servers. The account must be allowed to create databases.
``SHARDED_ORM_DEMO_PAIR``
    Two MariaDB servers that replicate from each other: a JSON list like the others, whose entries also
    have ``OPERATOR`` and ``REPLICATION``. Half of the shards are active on each. The topology is in
    the global database: :func:`pair_document` has to be pushed.
``SHARDED_ORM_DEMO_PREFIX``
    The prefix of all names of databases and schemas on servers; by default ``demo_``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured

#: The aliases of ``DATABASES`` beside the shards: the global database, the directory
#: of users, and the pair of ticket servers.
TICKETS = ("tickets_1", "tickets_2")
ALIASES = ("default", "directory", *TICKETS)
SHARDS = 16
#: The number of shards with the addresses of photos.
ADDRESSES = 2
#: The number of shards of boards.
BOARD_SHARDS = 4
#: The numbers of shards, by group.
GROUPS = {"photos": SHARDS, "ratings": SHARDS, "addresses": ADDRESSES, "boards": BOARD_SHARDS}
#: The nodes of a pair of servers.
PAIR_NODES = ("node_1", "node_2")


def configure(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the explicit entries of ``DATABASES``, and ``SHARDED_ORM``.

    :param folder: folder for the SQLite files.
    """
    prefix = os.environ.get("SHARDED_ORM_DEMO_PREFIX", "demo_")
    for variable, build in (
        ("SHARDED_ORM_DEMO_MYSQL", _mysql),
        ("SHARDED_ORM_DEMO_POSTGRESQL", _postgresql),
    ):
        if servers := os.environ.get(variable):
            return build(_addresses(variable, servers), prefix)
    if servers := os.environ.get("SHARDED_ORM_DEMO_PAIR"):
        return _pair(_addresses("SHARDED_ORM_DEMO_PAIR", servers), prefix, folder)
    return _sqlite(folder)


def pair_document() -> dict[str, Any]:
    """Return the first topology of shards on a pair: half of each group is active on each side."""
    return {
        "format": 1,
        "version": 1,
        "groups": {
            name: {
                "RANGES": [
                    {"range": [first, last], "pair": PAIR_NODES, "active": active}
                    for (first, last), active in zip(
                        ((0, count // 2 - 1), (count // 2, count - 1)), PAIR_NODES, strict=True
                    )
                ]
            }
            for name, count in GROUPS.items()
        },
    }


def _sqlite(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    engine: dict[str, Any] = {
        "ENGINE": "sharded_orm.backends.sqlite3",
        "OPTIONS": {
            # The server of the demo has several threads, and a thread that writes waits for the
            # others.
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
    databases = {alias: {**engine, "NAME": str(folder / f"{alias}.sqlite3")} for alias in ALIASES}
    for alias in TICKETS:
        # Synced: a power cut must not lose ids. An id takes one statement, which needs no
        # transaction mode; a test case that begins in that mode would lock it out.
        databases[alias]["OPTIONS"] = {"init_command": "PRAGMA synchronous=FULL;"}
    nodes = {name: {**engine, "NAME": str(folder / name)} for name in ("node_1", "node_2")}
    return databases, _sharded_orm(nodes, prefix="")


def _addresses(variable: str, servers: str) -> list[dict[str, Any]]:
    """Return the addresses of the servers as entries of ``DATABASES`` have them.

    :param servers: the value of the environment's ``variable``.
    """
    try:
        addresses = [
            {key.upper(): value for key, value in server.items()} for server in json.loads(servers)
        ]
    except (ValueError, AttributeError, TypeError) as exc:
        raise ImproperlyConfigured(
            f'{variable} must be a JSON list of {{"host": …, "port": …, "user": …, "password": …}}'
        ) from exc
    if not addresses:
        raise ImproperlyConfigured(f"{variable} names no server.")
    return addresses


def _mysql(
    addresses: list[dict[str, Any]], prefix: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    engine: dict[str, Any] = {
        "ENGINE": "sharded_orm.backends.mysql",
        "CONN_MAX_AGE": 60,
        "OPTIONS": {"charset": "utf8mb4", "isolation_level": "read committed"},
    }
    one, two = addresses[0], addresses[-1]
    # The second ticket server is on the other node, if there is one.
    databases = {
        alias: {**engine, **(two if alias == "tickets_2" else one), "NAME": f"{prefix}{alias}"}
        for alias in ALIASES
    }
    nodes = {"node_1": {**engine, **one}, "node_2": {**engine, **two}}
    return databases, _sharded_orm(nodes, prefix)


def _pair(
    servers: list[dict[str, Any]], prefix: str, folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    accounts = ("OPERATOR", "REPLICATION")
    addresses = [{k: v for k, v in server.items() if k not in accounts} for server in servers]
    databases, sharded_orm = _mysql(addresses, prefix)
    for node, server in zip(PAIR_NODES, servers, strict=True):
        sharded_orm["NODES"][node] |= {account: server[account] for account in accounts}
    for group in sharded_orm["GROUPS"].values():
        del group["RANGES"]
    last_good = str(folder / "last_good_topology.json")
    sharded_orm["TOPOLOGY"] = {"SOURCE": "database", "OPTIONS": {"LAST_GOOD": last_good}}
    return databases, sharded_orm


def _postgresql(
    addresses: list[dict[str, Any]], prefix: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    engine: dict[str, Any] = {
        "ENGINE": "sharded_orm.backends.postgresql",
        "CONN_MAX_AGE": 60,
        "OPTIONS": {"isolation_level": 2},  # READ COMMITTED, as a number of psycopg
    }
    one, two = addresses[0], addresses[-1]
    # The second ticket server is on the other node, if there is one.
    databases = {
        alias: {**engine, **(two if alias == "tickets_2" else one), "NAME": f"{prefix}{alias}"}
        for alias in ALIASES
    }
    # The schemas of the shards are in the databases of the ticket servers.
    nodes = {"node_1": databases["tickets_1"], "node_2": databases["tickets_2"]}
    return databases, _sharded_orm(nodes, prefix)


def _sharded_orm(nodes: dict[str, dict[str, Any]], prefix: str) -> dict[str, Any]:
    def group(name: str, strategy: str, count: int = SHARDS) -> dict[str, Any]:
        return {
            "STRATEGY": strategy,
            "RANGES": [
                {"range": (0, count // 2 - 1), "primary": "node_1"},
                {"range": (count // 2, count - 1), "primary": "node_2"},
            ],
            "DATABASE_NAME": f"{prefix}{name}_{{shard:05d}}",
        }

    return {
        "NODES": nodes,
        "GROUPS": {
            # The shard of a photo's owner is looked up in the directory; the shard of a rating's
            # user is computed; the ids of boards name their shards.
            "photos": group("photos", "directory"),
            "ratings": group("ratings", "modulo"),
            # The owners of photos, by the id of the photo: beside the global database, because whoever
            # comes by an old address needs both.
            "addresses": {
                "STRATEGY": "modulo",
                "RANGES": [{"range": (0, ADDRESSES - 1), "primary": "node_1"}],
                "DATABASE_NAME": f"{prefix}addresses_{{shard:05d}}",
            },
            "boards": group("boards", "embedded", BOARD_SHARDS),
        },
        "TICKETS": list(TICKETS),
        "DIRECTORY": "directory",
        "CACHE": {"OBJECTS": "default"},
    }
