"""Making model instances from cached rows, exactly as Django makes them from database rows.

The cache holds rows as the database driver returned them. To make instances of them, an
:class:`InstanceFactory` does what Django does: it calls first the converters of the database
connection, then those of the fields, and then ``from_db()`` of the model. Because of the first
step, each factory belongs to a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_orm.cache.values import Row
from sharded_orm.models.cached.lookup_plan import LookupPlan
from sharded_orm.models.plans.instances import InstanceLoader


class InstanceFactory(InstanceLoader):
    """Makes instances of a model from cached rows.

    It also implements :class:`~sharded_orm.cache.requests.Format`, with which the cache stores and
    decodes the rows of the model.
    """

    def __init__(self, plan: LookupPlan, connection: Any) -> None:
        super().__init__(plan.model, connection)
        self.fingerprint = plan.fingerprint(connection.vendor)
        self.width = len(self._columns)
        self._of_keys = [each for each in self._of_fields if each[0] in plan.key_positions]
        # Rows that the converters of the backend have converted. These converters depend only on
        # the vendor and the time zone of the connection. So all connections with the same vendor
        # and time zone share the rows. Values that from_db_value() of a field has returned are not
        # shared, because such a value may be mutable, or depend on more than the row.
        self.decoded = plan.decoded(connection.vendor, connection.timezone_name)
        #: Two factories of the model with the same ``kind`` make equal instances from the same row.
        #: So one of the two factories can make the instances for rows that the other's connection
        #: has read.
        self.kind: object = self.decoded if self.serves_others else self

    def key_values(self, values: Sequence[Row]) -> list[Row]:
        """Return rows in which the primary key and the shard key are converted by the fields' own
        converters (``from_db_value()``). The other values are as they were.

        :param values: rows that :meth:`values` has returned. They are not changed.
        """
        return self._converted(values, self._of_keys)
