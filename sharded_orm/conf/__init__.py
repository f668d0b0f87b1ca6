"""Read and check the ``SHARDED_ORM`` setting.

Importing this package reads no setting. Only the modules ``runtime`` and ``active_config`` call
:func:`read`; every other module gets the objects that it needs from ``runtime``.
"""

from __future__ import annotations

from sharded_orm.conf.cache import CacheOptions
from sharded_orm.conf.parser import (
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
