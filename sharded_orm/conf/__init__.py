"""The ``SHARDED_ORM`` setting, read and checked as a whole.

Nothing is read at import. Only ``runtime`` and ``active_config`` read the setting; every other
module gets live objects from ``runtime``.
"""

from __future__ import annotations

from sharded_orm.conf.cache import CacheOptions
from sharded_orm.conf.setting import (
    SETTING,
    AdminOptions,
    Config,
    SourceOptions,
    parse,
    read,
    source,
)
from sharded_orm.conf.tickets import MAX_TICKETS, TicketOptions

__all__ = [
    "MAX_TICKETS",
    "SETTING",
    "AdminOptions",
    "CacheOptions",
    "Config",
    "SourceOptions",
    "TicketOptions",
    "parse",
    "read",
    "source",
]
