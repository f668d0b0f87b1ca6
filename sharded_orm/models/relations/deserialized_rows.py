"""Checks the many-to-many relations of a deserialized row before the row is stored.

Django's ``DeserializedObject.save()`` stores the row, and then calls ``set()`` of each relation. If
a related row is on another shard, ``set()`` refuses it, but the row would be stored by then.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.core.serializers.base import DeserializedObject

from sharded_orm.models.relations.managers import ManyBeside


def install_check() -> None:
    """Make ``DeserializedObject.save()`` check relations first. Further calls do nothing.

    No other method of Django is replaced for all models; decision 0072 says why this one is.
    """
    save = DeserializedObject.save
    # Find out whether save() makes the check already. The function below has an attribute for this.
    # If another package wraps the function, functools.wraps() copies the attribute.
    if hasattr(save, "checks_relations"):
        return

    @wraps(save)
    def save_checked(
        self: DeserializedObject, save_m2m: bool = True, using: str | None = None, **kwargs: Any
    ) -> None:
        if save_m2m and self.m2m_data:
            _check(self.object, self.m2m_data)
        save(self, save_m2m, using, **kwargs)

    save_checked.checks_relations = True  # type: ignore[attr-defined]  # see above
    DeserializedObject.save = save_checked  # type: ignore[method-assign]  # Django has no hook here


def _check(row: Any, relations: dict[str, Any]) -> None:
    """Raise the error that ``set()`` of a relation would raise after ``row`` is stored.

    A row without a primary key has no managers, so its relations are not checked. One query for
    each relation whose related rows are given by their primary keys.

    :raises CrossShardRelation: a related row is not on the shard of ``row``.
    """
    if row.pk is None:
        return
    for name, related in relations.items():
        manager = getattr(row, name)
        if isinstance(manager, ManyBeside):
            # An iterator can be read only once, and Django reads it after the row is stored.
            relations[name] = related = list(related)
            # Do not check the row itself, which may be one of its related rows. It is not stored
            # yet, so the check would not find it.
            is_own = manager.model._meta.concrete_model is row._meta.concrete_model
            manager.check_targets([item for item in related if not (is_own and item == row.pk)])
