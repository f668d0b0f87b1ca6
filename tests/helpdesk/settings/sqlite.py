"""The helpdesk on SQLite."""

from __future__ import annotations

from tests.helpdesk.settings.base import *  # noqa: F403
from tests.helpdesk.settings.base import sharded_orm
from tests.settings import sqlite

DATABASES = sqlite.DATABASES
SHARDED_ORM = sharded_orm(sqlite.SHARDED_ORM["NODES"])
