"""System checks of other packages that would give rows of one shard for those of another.

==================  ==========================================================
``sharded_orm.E082``  cacheops shares its entries for a sharded model between databases
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks

from sharded_orm.checks.selection import models_to_check
from sharded_orm.models.sharding.options import group_of


@checks.register(checks.Tags.models)
def check_packages(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the settings of packages that are installed."""
    if not apps.is_installed("cacheops"):
        return []
    profile_of = import_module("cacheops.conf").model_profile
    return list(check_cacheops(models_to_check(app_configs), profile_of))


def check_cacheops(
    models: Iterable[Any], profile_of: Callable[[Any], dict[str, Any] | None]
) -> Iterator[checks.CheckMessage]:
    """Check the profiles of sharded models in the setting ``CACHEOPS``.

    :param profile_of: a function that returns the profile of a model, or None if it has none.
    """
    for model in models:
        profile = profile_of(model) if group_of(model) is not None else None
        if profile is not None and profile.get("db_agnostic", True):
            yield checks.Error(
                f"cacheops shares its entries for {model._meta.label} between databases: a query of"
                " one shard would get the rows that the same query has found on another.",
                hint='Set "db_agnostic": False in its profile in CACHEOPS, or in CACHEOPS_DEFAULTS.',
                obj=model,
                id="sharded_orm.E082",
            )
