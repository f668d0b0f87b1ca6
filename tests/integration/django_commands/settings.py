"""The settings of a fleet of shards, with more apps of Django."""

from __future__ import annotations

from tests.integration.shards.settings import *  # noqa: F403  # Django reads them here
from tests.integration.shards.settings import DATABASES, FOLDER

INSTALLED_APPS = [
    "sharded_orm",
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "tests.photos",
    "trips",
]
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.db.DatabaseCache", "LOCATION": "cache_rows"}
}
EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
STATIC_URL = "static/"
STATIC_ROOT = f"{FOLDER}/static"
ROOT_URLCONF = "tests.integration.django_commands.urls"
ALLOWED_HOSTS = ["*"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
for _alias in ("default", "directory", "tickets_1", "tickets_2"):
    DATABASES[_alias]["TEST"] = {"NAME": f"{FOLDER}/test_{_alias}.sqlite3"}
