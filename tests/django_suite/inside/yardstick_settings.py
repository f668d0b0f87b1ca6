"""Settings of all runs: the suite's own of this version; what differs comes as JSON in
``SHARDED_ORM_YARDSTICK``."""

from __future__ import annotations

import json
import os
from importlib import import_module

# The suite's tests rely on these settings. What they are differs between versions of Django.
from test_sqlite import *  # type: ignore[import-not-found]  # noqa: F403

_given = json.loads(os.environ["SHARDED_ORM_YARDSTICK"])

DATABASES = _given["databases"]
TEST_RUNNER = "yardstick_recorder.Runner"
YARDSTICK_RESULTS = _given["results"]
YARDSTICK_PLANS = _given["plans"]

if _given["scramble"]:
    import_module("yardstick_scramble").install(_given["scramble"])
