"""The values that ``on_delete=models.SET(…)`` gives to rows whose related row is deleted.

``SET()`` may call a function of the project that returns an instance, such as a replacement for a
deleted album. Django writes its primary key with an UPDATE of its own, not with ``update()`` of the
queryset. So a check is made here, as ``update(album=album)`` makes it: the instance must be on the
shard of the rows, and have their key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.models import SET, Model

from sharded_orm.models.querysets.bulk_writes import refuse_rows_of_other_shards
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.query import ShardedQuery

#: The name that Django gives to the functions that ``SET()`` returns.
_SET_NAME = SET(None).__qualname__


def check_set_values(field: Any) -> None:
    """Let the deletion of a related row check what ``on_delete=SET(…)`` of ``field`` writes.

    If ``field`` has another ``on_delete``, nothing changes.

    :param field: a foreign key of a sharded model.
    """
    relation = field.remote_field
    on_delete: Any = getattr(relation, "on_delete", None)
    if (
        getattr(on_delete, "__qualname__", None) == _SET_NAME
        and on_delete.__module__ == SET.__module__
    ):
        relation.on_delete = _checked(on_delete)


def _checked(on_delete: Any) -> Callable[..., None]:
    # Keep this module as the function's module. Then a deletion on several shards takes it for a
    # function that may refuse the deletion, and calls it on all shards before the first one deletes.
    # The attributes of the original function are those that migrations and Django's collector read.
    @wraps(on_delete, assigned=("__name__", "__doc__"))
    def set_on_delete(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
        numbers = {key: len(batches) for key, batches in collector.field_updates.items()}
        on_delete(collector, field, sub_objs, using)
        if (options := shard_options(sub_objs.model)) is None:
            return  # A model of a migration. Its shards are not known.
        for (updated, value), batches in collector.field_updates.items():
            is_new = len(batches) > numbers.get((updated, value), 0)
            if is_new and updated is field and isinstance(value, Model):
                refuse_rows_of_other_shards(options, [value], using)
                # Django's queryset for the rows is not one of this library.
                query = sub_objs.query.chain(ShardedQuery)
                rows = ShardedQuerySet[Any](sub_objs.model, query=query).using(using)
                rows.refuse_instances_of_other_key({field.name: value})

    return set_on_delete
