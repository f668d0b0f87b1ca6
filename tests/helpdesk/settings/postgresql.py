"""The helpdesk on two PostgreSQL servers."""

from __future__ import annotations

from tests.helpdesk.settings.base import *  # noqa: F403
from tests.helpdesk.settings.base import sharded_orm
from tests.settings import postgresql

DATABASES = postgresql.DATABASES
SHARDED_ORM = sharded_orm(postgresql.SHARDED_ORM["NODES"])
