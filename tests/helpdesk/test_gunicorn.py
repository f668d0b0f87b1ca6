"""gunicorn with ``preload_app``: two workers, forked from a process that has used the project."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.http import HttpRequest, JsonResponse
from django.urls import path
from gunicorn.app.base import BaseApplication

from sharded_orm.models.sharding.bound_key import is_any_bound
from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case, Tag
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer

# A worker is a fork, which has no part in the databases in memory.
pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

WORKERS = 2
#: Lets a request wait until each worker has one.
everyone = multiprocessing.get_context("fork").Barrier(WORKERS)


def sessions(*aliases: str) -> list[tuple[str, int]]:
    """The server's number of each connection."""
    numbers = []
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT @@port, CONNECTION_ID()")
            numbers.append(cursor.fetchone())
    return numbers


def close_stock_connections() -> None:
    """Close the connections of Django's own backend, which are not to be taken into a fork."""
    for alias in ("directory", "tickets_1", "tickets_2"):
        connections[alias].close()


# -- The site ------------------------------------------------------------------------------


def keys_of(request: HttpRequest) -> dict[str, Any] | None:
    tenant = request.headers.get("X-Tenant")
    return {"tenant": int(tenant)} if tenant else None


def bound_view(request: HttpRequest) -> JsonResponse:
    """Work for the tenant that is bound, while the other worker does the same."""
    everyone.wait(PATIENCE)
    tags = [Tag.objects.create(name=uuid4().hex) for _ in range(30)]
    cases = [
        Case.objects.get(pk=pk).subject for pk in request.GET.getlist("case") for _ in range(9)
    ]
    return JsonResponse(
        {
            "worker": os.getpid(),
            "ids": [tag.pk for tag in tags],
            "tenants": list(Tag.objects.order_by().values_list("tenant", flat=True).distinct()),
            "cases": cases,
            "sessions": sessions("default", tags[0]._state.db),
        }
    )


def free_view(request: HttpRequest) -> JsonResponse:
    everyone.wait(PATIENCE)
    return JsonResponse(
        {"worker": os.getpid(), "is bound": is_any_bound(), "tenant": Tag().tenant_id}
    )


def rename_view(request: HttpRequest, tenant: int, case: int) -> JsonResponse:
    row = Case.objects.get(tenant=tenant, pk=case)
    row.subject = "Renamed"
    row.save()
    return JsonResponse({})


urlpatterns = [
    path("bound/", bound_view),
    path("free/", free_view),
    path("rename/<int:tenant>/<int:case>/", rename_view),
]


class Site(BaseApplication):
    """gunicorn, as ``gunicorn --preload --workers 2`` starts it."""

    def __init__(self, listener: socket.socket, log: Path, tenants: list[int]) -> None:
        self._listener, self._log, self._tenants = listener, log, tenants
        super().__init__()

    def load_config(self) -> None:
        values = {
            "bind": f"fd://{self._listener.fileno()}",
            "workers": WORKERS,
            "preload_app": True,
            "when_ready": lambda server: close_stock_connections(),
            "errorlog": str(self._log),
            "timeout": int(PATIENCE),
        }
        for name, value in values.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        # The process that forks the workers has connections, ids and a client of the cache.
        # (It asks no other shards: test shards are made at their first use, once in a process.)
        assert all(Case.objects.filter(tenant=tenant).exists() for tenant in self._tenants)
        return get_wsgi_application()


@pytest.fixture
def memcached() -> Iterator[MemcachedServer]:
    with MemcachedServer() as server:
        yield server


@pytest.fixture
def site(
    desk: Desk, other: Desk, memcached: MemcachedServer, settings: Any, tmp_path: Path
) -> Iterator[str]:
    """The address of the site. It is forked from this process, which has open connections, too."""
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "BOUND_KEY": f"{__name__}.keys_of"}
    settings.CACHES = {"default": memcached.django()}
    settings.MIDDLEWARE = ["sharded_orm.middleware.BoundKeyMiddleware"]
    settings.ROOT_URLCONF = __name__
    for owner in (desk, other):
        case = owner.case(f"Case of {owner.tenant}")
        assert Case.objects.get(tenant=owner.tenant, pk=case.pk) == case
    close_stock_connections()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        pid = os.fork()
        if pid == 0:
            try:
                Site(listener, tmp_path / "gunicorn.log", [desk.tenant.pk, other.tenant.pk]).run()
            finally:
                os._exit(0)
        yield "http://{}:{}".format(*listener.getsockname())
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def test_workers_share_nothing_that_belongs_to_one_process(
    desk: Desk, other: Desk, site: str
) -> None:
    own_sessions = sessions("default", desk.tag._state.db, other.tag._state.db)
    ids = [desk.tag.pk, other.tag.pk]

    def get(address: str, tenant: int | None = None) -> dict[str, Any]:
        headers = {"X-Tenant": str(tenant)} if tenant else {}
        with urlopen(Request(site + address, headers=headers), timeout=PATIENCE) as answer:
            return json.load(answer)

    def get_from_both(address: str, tenant: int | None = None) -> list[dict[str, Any]]:
        """Two requests at the same time, one for each worker."""
        with ThreadPoolExecutor(WORKERS) as pool:
            pages = list(pool.map(get, [address] * WORKERS, [tenant] * WORKERS))
        assert len({page["worker"] for page in pages} - {os.getpid()}) == WORKERS
        return pages

    for owner in (desk, other):
        pages = get_from_both(f"/bound/?case={owner.tenant.cases.get().pk}", owner.tenant.pk)
        opened = [{*map(tuple, page["sessions"])} for page in pages]
        assert not opened[0] & opened[1]
        assert not (opened[0] | opened[1]) & {*own_sessions}
        for page in pages:
            assert page["tenants"] == [owner.tenant.pk]
            assert set(page["cases"]) == {f"Case of {owner.tenant}"}
            ids += page["ids"]
        # The next requests of the workers are not bound.
        for page in get_from_both("/free/"):
            assert (page["is bound"], page["tenant"]) == (False, None)
    ids += [Tag.objects.create(tenant=desk.tenant, name=f"here {n}").pk for n in range(5)]
    assert len(ids) == len(set(ids))

    # What one worker writes, both show; and so does this process, whose connections still work.
    case = desk.tenant.cases.get()
    get(f"/rename/{desk.tenant.pk}/{case.pk}/")
    for page in get_from_both(f"/bound/?case={case.pk}", desk.tenant.pk):
        assert set(page["cases"]) == {"Renamed"}
    assert Case.objects.get(tenant=desk.tenant, pk=case.pk).subject == "Renamed"
    assert sessions("default", desk.tag._state.db, other.tag._state.db) == own_sessions
