"""The ``SHARDED_ORM`` setting as a whole: its parts are read, and their problems are collected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from sharded_orm.conf.cache import CacheOptions, parse_cache
from sharded_orm.conf.groups import parse_groups
from sharded_orm.conf.nodes import parse_nodes
from sharded_orm.conf.tickets import TicketOptions, parse_tickets
from sharded_orm.conf.values import flag, unknown_keys
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology
from sharded_orm.topology.model import problems as topology_problems

SETTING = "SHARDED_ORM"

KEYS = {
    "NODES", "GROUPS", "TICKETS", "TICKET_OPTIONS", "DIRECTORY", "MAX_IDLE_ALIASES", "CACHE",
    "ON_CACHE_FAILURE", "NODE_DEFAULTS", "TOPOLOGY", "ADMIN",
}  # fmt: skip
TOPOLOGY_KEYS = {"SOURCE", "OPTIONS"}
ADMIN_KEYS = {"GROUP_PERMISSIONS"}
# ``auth.Permission.codename`` is 100 characters long, and begins with "access_".
_LONGEST_PERMITTED = 93


@dataclass(frozen=True)
class SourceOptions:
    """``SHARDED_ORM["TOPOLOGY"]``."""

    #: A built-in source or a dotted path.
    source: str = "static"
    # Not in repr(): the options may hold credentials.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class AdminOptions:
    """``SHARDED_ORM["ADMIN"]``."""

    #: Whether a user needs the permission ``sharded_orm.access_<group>`` to look into a group.
    group_permissions: bool = False


@dataclass(frozen=True)
class Config:
    """The checked setting. ``directory`` and ``tickets`` are aliases of ``DATABASES``.

    ``cache`` is None if the setting has no ``CACHE``: nothing is cached.
    """

    topology: Topology
    tickets: tuple[str, ...]
    ticket_options: TicketOptions
    directory: str
    max_idle_aliases: int
    cache: CacheOptions | None = None
    admin: AdminOptions = AdminOptions()


def read() -> Mapping[str, Any]:
    """``settings.SHARDED_ORM``, unchecked; empty if there is none.

    :raises InvalidConfiguration: the setting is no dict.
    """
    raw = getattr(settings, SETTING, None)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise InvalidConfiguration([f"must be a dict, not {type(raw).__name__}"])
    return raw


def source(raw: Mapping[str, Any]) -> SourceOptions:
    """The source of the topology that a ``SHARDED_ORM`` dict names.

    :raises InvalidConfiguration: ``TOPOLOGY`` is wrong; the error lists every problem.
    """
    values = raw.get("TOPOLOGY")
    if values is None:
        return SourceOptions()
    if not isinstance(values, Mapping):
        # Only its type is shown: it may be a URL with a password.
        raise InvalidConfiguration([f"TOPOLOGY must be a dict, not {type(values).__name__}"])
    problems = list(unknown_keys("TOPOLOGY: ", values, TOPOLOGY_KEYS))
    path, options = values.get("SOURCE", "static"), values.get("OPTIONS", {})
    if not isinstance(path, str) or not path:
        problems.append(
            f"TOPOLOGY: SOURCE must be 'static', 'file', 'zookeeper' or a dotted path, not {path!r}"
        )
    if not isinstance(options, Mapping):
        problems.append(f"TOPOLOGY: OPTIONS must be a dict, not {type(options).__name__}")
    if problems:
        raise InvalidConfiguration(problems)
    return SourceOptions(path, dict(options))


def parse(raw: Any, document: Document | None = None) -> Config:
    """Turn a ``SHARDED_ORM`` dict into a :class:`Config`.

    :param document: the document of the topology source, which is laid over the dict.
    :raises InvalidConfiguration: one error that lists everything that is wrong.
    """
    if not isinstance(raw, Mapping):
        raise InvalidConfiguration([f"must be a dict, not {type(raw).__name__}"])
    problems = list(unknown_keys("", raw, KEYS))
    if document is not None:
        if source(raw).source != "static":
            problems += _ignored_ranges(raw)
        raw = document.over(raw)
    nodes = parse_nodes(raw.get("NODES", {}), raw.get("NODE_DEFAULTS", {}), problems)
    groups = parse_groups(raw.get("GROUPS", {}), problems)
    topology = Topology(nodes, groups, document.version if document is not None else 0)
    problems += topology_problems(topology)

    directory = raw.get("DIRECTORY", "default")
    if not isinstance(directory, str):
        problems.append(f"DIRECTORY must be an alias of DATABASES, not {directory!r}")
    tickets = raw.get("TICKETS", ())
    if not isinstance(tickets, (list, tuple)) or not all(isinstance(t, str) for t in tickets):
        problems.append(f"TICKETS must be a list of aliases of DATABASES, not {tickets!r}")
        tickets = ()
    elif len(set(tickets)) != len(tickets):
        problems.append(f"TICKETS lists a server twice: {list(tickets)!r}")
    ticket_options = parse_tickets(raw.get("TICKET_OPTIONS", {}), problems)
    idle = raw.get("MAX_IDLE_ALIASES", 1024)
    if not isinstance(idle, int) or isinstance(idle, bool) or idle < 1:
        problems.append(f"MAX_IDLE_ALIASES must be a positive number, not {idle!r}")
    cache = parse_cache(raw, problems)
    admin = _parse_admin(raw.get("ADMIN", {}), groups, problems)
    if problems:
        raise InvalidConfiguration(problems)
    return Config(topology, tuple(tickets), ticket_options, directory, idle, cache, admin)


def _ignored_ranges(raw: Mapping[str, Any]) -> Iterator[str]:
    groups = raw.get("GROUPS", {})
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and "RANGES" in group:
            yield (
                f"group {name!r}: RANGES of the settings would be ignored, because TOPOLOGY names a"
                " source; take them out here (and push them there)"
            )


def _parse_admin(raw: Any, groups: Mapping[str, Any], problems: list[str]) -> AdminOptions:
    where = "ADMIN: "
    if not isinstance(raw, Mapping):
        problems.append(f"ADMIN must be a dict, not {type(raw).__name__}")
        return AdminOptions()
    problems += unknown_keys(where, raw, ADMIN_KEYS)
    restricted = flag(where, "GROUP_PERMISSIONS", raw, False, problems)
    if restricted:
        problems += [
            f"{where}group {name!r} has a name of more than {_LONGEST_PERMITTED} characters, which"
            " no permission can have; leave GROUP_PERMISSIONS out, or call the group otherwise"
            for name in groups
            if len(name) > _LONGEST_PERMITTED
        ]
    return AdminOptions(restricted)
