"""Which models a system check is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps


def models_to_check(app_configs: Sequence[AppConfig] | None) -> list[Any]:
    """Return the models of ``app_configs``, as Django passes it to a check; None stands for all apps."""
    if app_configs is None:
        return list(apps.get_models())
    return [model for app_config in app_configs for model in app_config.get_models()]
