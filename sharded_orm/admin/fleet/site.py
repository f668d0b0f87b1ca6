"""Registers the pages of shards, ticket servers, operations and topology with an admin site."""

from __future__ import annotations

from django.contrib.admin import AdminSite

from sharded_orm.admin.fleet.runs import RunAdmin
from sharded_orm.admin.fleet.shards import ShardMapAdmin
from sharded_orm.admin.fleet.tickets import TicketAdmin
from sharded_orm.admin.fleet.topology import TopologyAdmin
from sharded_orm.models import OperationRun, ShardMap, TicketSequence, TopologyVersion

_PAGES = {
    ShardMap: ShardMapAdmin,
    TicketSequence: TicketAdmin,
    OperationRun: RunAdmin,
    TopologyVersion: TopologyAdmin,
}


def register_fleet(site: AdminSite) -> None:
    """Add the pages about shards, ticket servers, operations and the topology to ``site``.

    A second call changes nothing, because models that are already registered are skipped.
    ``django.contrib.admin.site`` has the pages if ``sharded_orm`` is installed. To remove pages
    from a site, call ``site.unregister()`` with the model of these pages, such as ``ShardMap``.
    """
    for model, model_admin in _PAGES.items():
        if not site.is_registered(model):
            site.register(model, model_admin)
