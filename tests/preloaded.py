"""What the server of :mod:`tests.python_process` imports before it forks.

Only modules that read no settings: the programs have different ones.
"""

import importlib
import pkgutil

from django.conf import settings

from tests.garbage import keep_all

MODULES = (
    "MySQLdb",
    "django.contrib.admin.options",
    "django.contrib.admin.sites",
    "django.contrib.admin.views.main",
    "django.core.cache.backends.memcached",
    "django.core.management",
    "django.core.management.commands.migrate",
    "django.core.serializers.json",
    "django.db.backends.mysql.base",
    "django.db.backends.sqlite3.base",
    "django.template.backends.django",
    "django.test.client",
    "django.test.runner",
    "kazoo.client",
    "psycopg",
    "pymemcache",
    "pytest",
    "redis",
    "sharded_orm.runtime",
    "tqdm",
)
PACKAGES = ("backends", "cache", "conf", "ids", "routing", "scatter", "topology")

for module in MODULES:
    importlib.import_module(module)
for package in PACKAGES:
    path = importlib.import_module(f"sharded_orm.{package}").__path__
    for info in pkgutil.walk_packages(path, f"sharded_orm.{package}."):
        importlib.import_module(info.name)
assert not settings.configured
keep_all()
