"""The ``SHARDED_ORM`` setting, read and checked as a whole.

Nothing is read at import. :func:`load` is called by ``runtime`` alone; every other
module gets live objects from there.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.document import Document, merged
from sharded_orm.topology.model import (
    MAX_WEIGHT,
    ShardGroup,
    ShardRange,
    Topology,
    is_weight,
    problems,
)

SETTING = "SHARDED_ORM"

_KEYS = {
    "NODES", "GROUPS", "TICKETS", "TICKET_OPTIONS", "DIRECTORY", "MAX_IDLE_ALIASES", "CACHE",
    "ON_CACHE_FAILURE", "NODE_DEFAULTS", "TOPOLOGY", "ADMIN",
}  # fmt: skip
#: The most ids that one request takes.
MAX_TICKETS = 1_000_000
_TICKET_OPTIONS = {"TIMEOUT", "BACKOFF", "BLOCK_SIZE", "PARTNER_DOWN"}
_CACHE_KEYS = {
    "OBJECTS", "LISTS", "PREFIX", "TTL", "TIMEOUT", "BACKOFF", "COMMIT_WITHIN", "QUARANTINE",
    "READ", "ALSO_MARK",
}  # fmt: skip
#: memcached takes more than 30 days for a date, and a guard lives twice as long as entries.
MAX_TTL = 15 * 24 * 3600
_PREFIX = re.compile(r"[A-Za-z0-9_.:]{0,32}\Z")
_GROUP_KEYS = {
    "STRATEGY", "STRATEGY_OPTIONS", "RANGES", "DATABASE_NAME", "ATOMIC_REQUESTS", "FORMER_MODELS",
}  # fmt: skip
_RANGE_KEYS = {"range", "primary", "replica", "open", "weight"}
_NODE_KEYS = {
    "ENGINE", "NAME", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS", "CONN_MAX_AGE",
    "CONN_HEALTH_CHECKS", "TIME_ZONE", "TEST", "POOL", "AUTOCOMMIT", "OPERATOR",
}  # fmt: skip
_OPERATOR_KEYS = {"USER", "PASSWORD"}
_TOPOLOGY_KEYS = {"SOURCE", "OPTIONS"}
_ADMIN_KEYS = {"GROUP_PERMISSIONS"}
#: ``auth.Permission.codename`` is 100 characters long, and begins with "access_".
_LONGEST_PERMITTED = 93
# The rest is passed on to the driver as it is.
_NODE_KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("OPTIONS", "TEST", "OPERATOR"), (Mapping, "a dict")),
    "POOL": ((Mapping, type(None)), "a dict"),
    "HOST": ((str, type(None)), "text"),
    "PORT": ((int, str, type(None)), "a number"),
    "NAME": ((str, os.PathLike, type(None)), "a folder"),
    "CONN_MAX_AGE": ((int, float, type(None)), "a number of seconds or None"),
}
_TAKEN_NAMES = re.compile(r"_(template|\d{5,})\Z")
_ENGINES = ("sharded_orm.backends.mysql", "sharded_orm.backends.sqlite3")


@dataclass(frozen=True)
class TicketOptions:
    """``SHARDED_ORM["TICKET_OPTIONS"]``."""

    #: Seconds that a caller waits at most; each server has an equal share of them.
    timeout: float = 2.0
    #: Seconds that a server which failed is left alone.
    backoff: float = 5.0
    #: Ids that a process takes at once for ``next``; 1 for none in advance.
    block_size: int = 1
    #: ``"refuse"``: no id from a server whose mark cannot be read. ``"proceed"``: with a warning.
    partner_down: str = "proceed"


@dataclass(frozen=True)
class CacheOptions:
    """``SHARDED_ORM["CACHE"]`` and ``SHARDED_ORM["ON_CACHE_FAILURE"]`` (Yupoo, P8)."""

    #: The alias of ``CACHES`` whose servers hold objects.
    objects: str
    #: The alias whose servers hold lists and counts; may be the same.
    lists: str
    #: What all names in the cache begin with.
    prefix: str = ""
    #: Seconds that an entry lives.
    ttl: float = 3600.0
    #: Seconds that a cache server has for one answer.
    timeout: float = 0.25
    #: Seconds that a cache server which failed is left alone.
    backoff: float = 2.0
    #: Seconds from announcing a write to its COMMIT; one that comes later announces it again.
    commit_within: float = 2.0
    #: Seconds that nothing is stored under a new guard, and after which an announcement whose
    #: writer cannot be asked counts as dead.
    quarantine: float = 10.0
    #: ``"refuse"``: no write that the cache cannot be told of. ``"proceed"``: entries may be
    #: stale for ``ttl`` seconds.
    on_failure: str = "refuse"
    #: False: this process announces its writes, but neither reads nor stores.
    read: bool = True
    #: More aliases whose servers are told of writes: those that other processes read already,
    #: or still, while the list of servers changes.
    also_mark: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceOptions:
    """``SHARDED_ORM["TOPOLOGY"]``."""

    #: A built-in source or a dotted path.
    source: str = "static"
    # Not in repr(): they may hold what a client authenticates with.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class AdminOptions:
    """``SHARDED_ORM["ADMIN"]``."""

    #: Whether a user needs the permission ``sharded_orm.access_<group>`` to look into a group.
    group_permissions: bool = False


@dataclass(frozen=True)
class Config:
    """The checked setting. ``directory`` and ``tickets`` are aliases of ``DATABASES``.

    ``cache`` is None while there is no ``CACHE``: nothing is cached.
    """

    topology: Topology
    tickets: tuple[str, ...]
    ticket_options: TicketOptions
    directory: str
    max_idle_aliases: int
    cache: CacheOptions | None = None
    admin: AdminOptions = AdminOptions()


def read() -> Mapping[str, Any]:
    """``settings.SHARDED_ORM`` as it stands; empty where there is none.

    :raises InvalidConfiguration: it is no dict.
    """
    raw = getattr(settings, SETTING, None)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise InvalidConfiguration([f"must be a dict, not {type(raw).__name__}"])
    return raw


def source(raw: Mapping[str, Any]) -> SourceOptions:
    """Where the topology comes from, by a ``SHARDED_ORM`` dict.

    :raises InvalidConfiguration: it lists everything that is wrong with ``TOPOLOGY``.
    """
    given = raw.get("TOPOLOGY")
    if given is None:
        return SourceOptions()
    if not isinstance(given, Mapping):
        # By its type only: it may be a URL with a password.
        raise InvalidConfiguration([f"TOPOLOGY must be a dict, not {type(given).__name__}"])
    found = list(_unknown_keys("TOPOLOGY: ", given, _TOPOLOGY_KEYS))
    path, options = given.get("SOURCE", "static"), given.get("OPTIONS", {})
    if not isinstance(path, str) or not path:
        found.append(
            f"TOPOLOGY: SOURCE must be 'static', 'file', 'zookeeper' or a dotted path, not {path!r}"
        )
    if not isinstance(options, Mapping):
        found.append(f"TOPOLOGY: OPTIONS must be a dict, not {type(options).__name__}")
    if found:
        raise InvalidConfiguration(found)
    return SourceOptions(path, dict(options))


def parse(raw: Any, document: Document | None = None) -> Config:
    """Turn a ``SHARDED_ORM`` dict into a :class:`Config`.

    :param document: what the source of the topology holds. It is laid over the dict.
    :raises InvalidConfiguration: one error that lists everything that is wrong.
    """
    if not isinstance(raw, Mapping):
        raise InvalidConfiguration([f"must be a dict, not {type(raw).__name__}"])
    found = list(_unknown_keys("", raw, _KEYS))
    if document is not None:
        if source(raw).source != "static":
            found += _ignored_ranges(raw)
        raw = document.over(raw)
    nodes = _nodes(raw.get("NODES", {}), raw.get("NODE_DEFAULTS", {}), found)
    groups = _groups(raw.get("GROUPS", {}), found)
    topology = Topology(nodes, groups, document.version if document is not None else 0)
    found += problems(topology)

    directory = raw.get("DIRECTORY", "default")
    if not isinstance(directory, str):
        found.append(f"DIRECTORY must be an alias of DATABASES, not {directory!r}")
    tickets = raw.get("TICKETS", ())
    if not isinstance(tickets, (list, tuple)) or not all(isinstance(t, str) for t in tickets):
        found.append(f"TICKETS must be a list of aliases of DATABASES, not {tickets!r}")
        tickets = ()
    elif len(set(tickets)) != len(tickets):
        found.append(f"TICKETS lists a server twice: {list(tickets)!r}")
    options = _ticket_options(raw.get("TICKET_OPTIONS", {}), found)
    idle = raw.get("MAX_IDLE_ALIASES", 1024)
    if not isinstance(idle, int) or isinstance(idle, bool) or idle < 1:
        found.append(f"MAX_IDLE_ALIASES must be a positive number, not {idle!r}")
    cache = _cache_options(raw, found)
    admin = _admin_options(raw.get("ADMIN", {}), groups, found)
    if found:
        raise InvalidConfiguration(found)
    return Config(topology, tuple(tickets), options, directory, idle, cache, admin)


def _ticket_options(raw: Any, found: list[str]) -> TicketOptions:
    default = TicketOptions()
    if not isinstance(raw, Mapping):
        found.append(f"TICKET_OPTIONS must be a dict, not {type(raw).__name__}")
        return default
    where = "TICKET_OPTIONS: "
    found += _unknown_keys(where, raw, _TICKET_OPTIONS)
    seconds = {
        key: _seconds(where, key, raw, usual, found)
        for key, usual in (("TIMEOUT", default.timeout), ("BACKOFF", default.backoff))
    }
    size = raw.get("BLOCK_SIZE", default.block_size)
    if type(size) is not int or not 1 <= size <= MAX_TICKETS:
        found.append(f"{where}BLOCK_SIZE must be a number from 1 to {MAX_TICKETS}, not {size!r}")
    policy = raw.get("PARTNER_DOWN", default.partner_down)
    if policy not in ("proceed", "refuse"):
        found.append(f"{where}PARTNER_DOWN must be 'proceed' or 'refuse', not {policy!r}")
    return TicketOptions(seconds["TIMEOUT"], seconds["BACKOFF"], size, policy)


def _seconds(
    where: str, key: str, given: Mapping[Any, Any], default: float, found: list[str]
) -> float:
    value = given.get(key, default)
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    ):
        return value
    found.append(f"{where}{key} must be a positive number of seconds, not {value!r}")
    return default


def _cache_options(setting: Mapping[Any, Any], found: list[str]) -> CacheOptions | None:
    policy = setting.get("ON_CACHE_FAILURE", "refuse")
    if policy not in ("refuse", "proceed"):
        found.append(f"ON_CACHE_FAILURE must be 'refuse' or 'proceed', not {policy!r}")
    raw = setting.get("CACHE")
    if raw is None:
        return None
    where = "CACHE: "
    if not isinstance(raw, Mapping):
        # By its type only: it may be a URL with a password.
        found.append(f"CACHE must be a dict, not {type(raw).__name__}")
        return None
    before = len(found)
    found += _unknown_keys(where, raw, _CACHE_KEYS)
    objects = raw.get("OBJECTS")
    if not isinstance(objects, str):
        found.append(f"{where}OBJECTS must be an alias of CACHES, not {objects!r}")
    lists = raw.get("LISTS", objects)
    if "LISTS" in raw and not isinstance(lists, str):
        found.append(f"{where}LISTS must be an alias of CACHES, not {lists!r}")
    prefix = raw.get("PREFIX", "")
    if not isinstance(prefix, str) or not _PREFIX.match(prefix):
        found.append(
            f"{where}PREFIX must be at most 32 letters, digits, '_', '.' and ':', not {prefix!r}"
        )
    usual = CacheOptions("", "")
    ttl, timeout, backoff, commit_within, quarantine = (
        _seconds(where, key, raw, default, found)
        for key, default in (
            ("TTL", usual.ttl),
            ("TIMEOUT", usual.timeout),
            ("BACKOFF", usual.backoff),
            ("COMMIT_WITHIN", usual.commit_within),
            ("QUARANTINE", usual.quarantine),
        )
    )
    if ttl > MAX_TTL or ttl < 1:
        found.append(f"{where}TTL must be 1 to {MAX_TTL} seconds, not {ttl!r}")
    elif ttl < quarantine:
        # A new guard would be gone before anything may be stored under it.
        found.append(f"{where}TTL ({ttl!r}) must not be less than QUARANTINE ({quarantine!r})")
    if timeout >= commit_within:
        found.append(
            f"{where}TIMEOUT ({timeout!r}) must be less than COMMIT_WITHIN ({commit_within!r}),"
            " which includes it"
        )
    if quarantine <= 2 * commit_within:
        found.append(
            f"{where}QUARANTINE ({quarantine!r}) must be more than twice COMMIT_WITHIN"
            f" ({commit_within!r}): it also covers what the clocks of machines differ by"
        )
    read = _flag(where, "READ", raw, True, found)
    also = raw.get("ALSO_MARK", ())
    if not isinstance(also, (list, tuple)) or not all(isinstance(one, str) for one in also):
        found.append(f"{where}ALSO_MARK must be a list of aliases of CACHES, not {also!r}")
    if len(found) > before or policy not in ("refuse", "proceed"):
        return None
    return CacheOptions(
        str(objects), str(lists), prefix, ttl, timeout, backoff, commit_within, quarantine, policy,
        read, tuple(also),
    )  # fmt: skip


def _admin_options(raw: Any, groups: Mapping[str, Any], found: list[str]) -> AdminOptions:
    where = "ADMIN: "
    if not isinstance(raw, Mapping):
        found.append(f"ADMIN must be a dict, not {type(raw).__name__}")
        return AdminOptions()
    found += _unknown_keys(where, raw, _ADMIN_KEYS)
    restricted = _flag(where, "GROUP_PERMISSIONS", raw, False, found)
    if restricted:
        found += [
            f"{where}group {name!r} has a name of more than {_LONGEST_PERMITTED} characters, which"
            " no permission can have; leave GROUP_PERMISSIONS out, or call the group otherwise"
            for name in groups
            if len(name) > _LONGEST_PERMITTED
        ]
    return AdminOptions(restricted)


def _unknown_keys(where: str, given: Mapping[Any, Any], valid: set[str]) -> Iterator[str]:
    for key in given:
        if key not in valid:
            yield f"{where}unknown key {key!r}; valid keys are {sorted(valid)!r}"


def _ignored_ranges(raw: Mapping[str, Any]) -> Iterator[str]:
    groups = raw.get("GROUPS", {})
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and "RANGES" in group:
            yield (
                f"group {name!r}: RANGES of the settings would be ignored, because TOPOLOGY names a"
                " source; take them out here (and push them there)"
            )


def _nodes(raw: Any, defaults: Any, found: list[str]) -> dict[str, Mapping[str, Any]]:
    if not isinstance(raw, Mapping):
        found.append(f"NODES must be a dict, not {type(raw).__name__}")
        return {}
    if not isinstance(defaults, Mapping):
        found.append(f"NODE_DEFAULTS must be a dict, not {type(defaults).__name__}")
        defaults = {}
    found += _unknown_keys("NODE_DEFAULTS: ", defaults, _NODE_KEYS)
    nodes: dict[str, Mapping[str, Any]] = {}
    for name, node in raw.items():
        where = f"node {name!r}: "
        if not isinstance(name, str):
            found.append(f"{where}its name must be text")
            continue
        nodes[name] = {}
        if not isinstance(node, Mapping):
            # By its type only: it may be a URL with a password.
            found.append(
                f"{where}must be a dict like an entry of DATABASES, not {type(node).__name__}"
            )
            continue
        found += _unknown_keys(where, node, _NODE_KEYS)
        node = merged(defaults, node)
        wrong = [
            key
            for key, (kinds, _) in _NODE_KINDS.items()
            if key in node and not isinstance(node[key], kinds)
        ]
        # Not what it is: it may be a password in the wrong place.
        found += [f"{where}{key} must be {_NODE_KINDS[key][1]}" for key in wrong]
        if "OPERATOR" in node and "OPERATOR" not in wrong:
            found += _unknown_keys(f"{where}OPERATOR: ", node["OPERATOR"], _OPERATOR_KEYS)
        made = {key: value for key, value in node.items() if key not in wrong}
        nodes[name] = made
        engine = node.get("ENGINE")
        # An engine of one's own is welcome when it derives from one of ours;
        # Django's stock engines open a connection per shard.
        if not isinstance(engine, str) or not engine or engine.startswith("django.db.backends."):
            found.append(f"{where}ENGINE must be one of {list(_ENGINES)!r}, not {engine!r}")
            made.pop("ENGINE", None)
        elif engine == _ENGINES[1] and not node.get("NAME"):
            found.append(f"{where}NAME must be the folder that holds the shard files")
        elif engine == _ENGINES[0] and node.get("NAME"):
            found.append(
                f"{where}NAME is not allowed; DATABASE_NAME of the group names the schemas"
            )
    return nodes


def _groups(raw: Any, found: list[str]) -> dict[str, ShardGroup]:
    if not isinstance(raw, Mapping):
        found.append(f"GROUPS must be a dict, not {type(raw).__name__}")
        return {}
    groups = {}
    for name, group in raw.items():
        where = f"group {name!r}: "
        if not isinstance(name, str) or not isinstance(group, Mapping):
            found.append(f"{where}must be a name and a dict, not {group!r}")
            continue
        if _TAKEN_NAMES.search(name):
            found.append(
                f"{where}its alias could be another group's shard or template; do not end the name"
                " in _template or in _ and five digits or more"
            )
        found += _unknown_keys(where, group, _GROUP_KEYS)
        if not isinstance(group.get("STRATEGY"), str):
            found.append(
                f"{where}STRATEGY must be 'directory', 'modulo', 'range', 'embedded' or a dotted"
                f" path, not {group.get('STRATEGY')!r}"
            )
        options = group.get("STRATEGY_OPTIONS", {})
        if not isinstance(options, Mapping):
            found.append(f"{where}STRATEGY_OPTIONS must be a dict, not {options!r}")
            options = {}
        ranges = list(_ranges(where, group.get("RANGES", ()), found))
        groups[name] = ShardGroup(
            name=name,
            ranges=tuple(sorted(ranges, key=lambda r: (r.first, r.last))),
            strategy=str(group.get("STRATEGY")),
            strategy_options=dict(options),
            database_name=group.get("DATABASE_NAME", "{group}_{shard:05d}"),
            atomic_requests=_flag(where, "ATOMIC_REQUESTS", group, False, found),
            former_models=_models(where, group.get("FORMER_MODELS", ()), found),
        )
    return groups


def _models(where: str, raw: Any, found: list[str]) -> frozenset[tuple[str, str]]:
    labels = raw if isinstance(raw, (list, tuple)) else (raw,)
    models = [str(label).lower().split(".") for label in labels]
    if not all(isinstance(label, str) for label in labels) or not all(
        len(parts) == 2 and all(parts) for parts in models
    ):
        found.append(
            f"{where}FORMER_MODELS must be a list of names such as 'photos.Photo', not {raw!r}"
        )
        return frozenset()
    return frozenset((app, model) for app, model in models)


def _flag(where: str, key: str, given: Mapping[Any, Any], default: bool, found: list[str]) -> bool:
    # "no" would count as true.
    value = given.get(key, default)
    if not isinstance(value, bool):
        found.append(f"{where}{key} must be True or False, not {value!r}")
        return default
    return value


def _ranges(where: str, raw: Any, found: list[str]) -> Iterator[ShardRange]:
    if not isinstance(raw, (list, tuple)):
        found.append(f"{where}RANGES must be a list of dicts, not {raw!r}")
        return
    for entry in raw:
        if not isinstance(entry, Mapping):
            found.append(f"{where}each of RANGES must be a dict, not {entry!r}")
            continue
        found += _unknown_keys(f"{where}range {entry.get('range')!r}: ", entry, _RANGE_KEYS)
        match entry:
            case {"range": (int() as first, int() as last), "primary": str() as primary} if (
                first >= 0 and not isinstance(first, bool) and not isinstance(last, bool)
            ):
                this = f"{where}range {entry['range']!r}: "
                weight, replica = entry.get("weight", 1.0), entry.get("replica")
                if not is_weight(weight):
                    found.append(
                        f"{this}weight must be a number from 0 to {MAX_WEIGHT:,}, not {weight!r}"
                    )
                    weight = 1.0
                if replica is not None and not isinstance(replica, str):
                    found.append(f"{this}replica must be a node, not {replica!r}")
                    replica = None
                is_open = _flag(this, "open", entry, True, found)
                yield ShardRange(first, last, primary, replica, is_open, weight)
            case _:
                found.append(
                    f"{where}a range needs 'range': (first, last) and 'primary': a node, not {dict(entry)!r}"
                )
