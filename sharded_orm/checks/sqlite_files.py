"""System checks of SQLite files that hold the directory or tickets.

An SQLite file has only one writer at a time, so a transaction may block other writes to the file.
No check queries a database.

==================  ==========================================================
``sharded_orm.W014``  directory or tickets are in the SQLite file of the global database
``sharded_orm.W019``  the ``transaction_mode`` of a ticket server's SQLite file blocks new ids
==================  ==========================================================
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core import checks
from django.db import DEFAULT_DB_ALIAS

from sharded_orm import runtime


@checks.register(checks.Tags.models)
def check_autonomous_files(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if the directory or a ticket server is in the SQLite file of the alias ``default``.

    The directory records the shards of keys, and ticket servers hand out ids. The library writes
    both on separate connections, outside of the caller's transaction. SQLite allows one writer per
    file. So after a write in a transaction on ``default``, the caller would wait for its own
    transaction when it needs a new key or id, until the error "database is locked".
    """
    config = runtime.config()
    directory = any(g.strategy == "directory" for g in config.topology.groups.values())
    default = settings.DATABASES[DEFAULT_DB_ALIAS]
    if not str(default.get("ENGINE")).endswith("sqlite3"):
        return []
    return [
        checks.Warning(
            f"{key} names {alias!r}, the SQLite file of the global database. Inside atomic() that"
            " has written to it, a new key or id waits for this very transaction and fails with"
            " 'database is locked'.",
            hint=f"Give {key} a file of its own: another alias in DATABASES.",
            id="sharded_orm.W014",
        )
        for key, aliases in (
            ("TICKETS", config.tickets),
            ("DIRECTORY", (config.directory,) if directory else ()),
        )
        for alias in aliases
        if settings.DATABASES[alias].get("NAME") == default.get("NAME")
    ]


@checks.register(checks.Tags.models)
def check_ticket_files(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if a ticket server is an SQLite file whose ``transaction_mode`` is not DEFERRED.

    In the other modes, each transaction on the alias locks the file, even if it writes nothing. Ids
    are taken on separate connections, so nobody would get an id until the transaction ends.
    """
    messages: list[checks.CheckMessage] = []
    for alias in runtime.config().tickets:
        entry = settings.DATABASES[alias]
        mode = entry.get("OPTIONS", {}).get("transaction_mode")
        if str(entry.get("ENGINE")).endswith("sqlite3") and mode not in (None, "DEFERRED"):
            messages.append(
                checks.Warning(
                    f"The ticket server {alias!r} is an SQLite file with transaction_mode {mode!r}. A"
                    " transaction there, such as that of a test case, keeps the ids waiting until it"
                    " ends.",
                    hint="Leave transaction_mode out of its OPTIONS: an id is one statement.",
                    id="sharded_orm.W019",
                )
            )
    return messages
