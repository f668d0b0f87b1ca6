"""Finds the models that a system check has to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps


def models_to_check(app_configs: Sequence[AppConfig] | None) -> list[Any]:
    """Return the models of the apps that a system check is asked to check.

    :param app_configs: the argument that Django passes to each check: a list of apps, or None for
        all apps.
    """
    if app_configs is None:
        return list(apps.get_models())
    return [model for app_config in app_configs for model in app_config.get_models()]
