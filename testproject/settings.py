"""Settings of the example. For its databases see ``testproject/databases.py``.

``SHARDED_ORM_DEMO_MEMCACHED``
    Addresses of memcached servers, separated by commas; without them the cache is in the memory
    of the process, which is right for one process only.
``SHARDED_ORM_DEMO_DEBUG``
    ``1`` turns on ``DEBUG``, with a panel on each page that shows which shards served it. Only on
    your own machine: a bug then shows its traceback. Missing objects and unreachable databases
    have the same pages as without.
"""

from __future__ import annotations

import os
from pathlib import Path

from sharded_orm.topology.aliases import sharded_databases
from testproject.databases import configure

BASE_DIR = Path(__file__).resolve().parent
FOLDER = Path(os.environ.get("SHARDED_ORM_DEMO_DIR") or BASE_DIR / "var")

_databases, SHARDED_ORM = configure(FOLDER)
DATABASES = sharded_databases(_databases)
DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]

_memcached = os.environ.get("SHARDED_ORM_DEMO_MEMCACHED")
if _memcached:
    CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
            "LOCATION": _memcached.split(","),
        }
    }
else:
    CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    # The demo is one process: its server.
    SILENCED_SYSTEM_CHECKS = ["sharded_orm.W030"]

# A demonstration on your own machine: it signs nothing that is worth forging.
SECRET_KEY = os.environ.get("SHARDED_ORM_DEMO_SECRET_KEY", "for-demonstration-only")
DEBUG = os.environ.get("SHARDED_ORM_DEMO_DEBUG") == "1"
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", "testserver"]

INSTALLED_APPS = [
    "testproject.photos",
    "testproject.activity",
    "testproject.boards",
    "testproject.movielens",
    "testproject.panel",
    "sharded_orm",
    "sharded_orm.contrib.lookups",
    "sharded_orm.contrib.mirrors",
    "sharded_orm.contrib.entities",
    "sharded_orm.contrib.objects",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]
MIDDLEWARE = [
    # First, so that it records the queries of the others; without DEBUG it removes itself.
    "testproject.panel.middleware.PanelMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    # Last, so that it is the first to get the exceptions of a view.
    "testproject.photos.errors.ErrorPages",
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
DEFAULT_EXCEPTION_REPORTER_FILTER = "testproject.photos.errors.CredentialsHidden"
ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
ASGI_APPLICATION = "testproject.asgi.application"

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "photos:front"
LOGOUT_REDIRECT_URL = "photos:front"
