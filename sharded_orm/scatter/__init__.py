"""Scatter: sends one query to many shards, and merges the results as one database would.

A *node* is a database server with many shards. A *target* is a shard with the query to send to it.
"""

from sharded_orm.scatter.api import aggregate, count, exists, fetch
from sharded_orm.scatter.plan import Target

__all__ = ["Target", "aggregate", "count", "exists", "fetch"]
