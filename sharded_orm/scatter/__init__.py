"""Scatter: sends one query to many shards, and merges the results as one database would."""

from sharded_orm.scatter.api import aggregate, count, exists, fetch
from sharded_orm.scatter.plan import Target

__all__ = ["Target", "aggregate", "count", "exists", "fetch"]
