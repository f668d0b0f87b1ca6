"""Foreign keys that are a shard key, and get another value if the related row is deleted.

Their rows would stay on the shard of the former key, where nobody finds them by the new key. So
such an ``on_delete`` is an error of the system checks. Programs that silence the checks get an error
for each deletion that reaches such a foreign key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from django.db.models import CASCADE, SET_DEFAULT, SET_NULL
from django.db.models.deletion import get_candidate_relations_to_delete

from sharded_orm import compat
from sharded_orm.exceptions import ShardKeyChanged

#: The models that have such a foreign key. Deletions are not checked while there are none.
_models: WeakSet[Any] = WeakSet()


def policy_of(on_delete: Any) -> Any:
    """Return the function that ``on_delete`` is or wraps.

    django-polymorphic puts an object around the ``on_delete`` of each foreign key of its models.
    The object has the function as its attribute ``action``, and no name.
    """
    while not hasattr(on_delete, "__name__") and callable(
        action := getattr(on_delete, "action", None)
    ):
        on_delete = action
    return on_delete


def name_of_policy(on_delete: Any) -> str:
    """Return the name of ``on_delete`` for an error message. A callable object may have no name."""
    policy = policy_of(on_delete)
    return str(getattr(policy, "__name__", None) or type(policy).__name__)


def set_arguments(on_delete: Any) -> tuple[Any, ...] | None:
    """Return the arguments of ``SET()`` if ``on_delete`` is a function that it has returned."""
    # Migrations call this method to write SET() into their files.
    on_delete = policy_of(on_delete)
    if not hasattr(on_delete, "deconstruct"):
        return None
    path, arguments, _ = on_delete.deconstruct()
    return arguments if path == "django.db.models.SET" else None


def name_of_new_value(on_delete: Any) -> str | None:
    """Return the name of ``on_delete`` if it gives another value to the foreign key, such as
    ``SET_NULL``.

    Return None if it does not, such as ``CASCADE``. Also return None for a function of the project,
    because nobody knows what it does.
    """
    if set_arguments(on_delete) is not None:
        return "SET(…)"
    on_delete = policy_of(on_delete)
    if on_delete in (SET_NULL, SET_DEFAULT) or (
        compat.changes_rows_unseen(on_delete) and on_delete.__name__ != "DB_CASCADE"
    ):
        return str(on_delete.__name__)
    return None


def is_shard_key(field: Any) -> bool:
    """Return whether the ``ShardMeta`` of the field's model names ``field`` as the shard key.

    Unlike the options of the model, it is known while the model is being declared.
    """
    name = getattr(getattr(field.model, "ShardMeta", None), "shard_key", None)
    return name in (field.name, field.attname)


def note_rewritten_key(field: Any) -> None:
    """Note the model of ``field`` if the ``on_delete`` of ``field`` would change a shard key.

    This is so if ``field`` is the shard key of its model, and its ``on_delete`` gives it another
    value, such as ``SET_NULL``. From then on, :func:`refuse_rewritten_keys` checks deletions.
    """
    if is_shard_key(field) and name_of_new_value(getattr(field.remote_field, "on_delete", None)):
        _models.add(field.model)


def refuse_rewritten_keys(model: Any) -> None:
    """Raise :exc:`ShardKeyChanged` if the deletion of rows of ``model`` may change a shard key.

    Sends no query. Like ``update()`` of the shard key, the deletion is refused even if there are no
    rows to be changed.
    """
    if not _models:
        return
    for relation in _followed_relations(model):
        field: Any = relation.field
        name = name_of_new_value(field.remote_field.on_delete)
        if name is not None and relation.related_model in _models and is_shard_key(field):
            raise ShardKeyChanged(
                f"delete() of {model.__name__} cannot set {field.name!r} of {field.model.__name__}, as"
                f" on_delete={name} says: it is the shard key, and the rows would stay on the wrong"
                " shard. Set on_delete to PROTECT or CASCADE. Create rows that are to stay under the"
                " new key, and delete the old ones."
            )


def _followed_relations(model: Any) -> Iterator[Any]:
    """Yield the relations that the deletion of rows of ``model`` follows, directly or by rows that
    are deleted, too."""
    seen, found = {model}, [model]
    while found:
        model = found.pop()
        related: list[Any] = [
            field.related_model
            for field in model._meta.private_fields
            if hasattr(field, "bulk_related_objects")
        ]
        for relation in get_candidate_relations_to_delete(model._meta):
            yield relation
            on_delete = policy_of(relation.field.remote_field.on_delete)  # type: ignore[attr-defined]  # missing in Django's type stubs
            if on_delete is CASCADE or compat.changes_rows_unseen(on_delete):
                related.append(relation.related_model)
        found += set(related) - seen
        seen.update(related)
