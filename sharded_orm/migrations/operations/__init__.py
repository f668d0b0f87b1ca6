"""Migration operations that projects can use in their own migrations."""

from __future__ import annotations

from sharded_orm.migrations.operations.tickets import CreateSequence

__all__ = ["CreateSequence"]
