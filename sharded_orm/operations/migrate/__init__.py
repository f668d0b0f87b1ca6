"""Migrating one shard, so that it can be killed at any moment; and seeing which are behind.

Plans are made once per set of applied migrations (``plan``, ``planner``), SQL is recorded once per state of
a schema on a copy of it (``rehearsal``, ``recording``, ``script``) and replayed on the shards
(``replay``, ``own``), each thing after the journal was told (``position``, ``shard``), so that
it can be judged when it was interrupted (``judging``, ``records``).
"""

from sharded_orm.exceptions import OperationStopped as Stopped
from sharded_orm.exceptions import OperationUnclear as Unclear
from sharded_orm.operations.migrate.applied_state import AppliedState
from sharded_orm.operations.migrate.migrator import Migrator
from sharded_orm.operations.migrate.planner import MigrateOptions

__all__ = ["AppliedState", "MigrateOptions", "Migrator", "Stopped", "Unclear"]
