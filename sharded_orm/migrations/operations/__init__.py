"""Operations for the migrations of projects."""

from __future__ import annotations

from sharded_orm.migrations.operations.tickets import CreateSequence

__all__ = ["CreateSequence"]
