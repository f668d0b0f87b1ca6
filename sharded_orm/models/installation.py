"""The checks that the library's app, and its apps whose models a project uses, are installed.

All other checks are registered by these apps, so none of them can tell that an app is missing.
These checks are registered by the import of :mod:`sharded_orm.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks

APP = "sharded_orm"
_CONTRIB = f"{APP}.contrib."


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


def check_contrib_apps(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Report an error if a model derives from a class of an app of ``sharded_orm.contrib`` that is
    not installed.
    """
    missing = {
        app: model
        for model in reversed(apps.get_models())
        # Models of such an app itself count as models of this library if the app is not installed.
        if not model.__module__.startswith(_CONTRIB)
        for app in _apps_of(model)
        if not apps.is_installed(app)
    }
    return [
        checks.Error(
            f"It needs {app!r}, which is not in INSTALLED_APPS: its checks, tables and commands are"
            " missing.",
            hint=f"Add {app!r} to INSTALLED_APPS.",
            obj=model,
            id="sharded_orm.E081",
        )
        for app, model in sorted(missing.items())
    ]


def _apps_of(model: Any) -> set[str]:
    """Return the apps of ``sharded_orm.contrib`` whose abstract models ``model`` derives from."""
    return {
        _CONTRIB + cls.__module__.removeprefix(_CONTRIB).partition(".")[0]
        for cls in model.__mro__
        if cls.__module__.startswith(_CONTRIB) and hasattr(cls, "_meta")
    }
