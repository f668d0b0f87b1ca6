"""Lookups: find the shard of a row by a column that is not its shard key (Yupoo, Y7; Pinterest,
P11).

An app of Django: add ``"sharded_orm.contrib.lookups"`` to ``INSTALLED_APPS``, and declare
``ShardMeta.lookups``. See docs/howto/lookups.md and docs/decisions/0042-lookups.md.
"""

from sharded_orm.contrib.lookups.lookup import Lookup

__all__ = ["Lookup"]
