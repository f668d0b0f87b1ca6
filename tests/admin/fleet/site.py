"""A client of a site over a fleet, which runs in a process of its own."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any

from tests.integration.shards.conftest import ROOT, Fleet
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

ADMIN = "/admin/sharded_orm"
MAP, FIND = f"{ADMIN}/shardmap/", f"{ADMIN}/shardmap/find/"
TICKETS, RUNS, TOPOLOGY = (
    f"{ADMIN}/{model}/" for model in ("ticketsequence", "operationrun", "topologyversion")
)


@dataclass
class Answer:
    status: int
    body: str
    location: str
    messages: list[str]
    seconds: float
    #: CPU seconds.
    busy: float
    queries: dict[str, list[str]]

    @property
    def text(self) -> str:
        """The text of the page, without tags and with single spaces."""
        content = re.sub(r"<(script|style|head).*?</\1>", " ", self.body, flags=re.DOTALL)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", content)).split())

    @property
    def links(self) -> list[str]:
        return [html.unescape(link) for link in re.findall(r'href="([^"]*)"', self.body)]

    def cells(self, state: str) -> list[str]:
        """The labels of the map's cells with that state."""
        return re.findall(rf'class="cell {state}" aria-label="([^"]*)"', self.body)

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A process that serves one request at a time, and keeps its connections, as a worker does."""

    def __init__(self, process: PythonProcess) -> None:
        self._process = process

    def get(self, path: str, user: str | None = "boss") -> Answer:
        return self._request(path, user, None)

    def post(self, path: str, user: str | None = "boss", csrf: bool = False, **data: str) -> Answer:
        return self._request(path, user, data, csrf=csrf)

    def run(self, code: str) -> Any:
        """Run ``code`` in the process; return its variable ``result``."""
        return self._ask(code=code)["result"]

    def user(self, name: str, *permissions: str) -> str:
        """Create a staff user with these permissions, such as ``view_shardmap``; return the name."""
        self.run(
            "from django.contrib.auth.models import Permission, User\n"
            f"user, _ = User.objects.get_or_create(username={name!r}, is_staff=True)\n"
            f"granted = Permission.objects.filter(codename__in={permissions!r})\n"
            f"assert len(granted) == {len(permissions)}, granted\n"
            "user.user_permissions.set(granted)"
        )
        return name

    def _request(
        self, path: str, user: str | None, data: dict[str, str] | None, **more: Any
    ) -> Answer:
        return Answer(**self._ask(path=path, user=user, data=data, **more))

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the site has died"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer


@contextmanager
def serving(fleet: Fleet, **environment: str) -> Iterator[Site]:
    """Start the site over ``fleet``."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTEST_"))}
    process = PythonProcess(
        ["-m", "tests.admin.fleet.served"],
        cwd=ROOT,
        env={
            **inherited,
            "FLEET_FOLDER": str(fleet.folder),
            "FLEET_PREFIX": fleet.prefix,
            **fleet.environment,
            **environment,
        },
        stdin=PIPE,
        stderr=None,
    )
    try:
        yield Site(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE)
        process.stdout.close()
