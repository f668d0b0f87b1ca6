"""The helpdesk on two MariaDB servers."""

from __future__ import annotations

from tests.helpdesk.settings.base import *  # noqa: F403
from tests.helpdesk.settings.base import sharded_orm
from tests.settings import mysql

DATABASES = mysql.DATABASES
SHARDED_ORM = sharded_orm(mysql.SHARDED_ORM["NODES"])
