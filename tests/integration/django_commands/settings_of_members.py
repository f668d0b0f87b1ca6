"""The settings of a fleet whose users are on shards."""

from __future__ import annotations

from tests.integration.django_commands.settings import *  # noqa: F403  # Django reads them here
from tests.integration.django_commands.settings import INSTALLED_APPS as _APPS

INSTALLED_APPS = [*_APPS, "sharded_orm.contrib.lookups", "members"]
AUTH_USER_MODEL = "members.Member"
