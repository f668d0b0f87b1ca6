"""A pytest plugin: Django compiles each query, as on a site that has switched plans off.

``python -m pytest -p tests.plans_off …`` runs any tests so, but not those of the plans themselves.
"""

from __future__ import annotations

from contextvars import ContextVar


def pytest_sessionstart() -> None:
    # Import here: when plugins are loaded, Django has no settings yet.
    from sharded_orm.models.plans import switch

    # Replace the default, because other threads begin with it.
    switch._are_plans_on = ContextVar("sharded_orm_plans", default=False)
