"""Scatter: sends a query to many shards, and merges the results into what one database would return.

A *node* is a database server with many shards. A *target* is a shard together with the query that
is sent to it.
"""

from sharded_orm.scatter.api import aggregate, count, exists, fetch
from sharded_orm.scatter.counted_query import aggregated_query, counted_query
from sharded_orm.scatter.plan import Target
from sharded_orm.scatter.rows_by_key import fetch_by_key, fetch_parts_by_key

__all__ = [
    "Target",
    "aggregate",
    "aggregated_query",
    "count",
    "counted_query",
    "exists",
    "fetch",
    "fetch_by_key",
    "fetch_parts_by_key",
]
