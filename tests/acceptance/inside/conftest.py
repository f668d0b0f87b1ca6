"""Tests that run with the settings of the site (``--ds=testproject.settings``)."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _quick_passwords(settings: Any) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
