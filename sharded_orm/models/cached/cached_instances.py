"""Making model instances from cached rows, exactly as Django makes them from database rows.

The cache holds rows as the database driver returned them, before Django's converters. To become
instances, rows pass the converters of a database connection, those of the fields, then ``from_db`` of
the model. So each :class:`InstanceFactory` belongs to a connection.
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
        # Connections with the same vendor and time zone share decoded rows, because the converters
        # of the backend depend on these two. A field's own converter (from_db_value) is called for
        # each instance: its values may be mutable, or depend on more than the row.
        self.decoded = plan.decoded(connection.vendor, connection.timezone_name)
        #: Factories of the model with the same ``kind`` make equal instances, so one of them may
        #: make the instances of all.
        self.kind: object = self.decoded if self.serves_others else self
