"""Checks of the instances that ``on_delete=models.SET(…)`` gives to rows of sharded models.

``SET()`` may call a function of the project that returns an instance, such as a replacement for a
deleted album. :mod:`sharded_orm.models.querysets.deletion_values` checks that the rows may refer to
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.models import Model

from sharded_orm.models.querysets.deletion_values import check_before_deletion
from sharded_orm.models.sharding.rewritten_keys import policy_of, set_arguments


def check_set_values(field: Any) -> None:
    """Let the deletion of a related row check the instance that ``on_delete=SET(…)`` gives.

    Nothing changes if ``field`` has another ``on_delete``, or if the value is no instance, as in
    ``SET(5)``.

    :param field: a foreign key of a sharded model.
    """
    relation = field.remote_field
    on_delete: Any = getattr(relation, "on_delete", None)
    if getattr(policy_of(on_delete), "__module__", None) == __name__:
        return  # This function was called for the field before.
    if (arguments := set_arguments(on_delete)) is not None:
        (value,) = arguments
        if callable(value) or isinstance(value, Model):
            relation.on_delete = _checked(on_delete)


def _checked(on_delete: Any) -> Callable[..., None]:
    # Do not copy ``__module__`` from Django's function. A deletion on several shards takes an
    # ``on_delete`` that is not Django's for one that may refuse the deletion, and calls it on all
    # shards before the first one deletes. wraps() copies the other attributes, which migrations and
    # Django's collector read.
    @wraps(policy_of(on_delete), assigned=("__name__", "__doc__"))
    def set_on_delete(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
        on_delete(collector, field, sub_objs, using)
        check_before_deletion(collector)

    return set_on_delete
