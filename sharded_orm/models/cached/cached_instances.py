"""Making model instances from cached rows, exactly as Django makes them from database rows.

The cache holds rows as the database driver returned them. To make instances, Django's steps follow:
the converters of the database connection, then those of the fields, then ``from_db()`` of the
model. Because of the first step, each :class:`InstanceFactory` belongs to a connection.
"""

from __future__ import annotations

from typing import Any

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
        # The converters of a backend depend only on its vendor and time zone. So connections with
        # the same vendor and time zone share the rows that these converters have made. The
        # from_db_value() of a field is called for each instance: it may return a mutable object, or
        # depend on more than the row.
        self.decoded = plan.decoded(connection.vendor, connection.timezone_name)
        #: Two factories of the model with the same ``kind`` make equal instances from the same row.
        #: So one of them may make the instances of rows from the connections of both.
        self.kind: object = self.decoded if self.serves_others else self
