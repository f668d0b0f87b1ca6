"""Tasks that a worker runs."""

from __future__ import annotations

from celery import shared_task
from django.db import connections
from django.test.utils import CaptureQueriesContext

from sharded_orm import cache_scope
from tests.helpdesk.models import Case, Message


@shared_task
def close_case(tenant: int, case: int, text: str) -> int:
    """Close a case with a last message; return the id of the message."""
    row = Case.objects.get(tenant=tenant, pk=case)
    row.status = Case.Status.CLOSED
    row.save()
    return row.messages.create(tenant_id=tenant, text=text).pk


@shared_task
def fail(tenant: int) -> None:
    Message.objects.filter(tenant=tenant).count()
    raise ValueError("as asked")


def _read_twice(tenant: int, case: int) -> int:
    """Return the number of queries."""
    with CaptureQueriesContext(connections["helpdesk"]) as queries:
        for _ in range(2):
            Case.objects.get(tenant=tenant, pk=case)
    return len(queries)


read_twice = shared_task(name="read_twice")(_read_twice)
read_twice_in_scope = shared_task(name="read_twice_in_scope")(cache_scope()(_read_twice))


@shared_task
def open_connections() -> list[str]:
    """The aliases of this thread that have a database session."""
    aliases = [c.alias for c in connections.all(initialized_only=True) if c.connection]
    shards = connections["helpdesk"].shards
    return aliases + [c.alias for c in shards if c.connection is not None]
