"""Settings for two MariaDB servers, named by the environment (``tests.services.mariadb``)."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

from sharded_orm.topology.aliases import sharded_databases
from tests.services.mariadb import ENVIRONMENT, addresses_from_environment
from tests.settings.base import *  # noqa: F403
from tests.settings.base import GLOBAL_ALIASES, sharded_orm

_servers = addresses_from_environment()
if len(_servers) < 2:
    raise ImproperlyConfigured(
        f"{__name__} needs two servers in ${ENVIRONMENT}; run"
        " 'python -m tests.services.mariadb -- COMMAND'."
    )
_one, _two = (server.django() for server in _servers[:2])
_OPTIONS = {"charset": "utf8mb4", "isolation_level": "read committed"}

# Cached models are in the first global alias; the other aliases use Django's stock backend. The
# second ticket server is not on the node of the first.
EXACT_COLLATION = "utf8mb4_nopad_bin"

DATABASES = sharded_databases(
    {
        alias: {
            "ENGINE": "sharded_orm.backends.mysql"
            if alias == "default"
            else "django.db.backends.mysql",
            "NAME": f"sharded_orm_{alias}",
            "OPTIONS": _OPTIONS,
            **(_two if alias == "tickets_2" else _one),
        }
        for alias in GLOBAL_ALIASES
    }
)
SHARDED_ORM = sharded_orm(
    {
        node: {"ENGINE": "sharded_orm.backends.mysql", "OPTIONS": _OPTIONS, **server}
        for node, server in (("db1", _one), ("db2", _two))
    }
)
