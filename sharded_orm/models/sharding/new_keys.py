"""Checks shard keys that are foreign keys to the global database.

New keys are checked before they are assigned to shards. The keys of a fixture are checked when the
fixture is loaded. No database has a constraint for such a foreign key. Without the check, a
mistyped key would be assigned to a shard permanently, and its row would be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import router
from django.db.models import QuerySet

from sharded_orm.exceptions import DanglingShardKey

#: The number of keys that are looked up by one query.
BATCH = 500


def refuse_dangling_keys(group: str, field: Any, keys: Sequence[Any]) -> None:
    """Raise an error if one of the ``keys`` of ``group`` refers to a row that does not exist.

    Sends one query per 500 keys to the database that the router returns for writes. So rows of the
    caller's open transaction are found, too.

    :param field: the foreign key whose values are the keys.
    :param keys: values as the database would store them.
    :raises DanglingShardKey: a row does not exist. The message contains the first such key.
    """
    model, target = field.remote_field.model, field.target_field
    alias = router.db_for_write(model)
    # Use no manager of the model, because it may leave rows out or read from the cache.
    rows: Any = QuerySet(model).using(alias).values_list(target.attname, flat=True)
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        present = set(map(target.get_prep_value, rows.filter(**{f"{target.attname}__in": batch})))
        for key in batch:
            if key not in present:
                raise DanglingShardKey(
                    f"{key!r} is to be a shard key of group {group!r}, and no row of"
                    f" {model._meta.label} has {target.attname}={key!r} on {alias!r}. Nothing was"
                    " stored. Correct the key, or save that row first. If keys"
                    f" need no such row, set 'CHECK_NEW_KEYS': False for group {group!r}."
                )
