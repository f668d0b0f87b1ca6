"""Support for tests that use shards.

Nothing has to be set up: Django's ``TestCase``, ``TransactionTestCase``, ``--parallel`` and
``--keepdb`` and pytest-django work with shards if the ``databases`` of the test name the group::

    class PhotoTests(TestCase):
        databases = {"default", "photos", "tickets_1", "tickets_2"}

(Ticket servers are needed because new rows draw their ids there, and the alias of the directory if
it is not ``default``.)

Cached models are cached in tests as well, under names that no other run or process uses. In a
``TestCase`` nothing is stored, as it is one transaction. After each ``TransactionTestCase`` all
entries are forgotten.

Test shards are clones of a template, a schema that is migrated once per run. Each is created at its
first use.
"""

from __future__ import annotations

from collections.abc import Iterable

from sharded_orm import runtime
from sharded_orm.backends.group.test_databases import prepare_shards

__all__ = ["ensure_shards"]


def ensure_shards(group: str, numbers: Iterable[int] | None = None) -> None:
    """Create test shards now rather than at their first use. Thread-safe.

    :param numbers: of the shards; None for every shard of the group.
    """
    shard_group = runtime.group(group)
    prepare_shards(
        group,
        shard_group.shards() if numbers is None else (shard_group.shard(n) for n in numbers),
    )
