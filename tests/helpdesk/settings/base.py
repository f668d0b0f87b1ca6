"""Settings of the helpdesk: a project of its own, with the packages that many sites have."""

from __future__ import annotations

from typing import Any

from tests.settings.base import *  # noqa: F403
from tests.settings.base import MIDDLEWARE as COMMON_MIDDLEWARE

ROOT_URLCONF = "tests.helpdesk.urls"
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
INSTALLED_APPS = [
    "sharded_orm",
    "django.contrib.admin",
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.sitemaps",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_filters",
    "import_export",
    "debug_toolbar",
    "tests.helpdesk",
]
MIDDLEWARE = ["debug_toolbar.middleware.DebugToolbarMiddleware", *COMMON_MIDDLEWARE]
DEBUG_TOOLBAR_PANELS = [
    "debug_toolbar.panels.templates.TemplatesPanel",
    "sharded_orm.contrib.debug_toolbar.panels.ShardSQLPanel",
]
# The tests of the toolbar turn it on.
DEBUG_TOOLBAR_CONFIG = {"IS_RUNNING_TESTS": False}
CELERY_BROKER_URL = "memory://"
CELERY_BROKER_TRANSPORT_OPTIONS = {"polling_interval": 0.01}
CELERY_WORKER_HIJACK_ROOT_LOGGER = False


def sharded_orm(nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ``SHARDED_ORM``: the tenants' rows on 64 shards, the people's on 4."""
    one, two = nodes
    return {
        "NODES": nodes,
        "GROUPS": {
            "helpdesk": {
                "STRATEGY": "directory",
                "RANGES": [
                    {"range": (0, 31), "primary": one},
                    {"range": (32, 63), "primary": two},
                ],
            },
            "people": {
                "STRATEGY": "modulo",
                "RANGES": [
                    {"range": (0, 1), "primary": one},
                    {"range": (2, 3), "primary": two},
                ],
            },
        },
        "TICKETS": ["tickets_1", "tickets_2"],
        "DIRECTORY": "directory",
        "CACHE": {"OBJECTS": "default"},
    }
