"""Settings of all runs; what differs comes as JSON in ``SHARDED_ORM_YARDSTICK``."""

from __future__ import annotations

import json
import os
from importlib import import_module

_given = json.loads(os.environ["SHARDED_ORM_YARDSTICK"])

DATABASES = _given["databases"]
TEST_RUNNER = "yardstick_recorder.Runner"
YARDSTICK_RESULTS = _given["results"]

# From here on as in the suite's own test_sqlite.py, which its tests rely on.
SECRET_KEY = "django_tests_secret_key"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = False

if _given["scramble"]:
    import_module("yardstick_scramble").install(_given["scramble"])
