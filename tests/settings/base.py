"""Settings that all test runs share."""

from __future__ import annotations

from typing import Any

SECRET_KEY = "tests"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "sharded_orm",
    "sharded_orm.contrib.lookups",
    "sharded_orm.contrib.objects",
    "django.contrib.admin",
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "tests.photos",
    "tests.samples",
    "tests.cached",
    "tests.relatives.plain",
    "tests.relatives.sharded",
    "tests.authors",
    "tests.twins",
    "tests.finders",
    "tests.pinboards",
]

# For the admin.
STATIC_URL = "static/"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

#: The collation of text that is a key; see tests.cached.
EXACT_COLLATION: str | None = None

DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]

# In this process only. Tests of the cache use real servers instead.
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "tests"}
}

GLOBAL_ALIASES = ("default", "directory", "tickets_1", "tickets_2")


def sharded_orm(nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ``SHARDED_ORM`` with one group per strategy, each spread over the two ``nodes``."""
    one, two = nodes

    def group(strategy: str, count: int, **options: Any) -> dict[str, Any]:
        half = count // 2
        return {
            "STRATEGY": strategy,
            "STRATEGY_OPTIONS": options,
            "RANGES": [
                {"range": (0, half - 1), "primary": one, "replica": two},
                {"range": (half, count - 1), "primary": two, "replica": one},
            ],
        }

    return {
        "NODES": nodes,
        "GROUPS": {
            "photos": group("directory", 16),
            "events": group("modulo", 8),
            "archive": group("range", 4, SIZE=1000),
            "pins": group("embedded", 8),
            "visits": group("embedded", 4, SHIFT=10, BITS=13),
        },
        "TICKETS": ["tickets_1", "tickets_2"],
        "DIRECTORY": "directory",
        "PLACEMENT_LEASE": 5.0,
        "CACHE": {"OBJECTS": "default"},
    }
