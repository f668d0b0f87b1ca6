"""Settings of a fleet of shards on two nodes, for commands that run in processes of their own.

``FLEET_FOLDER`` is the folder for files. ``FLEET_NODES`` is a JSON dict of two nodes, absent for
SQLite. ``FLEET_PREFIX`` is the start of schema names. ``FLEET_CHANGES`` is a JSON dict that
updates the group ``photos``. ``FLEET_CAPACITIES`` is a JSON dict of nodes. With ``FLEET_ALONE``, there are
no replicas. ``FLEET_APPS`` are further apps, separated by spaces.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sharded_orm.topology.aliases import sharded_databases
from tests.settings.base import (  # noqa: F401  # Django reads them here
    DATABASE_ROUTERS,
    DEFAULT_AUTO_FIELD,
    SECRET_KEY,
    TIME_ZONE,
    USE_TZ,
)

FOLDER = os.environ["FLEET_FOLDER"]
PREFIX = os.environ.get("FLEET_PREFIX", "")

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "sharded_orm",
    "tests.photos",
    "tests.integration.shards.commands",
    *os.environ.get("FLEET_APPS", "").split(),
]

DATABASES = sharded_databases(
    {
        alias: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{FOLDER}/{alias}.sqlite3"}
        for alias in ("default", "directory", "tickets_1", "tickets_2")
    }
)
_nodes: dict[str, dict[str, Any]] = json.loads(os.environ.get("FLEET_NODES", "{}")) or {
    name: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": f"{FOLDER}/{name}"}
    for name in ("one", "two")
}
for _name, _capacity in json.loads(os.environ.get("FLEET_CAPACITIES", "{}")).items():
    _nodes[_name]["CAPACITY"] = _capacity
_replica = {} if "FLEET_ALONE" in os.environ else {"replica": "two"}


def _group(strategy: str, count: int, **options: Any) -> dict[str, Any]:
    return {
        "STRATEGY": strategy,
        "STRATEGY_OPTIONS": options,
        "DATABASE_NAME": PREFIX + "{group}_{shard:03d}",
        "RANGES": [
            {"range": (0, count // 2 - 1), "primary": "one", **_replica},
            {"range": (count // 2, count - 1), "primary": "two", "open": False},
        ],
    }


SHARDED_ORM = {
    "NODES": _nodes,
    "GROUPS": {
        "photos": {
            **_group("directory", 8),
            **json.loads(os.environ.get("FLEET_CHANGES", "{}")),
        },
        "events": _group("modulo", 2),
        "archive": _group("range", 2, SIZE=1000),
        "pins": _group("embedded", 4),
        "visits": _group("embedded", 2, SHIFT=10, BITS=13),
    },
    "TICKETS": ["tickets_1", "tickets_2"],
    "DIRECTORY": "directory",
}
