"""Settings for two PostgreSQL servers, named by the environment (``tests.services.postgresql``)."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from sharded_orm.topology.aliases import sharded_databases
from tests.services.postgresql import ENVIRONMENT, addresses_from_environment
from tests.settings.base import *  # noqa: F403
from tests.settings.base import GLOBAL_ALIASES, INSTALLED_APPS, sharded_orm

_servers = addresses_from_environment()
if len(_servers) < 2:
    raise ImproperlyConfigured(
        f"{__name__} needs two servers in ${ENVIRONMENT}; run"
        " 'python -m tests.services.postgresql -- COMMAND'."
    )
_one, _two = _servers[:2]

# Cached models are read from the cache in transactions only if the level is named.
_options = {"OPTIONS": {"isolation_level": IsolationLevel.READ_COMMITTED}}

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.postgres", "tests.specimens"]

# Cached models are in the first global alias; the other aliases use Django's stock backend. The
# second ticket server is not on the node of the first. Shards are schemas of the servers' database;
# each global alias has a database of its own.
DATABASES = sharded_databases(
    {
        alias: {
            "ENGINE": "sharded_orm.backends.postgresql"
            if alias == "default"
            else "django.db.backends.postgresql",
            "NAME": f"sharded_orm_{alias}",
            **(_two if alias == "tickets_2" else _one).django(),
            **_options,
        }
        for alias in GLOBAL_ALIASES
    }
)
SHARDED_ORM = sharded_orm({"db1": _one.node(**_options), "db2": _two.node(**_options)})
