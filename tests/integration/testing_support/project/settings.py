"""Settings of a project whose own tests are run by the tests in the folder above.

``PROJECT_FOLDER`` is the folder for its files; ``PROJECT_NODES`` is a JSON dict of nodes, absent
for SQLite; ``PROJECT_MEMCACHED`` is the address of a cache server, absent for no cache;
``PROJECT_TICKETS`` is the file of a ticket server's SQLite database, absent for no tickets.
"""

from __future__ import annotations

import json
import os

from sharded_orm.topology.aliases import sharded_databases

FOLDER = os.environ["PROJECT_FOLDER"]

SECRET_KEY = "project"
USE_TZ = True
ROOT_URLCONF = "tests.integration.testing_support.project.urls"
STATIC_URL = "static/"
MEDIA_URL = "media/"
# A flush creates their rows again, with other numbers.
TEST_NON_SERIALIZED_APPS = ["django.contrib.contenttypes"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SILENCED_SYSTEM_CHECKS = ["sharded_orm.W014", "sharded_orm.W011", "sharded_orm.W027"]
INSTALLED_APPS = [
    "sharded_orm",
    "django.contrib.contenttypes",
    "tests.integration.testing_support.project.notes",
]
DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]

if "PROJECT_EARLIER" in os.environ:  # without migration 2
    MIGRATION_MODULES = {
        "notes": "tests.integration.testing_support.project.notes.earlier_migrations"
    }

if "PROJECT_NODES" in os.environ:
    NODES = json.loads(os.environ["PROJECT_NODES"])
    _default = {**next(iter(NODES.values())), "NAME": "project_default"}
else:
    NODES = {
        name: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": f"{FOLDER}/{name}"}
        for name in ("one", "two")
    }
    _default = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": f"{FOLDER}/default.sqlite3"}
    if "PROJECT_KEEPDB" in os.environ:
        _default["TEST"] = {"NAME": f"{FOLDER}/test_default.sqlite3"}

_databases = {"default": _default}
if "PROJECT_TICKETS" in os.environ:
    _databases["tickets"] = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["PROJECT_TICKETS"],
    }
DATABASES = sharded_databases(_databases)
SHARDED_ORM = {
    "NODES": NODES,
    "GROUPS": {
        name: {
            "STRATEGY": strategy,
            "DATABASE_NAME": f"project_{name}_{{shard:03d}}",
            "RANGES": [
                {"range": (0, 3), "primary": "one", "replica": "two"},
                {"range": (4, 7), "primary": "two"},
            ],
            "ATOMIC_REQUESTS": name == "notes",
        }
        for name, strategy in (("notes", "modulo"), ("other", "directory"))
    },
}
if "PROJECT_TICKETS" in os.environ:
    SHARDED_ORM["TICKETS"] = ["tickets"]
if "PROJECT_MEMCACHED" in os.environ:
    CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
            "LOCATION": os.environ["PROJECT_MEMCACHED"],
        }
    }
    SHARDED_ORM["CACHE"] = {"OBJECTS": "default", "TIMEOUT": 1.9}
