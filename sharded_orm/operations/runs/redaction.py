"""Remove the names of database accounts from messages before people see them."""

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
# Matches the account in MySQL error 1045, "Access denied for user 'site'@'10.0.0.7'"; and in
# "DEFINER=`site`@`%`".
_AT = rf"(?:\b[Uu]ser )?{_QUOTED}@(?:{_QUOTED}|[\w.%:-]+)"
# Matches the account in MySQL error 1226, "User 'site' has exceeded …"; and in PostgreSQL's "role
# "site" does not exist".
_NAMED = rf"\b(?:[Uu]ser|role) {_QUOTED}"
# Matches the account in MySQL error 1203, "User site already has more than 'max_user_connections'
# active connections".
_BARE = r"\b[Uu]ser [^\s'\"`]+(?= already has)"
# Matches the account in MySQL's replication error, "error connecting to master
# 'repl@10.0.0.7:3306'".
_MASTER = r"'[^'@\s]+@[^'@\s]+:\d+'"
_PHRASES = re.compile("|".join((_AT, _NAMED, _BARE, _MASTER)))
# Matches the account in this library's message, "node 'db1' refuses the OPERATOR account
# 'operator'".
_OWN_PHRASE = re.compile(rf"\b(account) {_QUOTED}")
_REPLACEMENT = "this account"


def without_accounts(text: str) -> str:
    """Return ``text`` without the names of database accounts, usually with "this account" instead.

    :param text: a message of a database server or of this library.

    - In known messages of servers, such as ``Access denied for user 'x'@'y'``, any account name is
      replaced, even a name that is in no setting.
    - Anywhere in the text, the account names in the settings are replaced, if they are in quotes or
      follow "user" or "account". These are the accounts of the nodes, operators, replication,
      ticket servers, directory and global database. A name that is also the name of a node or group
      is kept.

    Costs some microseconds and no query. Never raises.
    """
    text = _PHRASES.sub(_REPLACEMENT, _OWN_PHRASE.sub(r"\1", text))
    pattern = _configured_pattern(frozenset(_configured_names()))
    return text if pattern is None else pattern.sub(_REPLACEMENT, text)


def _configured_names() -> Iterator[str]:
    try:
        config = runtime.config()
    except (ShardedOrmError, ImproperlyConfigured):
        # The settings cannot be read, so they give no account names. Account names in well-known
        # messages of servers are replaced nevertheless, by ``_PHRASES``.
        return
    topology = config.topology
    entries = [
        *topology.nodes.values(),
        *(
            node.get(account) or {}
            for node in topology.nodes.values()
            for account in ("OPERATOR", "REPLICATION")
        ),
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
def _configured_pattern(names: frozenset[str]) -> re.Pattern[str] | None:
    if not names:
        return None
    # Try the longest name first, because one account's name may begin with another's.
    any_of = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(['\"`])(?:{any_of})\1|\b(?:[Uu]ser|account)[ =:](?:{any_of})(?!\w)")
