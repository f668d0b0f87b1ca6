"""The models, managers and fields of the library."""

from __future__ import annotations

from django.core import checks

from sharded_orm.models.base import ShardedModel
from sharded_orm.models.fields import (
    ExactCharField,
    PackedIDField,
    TicketField,
    TimestampedIDField,
)
from sharded_orm.models.global_models import GlobalManager, GlobalModel, GlobalQuerySet
from sharded_orm.models.installation import check_contrib_apps, check_installation
from sharded_orm.models.querysets.direct_plans import PlanManager, PlanQuerySet
from sharded_orm.models.querysets.route import Route
from sharded_orm.models.querysets.sharded import ShardedManager, ShardedQuerySet
from sharded_orm.models.tables.directory import Placement
from sharded_orm.models.tables.fleet import ShardMap, TopologyVersion
from sharded_orm.models.tables.journal import OperationRun, OperationScript, OperationStep
from sharded_orm.models.tables.key_move import KeyMove
from sharded_orm.models.tables.sequence import TicketSequence

__all__ = [
    "ExactCharField",
    "GlobalManager",
    "GlobalModel",
    "GlobalQuerySet",
    "KeyMove",
    "OperationRun",
    "OperationScript",
    "OperationStep",
    "PackedIDField",
    "Placement",
    "PlanManager",
    "PlanQuerySet",
    "Route",
    "ShardMap",
    "ShardedManager",
    "ShardedModel",
    "ShardedQuerySet",
    "TicketField",
    "TicketSequence",
    "TimestampedIDField",
    "TopologyVersion",
]

checks.register(check_installation, checks.Tags.models)
checks.register(check_contrib_apps, checks.Tags.models)
