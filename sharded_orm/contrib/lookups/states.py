"""Which lookups are served: all rows have their entries, so queries may rely on them."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.timezone import now

from sharded_orm.contrib.lookups.declaration import lookups_by_label
from sharded_orm.contrib.lookups.models import LookupState

# The lookups that this process has found served. None is ever withdrawn while processes use it, see
# docs/howto/lookups.md.
_served: set[str] = set()


def is_served(name: str) -> bool:
    """Whether the lookup ``name`` is served. One query, until it is served."""
    if name in _served:
        return True
    states = LookupState.objects.using(DEFAULT_DB_ALIAS)
    if not states.filter(lookup=name, served_since__isnull=False).exists():
        return False
    _served.add(name)
    return True


def serve(name: str) -> None:
    """Note that all rows have their entries in the lookup ``name``."""
    LookupState.objects.using(DEFAULT_DB_ALIAS).update_or_create(
        lookup=name, defaults={"served_since": now()}
    )


def withdraw(name: str) -> None:
    """Note that queries may not rely on the lookup ``name``. Other processes may rely on it still."""
    _served.discard(name)
    LookupState.objects.using(DEFAULT_DB_ALIAS).filter(lookup=name).delete()


def after_migrate(*, using: str, **kwargs: Any) -> None:
    """Withdraw lookups that no model declares any more; serve all in test databases, which are new.

    A receiver of ``post_migrate``, which Django also sends after a flush.
    """
    if using != DEFAULT_DB_ALIAS:
        return
    declared = {lookup.name for own in lookups_by_label().values() for lookup in own}
    LookupState.objects.using(using).exclude(lookup__in=declared).delete()
    if _is_test_database():
        for name in declared:
            serve(name)


_NAME = settings.DATABASES[DEFAULT_DB_ALIAS]["NAME"]


def _is_test_database() -> bool:
    """Whether a test run has replaced the global database by a test database."""
    return bool(connections[DEFAULT_DB_ALIAS].settings_dict["NAME"] != _NAME)
