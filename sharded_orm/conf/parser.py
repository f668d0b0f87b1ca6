"""Read and check the whole ``SHARDED_ORM`` setting, and collect the problems of all its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings

from sharded_orm.conf.cache import CacheOptions, parse_cache
from sharded_orm.conf.groups import parse_groups
from sharded_orm.conf.nodes import parse_nodes
from sharded_orm.conf.tickets import TicketOptions, parse_tickets
from sharded_orm.conf.values import flag, seconds, unknown_keys
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology
from sharded_orm.topology.model import problems as topology_problems

SETTING = "SHARDED_ORM"

KEYS = {
    "NODES", "GROUPS", "TICKETS", "TICKET_OPTIONS", "DIRECTORY", "MAX_IDLE_ALIASES", "CACHE",
    "ON_CACHE_FAILURE", "NODE_DEFAULTS", "TOPOLOGY", "ADMIN", "BOUND_KEY", "PLACEMENT_LEASE",
    "MOVE_WAIT", "READ_PLANS", "WRITE_PLANS",
}  # fmt: skip
TOPOLOGY_KEYS = {"SOURCE", "OPTIONS"}
ADMIN_KEYS = {"GROUP_PERMISSIONS"}
# With GROUP_PERMISSIONS, the name of a shard group has at most this many characters. The codename
# of the group's permission is "access_" and the name, and ``auth.Permission.codename`` holds 100
# characters.
_LONGEST_PERMITTED = 93


@dataclass(frozen=True)
class SourceOptions:
    """The values of ``SHARDED_ORM["TOPOLOGY"]``: where the topology, the map of shards to nodes, is
    stored.
    """

    #: Where the topology is stored: ``"static"`` (in the settings), ``"file"``, ``"database"`` or
    #: ``"zookeeper"``; or the dotted path of a class that reads it.
    source: str = "static"
    # The options are left out of repr(), because they may contain credentials.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class AdminOptions:
    """The values of ``SHARDED_ORM["ADMIN"]``."""

    #: Whether a user of the admin needs the permission ``sharded_orm.access_<group>`` to see the rows of
    #: that shard group.
    group_permissions: bool = False


@dataclass(frozen=True)
class Config:
    """The checked ``SHARDED_ORM`` setting.

    :param topology: the nodes and groups.
    :param tickets: the aliases of the ticket servers in ``DATABASES``.
    :param directory: the alias in ``DATABASES`` of the database with the directory, the table that
        records the shard of each key.
    :param max_idle_aliases: how many unused connection objects a thread keeps per shard group.
    :param cache: the options of the cache. None if the setting has no ``CACHE``: nothing is cached
        then.
    :param bound_key: the dotted path of the function that returns the shard keys of a request. The
        middleware binds these keys: queries of the request need not name them. None if the setting
        has no ``BOUND_KEY``.
    :param placement_lease: seconds for which a process may use the shards of keys that it
        remembers. After this time it must query again which keys are moving to other shards. None
        if no key ever moves.
    :param move_wait: seconds for which a write waits while its key moves to another shard.
    :param read_plans: whether the SQL of a query is kept for later queries that differ from it only
        in their values.
    :param write_plans: whether the SQL of an UPDATE by ``save()`` or ``update()`` is kept in the same
        way.
    """

    topology: Topology
    tickets: tuple[str, ...]
    ticket_options: TicketOptions
    directory: str
    max_idle_aliases: int
    cache: CacheOptions | None = None
    admin: AdminOptions = AdminOptions()
    bound_key: str | None = None
    placement_lease: float | None = None
    move_wait: float = 2.0
    read_plans: bool = True
    write_plans: bool = True


def read() -> Mapping[str, Any]:
    """Return ``settings.SHARDED_ORM`` unchecked; an empty dict if there is no such setting.

    :raises InvalidConfiguration: the setting is not a dict.
    """
    raw = getattr(settings, SETTING, None)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise InvalidConfiguration([f"must be a dict, not {type(raw).__name__}"])
    return raw


def source(raw: Mapping[str, Any]) -> SourceOptions:
    """Return the options of the topology source: ``TOPOLOGY`` of a ``SHARDED_ORM`` dict.

    Without ``TOPOLOGY``, return the options of a static source (the topology is in the settings).

    :raises InvalidConfiguration: ``TOPOLOGY`` is wrong; the error lists every problem.
    """
    values = raw.get("TOPOLOGY")
    if values is None:
        return SourceOptions()
    if not isinstance(values, Mapping):
        # Show only the type of the value: the value may be a URL with a password.
        raise InvalidConfiguration([f"TOPOLOGY must be a dict, not {type(values).__name__}"])
    problems = list(unknown_keys("TOPOLOGY: ", values, TOPOLOGY_KEYS))
    path, options = values.get("SOURCE", "static"), values.get("OPTIONS", {})
    if not isinstance(path, str) or not path:
        problems.append(
            f"TOPOLOGY: SOURCE must be 'static', 'file', 'database', 'zookeeper' or a dotted path, not {path!r}"
        )
    if not isinstance(options, Mapping):
        problems.append(f"TOPOLOGY: OPTIONS must be a dict, not {type(options).__name__}")
    if problems:
        raise InvalidConfiguration(problems)
    return SourceOptions(path, dict(options))


def parse(raw: Any, document: Document | None = None) -> Config:
    """Check a ``SHARDED_ORM`` dict and return it as a :class:`Config`.

    :param document: the topology document, if the topology is stored outside of the settings. Its
        nodes and groups are added to those in ``raw``, or override them. None if the topology is
        only in the settings (a static source).
    :raises InvalidConfiguration: anything is wrong. The error lists every problem.
    """
    if not isinstance(raw, Mapping):
        raise InvalidConfiguration([f"must be a dict, not {type(raw).__name__}"])
    problems = list(unknown_keys("", raw, KEYS))
    if document is not None:
        if source(raw).source != "static":
            problems += _ignored_ranges(raw)
        raw = _with_wrong_parts(document.over(raw), raw)
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
    bound_key = raw.get("BOUND_KEY")
    if bound_key is not None and (not isinstance(bound_key, str) or "." not in bound_key):
        problems.append(f"BOUND_KEY must be the dotted path of a function, not {bound_key!r}")
    lease = None
    if raw.get("PLACEMENT_LEASE") is not None:
        lease = seconds("", "PLACEMENT_LEASE", raw, 5.0, problems)
    move_wait = seconds("", "MOVE_WAIT", raw, 2.0, problems)
    read_plans = flag("", "READ_PLANS", raw, True, problems)
    write_plans = flag("", "WRITE_PLANS", raw, True, problems)
    if problems:
        raise InvalidConfiguration(problems)
    return Config(
        topology,
        tuple(tickets),
        ticket_options,
        directory,
        idle,
        cache,
        admin,
        bound_key,
        lease,
        move_wait,
        read_plans,
        write_plans,
    )


def _ignored_ranges(raw: Mapping[str, Any]) -> Iterator[str]:
    groups = raw.get("GROUPS", {})
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and "RANGES" in group:
            yield (
                f"group {name!r}: RANGES of the settings would be ignored, because TOPOLOGY names a"
                " source; take them out here (and push them there)"
            )


def _with_wrong_parts(merged: dict[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Put the nodes and groups of the settings that are no dicts back into ``merged``.

    Return ``merged``. The caller then reports their wrong type as an error. Otherwise, it would
    report a wrong reason: the merge has replaced such a group by the group of the document, which
    has no ``STRATEGY``. So the error would be that ``STRATEGY`` is missing. If ``NODES`` or
    ``GROUPS`` itself is no dict, it is put back as well.

    :param merged: the ``SHARDED_ORM`` setting into which a topology document was merged.
    :param setting: the setting before the merge.
    """
    for part in ("NODES", "GROUPS"):
        own = setting.get(part, {})
        if isinstance(own, Mapping):
            wrong = {name: value for name, value in own.items() if not isinstance(value, Mapping)}
            merged[part] = {**merged[part], **wrong}
        else:
            merged[part] = own
    return merged


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
