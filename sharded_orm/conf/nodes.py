"""Read and check ``SHARDED_ORM["NODES"]`` and ``["NODE_DEFAULTS"]``.

These settings say how to connect to the database servers, which are called nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sharded_orm.conf.values import seconds, unknown_keys
from sharded_orm.topology.document import merged
from sharded_orm.topology.model import MAX_WEIGHT, is_weight

KEYS = {
    "ENGINE", "NAME", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS", "CONN_MAX_AGE",
    "CONN_HEALTH_CHECKS", "TIME_ZONE", "TEST", "POOL", "AUTOCOMMIT", "OPERATOR",
    "REPLICATION", "CAPACITY",
}  # fmt: skip

# Settings that NODE_DEFAULTS must not have. A default CAPACITY would make every node a target of
# shards, even a node that has only replicas.
_NO_DEFAULTS = {"CAPACITY"}
# These settings of a node are database accounts: dicts with the keys USER and PASSWORD.
_ACCOUNTS = ("OPERATOR", "REPLICATION")
_ACCOUNT_KEYS = {"USER", "PASSWORD"}
_POOL_KEYS = {"MAX", "TIMEOUT"}
# Maps each setting of a node whose type is checked to a pair: the permitted types, and how an error
# message names them. The types of other settings are not checked.
_TYPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("OPTIONS", "TEST", *_ACCOUNTS), (Mapping, "a dict")),
    "POOL": ((Mapping, type(None)), "a dict"),
    "HOST": ((str, type(None)), "text"),
    "PORT": ((int, str, type(None)), "a number"),
    "NAME": ((str, os.PathLike, type(None)), "a folder or the name of a database"),
    "CONN_MAX_AGE": ((int, float, type(None)), "a number of seconds or None"),
}
_MYSQL, _SQLITE, _POSTGRESQL = _ENGINES = (
    "sharded_orm.backends.mysql",
    "sharded_orm.backends.sqlite3",
    "sharded_orm.backends.postgresql",
)


def backend_for(engine: str) -> str:
    """Return, for a message, the name of the library's backend for the kind of database of ``engine``.

    :param engine: the ENGINE of an alias, such as "django.db.backends.mysql".
    """
    name = f"sharded_orm.backends.{engine.rpartition('.')[2]}"
    return repr(name) if name in _ENGINES else f"one of {list(_ENGINES)!r}"


def parse_nodes(raw: Any, defaults: Any, problems: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each node, keyed by the node's name.

    A setting is left out if its value has a wrong type.

    :param raw: the value of ``NODES``.
    :param defaults: the value of ``NODE_DEFAULTS``: settings for all nodes. A node's own setting
        overrides the default.
    :param problems: a list to which a sentence is added for each error.
    """
    if not isinstance(raw, Mapping):
        problems.append(f"NODES must be a dict, not {type(raw).__name__}")
        return {}
    if not isinstance(defaults, Mapping):
        problems.append(f"NODE_DEFAULTS must be a dict, not {type(defaults).__name__}")
        defaults = {}
    problems += unknown_keys("NODE_DEFAULTS: ", defaults, KEYS - _NO_DEFAULTS)
    nodes: dict[str, Mapping[str, Any]] = {}
    for name, node in raw.items():
        where = f"node {name!r}: "
        if not isinstance(name, str):
            problems.append(f"{where}its name must be text")
            continue
        nodes[name] = {}
        if not isinstance(node, Mapping):
            # Show only the type of the value: the value may be a URL with a password.
            problems.append(
                f"{where}must be a dict like an entry of DATABASES, not {type(node).__name__}"
            )
            continue
        problems += unknown_keys(where, node, KEYS)
        nodes[name] = _node(where, merged(defaults, node), problems)
    return nodes


def _node(where: str, node: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    wrong = [
        key
        for key, (types, _) in _TYPES.items()
        if key in node and not isinstance(node[key], types)
    ]
    # Show only the type of the value: the value may be a password in the wrong place.
    problems += [
        f"{where}{key} must be {_TYPES[key][1]}, not {type(node[key]).__name__}" for key in wrong
    ]
    for account in _ACCOUNTS:
        if account in node and account not in wrong:
            problems += unknown_keys(f"{where}{account}: ", node[account], _ACCOUNT_KEYS)
    settings = {key: value for key, value in node.items() if key not in wrong}
    if node.get("POOL") and "POOL" not in wrong:
        _check_pool(where, node["POOL"], node.get("ENGINE"), problems)
    if "CAPACITY" in node and not is_weight(node["CAPACITY"]):
        problems.append(
            f"{where}CAPACITY must be a number from 0 to {MAX_WEIGHT:,}, not {node['CAPACITY']!r}"
        )
        del settings["CAPACITY"]
    engine = node.get("ENGINE")
    # Refuse Django's own backends, which would open a connection per shard. Accept any other
    # ENGINE: it may be a project's backend that is derived from one of the library's backends.
    if not isinstance(engine, str) or not engine or engine.startswith("django.db.backends."):
        problems.append(f"{where}ENGINE must be one of {list(_ENGINES)!r}, not {engine!r}")
        settings.pop("ENGINE", None)
    elif engine == _SQLITE and not node.get("NAME"):
        problems.append(f"{where}NAME must be the folder that holds the shard files")
    elif engine == _MYSQL and node.get("NAME"):
        problems.append(f"{where}NAME is not allowed; DATABASE_NAME of the group names the schemas")
    elif engine == _MYSQL and not str(node.get("PORT") or 0).isdecimal():
        problems.append(f"{where}PORT must be a number such as 3306, not {node['PORT']!r}")
        settings.pop("PORT", None)
    elif engine == _POSTGRESQL and not (node.get("NAME") or _has_service(node)):
        problems.append(f"{where}NAME must be the database that holds the shards' schemas")
    if engine == _POSTGRESQL and _names_a_schema(node):
        problems.append(
            f"{where}OPTIONS['options'] must not set search_path; DATABASE_NAME of the group names the"
            " schemas"
        )
    return settings


def _check_pool(where: str, pool: Mapping[str, Any], engine: Any, problems: list[str]) -> None:
    has_schemas = engine not in (_MYSQL, _SQLITE)
    keys = _POOL_KEYS | ({"MAX_SCHEMAS"} if has_schemas else set())
    problems += unknown_keys(f"{where}POOL: ", pool, keys)
    for key in ("MAX", "MAX_SCHEMAS"):
        value = pool.get(key)
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is not None and not is_number:
            problems.append(f"{where}POOL: {key} must be a number from 1, not {value!r}")
    if "TIMEOUT" in pool:
        seconds(f"{where}POOL: ", "TIMEOUT", pool, 1, problems)


def _names_a_schema(node: Mapping[str, Any]) -> bool:
    options = node.get("OPTIONS")
    return isinstance(options, Mapping) and "search_path" in str(options.get("options", ""))


def _has_service(node: Mapping[str, Any]) -> bool:
    options = node.get("OPTIONS")
    return isinstance(options, Mapping) and bool(options.get("service"))
