"""Import the rows of unsharded tables into the shards of a group (as Pinterest did, P12).

The database with the unsharded tables is called the *source*. An import reads these tables and
leaves their rows as they are. An import may also *follow* the source: it then adds triggers to the
tables, and applies later changes to the shards, too. The work is divided into ranges of primary
keys. Several processes can share these ranges (:mod:`~sharded_orm.operations.runs.farm`).
"""

from __future__ import annotations

from sharded_orm.operations.imports.preflight import ImportPlan, plan_import
from sharded_orm.operations.imports.request import ImportReport, ImportRequest
from sharded_orm.operations.imports.row_comparison import compare_rows
from sharded_orm.operations.imports.row_copy import copy_rows
from sharded_orm.operations.imports.source_follower import (
    FollowReport,
    follow_source,
    switch_source,
    unfollow_source,
)

__all__ = [
    "FollowReport",
    "ImportPlan",
    "ImportReport",
    "ImportRequest",
    "compare_rows",
    "copy_rows",
    "follow_source",
    "plan_import",
    "switch_source",
    "unfollow_source",
]
