"""What a text tells of database accounts, cut out of it before it is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS

from sharded_orm import runtime
from sharded_orm.exceptions import ShardedOrmError

_QUOTED = r"""(?:'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`)"""
# 1045: Access denied for user 'site'@'10.0.0.7'; DEFINER=`site`@`%`
_AT = rf"(?:\b[Uu]ser )?{_QUOTED}@(?:{_QUOTED}|[\w.%:-]+)"
# 1226: User 'site' has exceeded …; and as PostgreSQL says: role "site" does not exist
_NAMED = rf"\b(?:[Uu]ser|role) {_QUOTED}"
# 1203: User site already has more than 'max_user_connections' active connections
_BARE = r"\b[Uu]ser [^\s'\"`]+(?= already has)"
# Of replication: error connecting to master 'repl@10.0.0.7:3306'
_MASTER = r"'[^'@\s]+@[^'@\s]+:\d+'"
_SHAPES = re.compile("|".join((_AT, _NAMED, _BARE, _MASTER)))
# Our own words: node 'db1' refuses the OPERATOR account 'operator'
_OWN = re.compile(rf"\b(account) {_QUOTED}")
_SHOWN = "this account"


def without_accounts(text: str) -> str:
    """``text``, which a server or this library said, without the database accounts that it names.

    Cut out are accounts by the shapes in which servers tell them, and the configured ones of nodes,
    operators, ticket servers, the directory and the global database, in quotes or after "user". A
    configured name that is a node's or a group's as well stays elsewhere: it tells nothing.

    Costs some microseconds and asks nobody. Never raises.
    """
    text = _SHAPES.sub(_SHOWN, _OWN.sub(r"\1", text))
    configured = _configured(frozenset(_names()))
    return text if configured is None else configured.sub(_SHOWN, text)


def _names() -> Iterator[str]:
    try:
        config = runtime.config()
    except (ShardedOrmError, ImproperlyConfigured):
        return  # Nothing is known of any; the shapes have been cut out.
    topology = config.topology
    entries = [
        *topology.nodes.values(),
        *(node.get("OPERATOR") or {} for node in topology.nodes.values()),
        *(
            settings.DATABASES.get(alias) or {}
            for alias in {DEFAULT_DB_ALIAS, config.directory, *config.tickets}
        ),
    ]
    for entry in entries:
        name = str(entry.get("USER") or "")
        if name and name not in topology.nodes and name not in topology.groups:
            yield name


@lru_cache(maxsize=8)
def _configured(names: frozenset[str]) -> re.Pattern[str] | None:
    if not names:
        return None
    # The longest first: one may begin with another.
    any_of = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(['\"`])(?:{any_of})\1|\b(?:[Uu]ser|account)[ =:](?:{any_of})(?!\w)")
