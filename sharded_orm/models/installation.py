"""The check that the library's app is installed.

All other checks are registered by that app, so none of them can tell that it is missing. This one
is registered by the import of :mod:`sharded_orm.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks

APP = "sharded_orm"


def check_installation(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Report an error if there are sharded models, and the app of this library is not installed."""
    if apps.is_installed(APP) or not any(hasattr(m, "_is_sharded") for m in apps.get_models()):
        return []
    return [
        checks.Error(
            f"{APP!r} is not in INSTALLED_APPS: its tables, commands and other checks are missing, and"
            " cache, mirrors and lookups are not kept up to date after writes.",
            hint=f"List {APP!r} first, before Django's own apps.",
            id="sharded_orm.E078",
        )
    ]
