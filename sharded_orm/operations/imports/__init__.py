"""Import the rows of unsharded tables into the shards of a group (as Pinterest did, P12).

The unsharded tables, called the source, keep their rows. An import only reads them. An import that
also copies later changes of the source (it *follows* the source) adds triggers there. The work is
cut into ranges of primary keys, which several processes share
(:mod:`~sharded_orm.operations.runs.farm`).
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
