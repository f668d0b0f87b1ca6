"""The fleet of tests.integration.shards, with the admin.

Environment variables: ``FLEET_SETTING`` is a JSON dict that overrides keys of ``SHARDED_ORM``,
``FLEET_DATABASES`` one for ``DATABASES``. ``FLEET_TOPOLOGY`` is the file of a topology that can be
written. ``FLEET_CACHED`` is set if models are cached, ``FLEET_CREDENTIALS`` if the topology may
hold passwords.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.integration.shards.settings import *  # noqa: F403
from tests.integration.shards.settings import DATABASES, INSTALLED_APPS, SHARDED_ORM
from tests.settings.base import MIDDLEWARE, PASSWORD_HASHERS, STATIC_URL, TEMPLATES  # noqa: F401

INSTALLED_APPS = [
    *INSTALLED_APPS,
    "django.contrib.admin",
    "django.contrib.sessions",
    "django.contrib.messages",
    *(["tests.cached"] if "FLEET_CACHED" in os.environ else []),
]
ROOT_URLCONF = "tests.admin.fleet.urls"
ALLOWED_HOSTS = ["testserver"]
DATABASES.update(json.loads(os.environ.get("FLEET_DATABASES", "{}")))
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
EXACT_COLLATION = None
SILENCED_SYSTEM_CHECKS = ["sharded_orm.W030"]
SHARDED_ORM = {**SHARDED_ORM, **json.loads(os.environ.get("FLEET_SETTING", "{}"))}
if "FLEET_CACHED" in os.environ:
    SHARDED_ORM["CACHE"] = {"OBJECTS": "default"}

_file = os.environ.get("FLEET_TOPOLOGY")
if _file:
    SHARDED_ORM["TOPOLOGY"] = {
        "SOURCE": "tests.admin.fleet.source.FileWithHistory",
        "OPTIONS": {"PATH": _file, "CREDENTIALS": "FLEET_CREDENTIALS" in os.environ},
    }
    _groups: dict[str, dict[str, Any]] = SHARDED_ORM["GROUPS"]
    _ranges = {name: {"RANGES": group.pop("RANGES")} for name, group in _groups.items()}
    if not Path(_file).exists():
        Path(_file).write_text(
            json.dumps({"format": 1, "version": 1, "nodes": {}, "groups": _ranges})
        )
