"""Migrate shards so that a kill at any moment loses nothing, and report which shards are behind.

- One plan is made for all shards with the same applied migrations (``plan``, ``planner``).
- Its SQL is recorded on an empty copy of a shard, once for all shards with the same schema
  (``rehearsal``, ``sql_recorder``, ``recorded_sql``).
- The SQL is executed on the shards (``executor``, ``shard_schema``, ``per_shard_operation``).
- Each step is written into the journal (tables in the global database) before it is taken
  (``checkpoint``, ``shard_session``). So a later process can find out whether an interrupted step
  took effect (``step_outcome``, ``migration_records``).
"""

from sharded_orm.operations.exceptions import OperationStopped as Stopped
from sharded_orm.operations.exceptions import OperationUnclear as Unclear
from sharded_orm.operations.migrate.applied_state import AppliedState
from sharded_orm.operations.migrate.migrator import Migrator
from sharded_orm.operations.migrate.planner import MigrateOptions

__all__ = ["AppliedState", "MigrateOptions", "Migrator", "Stopped", "Unclear"]
