"""An ASGI server: uvicorn, with requests of two tenants at the same time."""

from __future__ import annotations

import gc
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest
import uvicorn
from django.core.asgi import get_asgi_application

from tests.helpdesk.conftest import DATABASES, Desk
from tests.patience import PATIENCE

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a uvicorn that runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(get_asgi_application(), lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield "http://{}:{}".format(*listener.getsockname())
        server.should_exit = True
        thread.join(PATIENCE)
    # The connections of the server's threads end here, and not during a later test.
    gc.collect()


# Django's SQLite backend closes no connection to a database in memory; Python 3.13 warns of that.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_async_and_sync_views(desk: Desk, other: Desk, server: str) -> None:
    expected = {}
    for owner, count in ((desk, 3), (other, 1)):
        for number in range(count):
            owner.case(f"{number} of {owner.tenant}")
        subjects = [f"{number} of {owner.tenant}" for number in range(min(count, 2))]
        expected[owner.tenant.pk] = {"count": count, "subjects": subjects}

    def get(owner: Desk, rest: str) -> str:
        cookie = owner.client.cookies["sessionid"].value
        request = Request(server + owner.url(rest), headers={"Cookie": f"sessionid={cookie}"})
        with urlopen(request, timeout=PATIENCE) as answer:
            return answer.read().decode()

    owners = [desk, other] * 4
    with ThreadPoolExecutor(4) as pool:
        overviews = list(pool.map(lambda owner: get(owner, "overview/"), owners))
        pages = list(pool.map(lambda owner: get(owner, ""), owners))
    for owner, overview, page in zip(owners, overviews, pages, strict=True):
        assert json.loads(overview) == expected[owner.tenant.pk]
        assert f"{expected[owner.tenant.pk]['count']} cases" in page
        assert f"0 of {owner.tenant}" in page
