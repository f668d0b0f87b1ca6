"""The manager of content types, which finds them in the global database, also for rows on shards.

The package's app imports this module only if ``django.contrib.contenttypes`` is installed.
"""

from __future__ import annotations

from typing import Any, Self

from django.contrib.contenttypes.models import ContentType, ContentTypeManager

from sharded_orm import database_settings, runtime


class GlobalContentTypeManager(ContentTypeManager):
    """The manager of content types, which are never on a shard.

    Django and other packages look for the content type of a row in the database of that row:
    ``ContentType.objects.db_manager(photo._state.db).get_for_model(photo)``. If ``using`` is the
    alias of a shard or a group, this manager reads the global database.
    """

    def db_manager(self, using: str | None = None, hints: Any = None) -> Self:
        return super().db_manager(None if _is_on_shards(using) else using, hints)

    def __eq__(self, other: object) -> bool:
        # Django's migrations compare managers. They would record that the manager has changed. So
        # this manager counts as equal to the manager that it replaces.
        return isinstance(other, ContentTypeManager)

    __hash__ = ContentTypeManager.__hash__


def install_manager() -> None:
    """Replace the manager of content types by :class:`GlobalContentTypeManager`."""
    meta: Any = ContentType._meta
    # Remove Django's manager from the model, because it would take precedence over the new one.
    meta.local_managers.clear()
    ContentType.add_to_class("objects", GlobalContentTypeManager())


def _is_on_shards(alias: str | None) -> bool:
    if alias is None:
        return False
    topology = runtime.topology()
    return (
        alias in topology.groups
        or topology.resolve(alias) is not None
        or database_settings.template_group(alias) is not None
    )
