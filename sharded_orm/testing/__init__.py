"""Support for tests that use shards.

Nothing has to be set up: Django's ``TestCase``, ``TransactionTestCase``, ``--parallel`` and
``--keepdb`` and pytest-django work with shards if the group is in the ``databases`` of the test::

    class PhotoTests(TestCase):
        databases = {"default", "photos", "tickets_1", "tickets_2"}

The aliases of the ticket servers must be listed there, because these servers give ids to new rows.
The directory is the table that records the shard of each key. If its database is not ``default``,
the alias of that database must be listed, too.

Cached models are cached in tests as well, under keys that no other run or process uses. In a
``TestCase``, nothing is stored in the cache, because the whole test is one transaction. After each
test of a ``TransactionTestCase``, all cache entries are forgotten.

One schema, the template, is migrated once per run. Each test shard is a clone of the template, created
at the shard's first use.
"""

from __future__ import annotations

from collections.abc import Iterable

from sharded_orm import runtime
from sharded_orm.backends.group.test_databases import prepare_shards

__all__ = ["ensure_shards"]


def ensure_shards(group: str, numbers: Iterable[int] | None = None) -> None:
    """Create the databases of test shards now rather than at their first use. Thread-safe.

    Does nothing for shards that exist already.

    :param group: name of the shard group.
    :param numbers: numbers of the shards; None for every shard of the group.
    """
    shard_group = runtime.group(group)
    prepare_shards(
        group,
        shard_group.shards() if numbers is None else (shard_group.shard(n) for n in numbers),
    )
