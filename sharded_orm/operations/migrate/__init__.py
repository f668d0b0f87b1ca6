"""Migrating shards, so that a kill at any moment loses nothing; and seeing which shards are behind.

A plan is made once per set of applied migrations (``plan``, ``planner``). Its SQL is recorded once
per state of a schema, on an empty copy of a shard (``rehearsal``, ``recorder``, ``recorded_sql``),
and executed on the shards (``executor``, ``per_shard_operation``). The journal learns of each step
before the step is taken (``checkpoint``, ``shard_session``), so that a later process can find out
whether an interrupted step took effect (``recovery``, ``records``).
"""

from sharded_orm.exceptions import OperationStopped as Stopped
from sharded_orm.exceptions import OperationUnclear as Unclear
from sharded_orm.operations.migrate.applied_state import AppliedState
from sharded_orm.operations.migrate.migrator import Migrator
from sharded_orm.operations.migrate.planner import MigrateOptions

__all__ = ["AppliedState", "MigrateOptions", "Migrator", "Stopped", "Unclear"]
