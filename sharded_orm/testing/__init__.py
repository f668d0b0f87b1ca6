"""Support for tests that use shards.

Nothing has to be set up: Django's ``TestCase``, ``TransactionTestCase``, ``--parallel`` and
``--keepdb`` and pytest-django work with shards when the group is among the test's
``databases``::

    class PhotoTests(TestCase):
        databases = {"default", "photos", "tickets_1", "tickets_2"}

(The ticket servers because new rows draw their ids there; the directory's alias too, if
it is not ``default``.)

Cached models are cached in tests as well, under names that no other run or process uses. In a
``TestCase`` nothing is stored, as it is one transaction; after each ``TransactionTestCase``
everything is forgotten.

Test shards are clones of a template that is migrated once per run; each is made when
it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable

from sharded_orm import runtime
from sharded_orm.backends.group.test_databases import prepare_shards

__all__ = ["ensure_shards"]


def ensure_shards(group: str, numbers: Iterable[int] | None = None) -> None:
    """Make test shards exist now rather than at their first use. Thread-safe.

    :param numbers: which ones; None means every shard of the group.
    """
    found = runtime.group(group)
    wanted = found.shards() if numbers is None else (found.shard(n) for n in numbers)
    prepare_shards(group, wanted)
