"""Scatter: one query sent to many shards, its results merged as if from one database."""

from sharded_orm.scatter.api import aggregate, count, exists, fetch
from sharded_orm.scatter.plan import Target

__all__ = ["Target", "aggregate", "count", "exists", "fetch"]
