"""Convert the shard keys of a group between three forms of the same key.

These are the text that an operator types, the text that the directory stores, and the value that
the shards store in a column.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import connections, models

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.models.sharding.options import shard_options, target_field
from sharded_orm.operations.key_input import typed_key
from sharded_orm.routing.directory import DirectoryStrategy

#: Types of the fields of keys that can move. Triggers compare the key of each written row with the
#: moving key, and can do this only for these types.
COMPARABLE = (models.IntegerField, models.CharField, models.TextField, models.UUIDField)


class GroupKeys:
    """Converts the shard keys of ``group``.

    The strategy of the group must be a directory: a table that records the shard of each key.

    :raises LookupError: no model belongs to the group.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        #: The field of the shard key in each model of the group, keyed by the label of the model.
        self.fields: dict[str, Any] = {}
        for model in apps.get_models():
            options = shard_options(model)
            if options is not None and options.group == group and options.key is not None:
                self.fields[model._meta.label] = options.key
        if not self.fields:
            raise LookupError(f"No model belongs to group {group!r}.")
        self._field = next(iter(self.fields.values()))

    def value(self, key: Any) -> Any:
        """Return the value that the key's field sends to the database.

        :param key: the key, as a value, as text, or as the model instance to which it belongs.
        :raises InvalidShardKey: no row can have this key.
        """
        if isinstance(key, models.Model):
            key = key.pk
        alias = runtime.group(self.group).shard(0).alias
        try:
            typed = typed_key(self._field, key, alias)
        except ValidationError as exc:
            raise InvalidShardKey(
                f"{key!r} cannot be a shard key of group {self.group!r}: {' '.join(exc.messages)}"
            ) from exc
        return self._field.get_prep_value(typed)

    def text(self, value: Any) -> str:
        """Return the text under which the directory stores the key ``value``."""
        strategy = runtime.strategy(self.group)
        assert isinstance(strategy, DirectoryStrategy)
        return strategy.entry(value)

    def stored(self, value: Any) -> Any:
        """Convert a key to the form that the shards store.

        :param value: the key, as :meth:`value` returns it.
        """
        connection = connections[runtime.group(self.group).shard(0).alias]
        return self._field.get_db_prep_value(value, connection, prepared=True)

    def problems(self) -> list[str]:
        """Return a sentence for each model whose keys cannot be moved, because the type of the
        shard key does not allow it.
        """
        return [
            f"the shard key {field.attname!r} of {label} is a {type(target_field(field)).__name__}:"
            " keys are moved that are integers, text or UUIDs"
            for label, field in self.fields.items()
            if not isinstance(target_field(field), COMPARABLE)
        ]
