"""A pytest plugin: Django compiles each query, as on a site that has switched plans off.

``python -m pytest -p tests.plans_off …`` runs any tests so, except those of the plans themselves, whose
files have "plan" in their names. ``./scripts/test --long`` has a lane of them.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.is_file() and "plan" in collection_path.name else None


def pytest_sessionstart() -> None:
    # Import here: when plugins are loaded, Django has no settings yet.
    from sharded_orm.models.plans import switch

    # Replace the default, because other threads begin with it.
    switch._are_plans_on = ContextVar("sharded_orm_plans", default=False)
