"""``manage.py demo --check`` on empty databases, and once more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.project import BACKENDS, VARIABLES, Project, project_on


@pytest.fixture(scope="module", params=BACKENDS)
def shown(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[Project, str]]:
    """A site on which the demo has run once, and its output."""
    folder = tmp_path_factory.mktemp("demo") / "site"
    with project_on(request.param, request, folder) as project:
        yield project, project.manage("demo", "--check")


def test_the_demo_works_and_keeps_what_is_there(shown: tuple[Project, str]) -> None:
    project, first = shown
    assert "The demo works." in first
    made = r"sample content: 12 users, 150 photos, \d+ tags and \d+ comments made"
    assert re.search(made, first)
    assert re.search(r"sample boards: \d+ pins made", first)
    assert re.search(r"admin login admin / \S{8,}", first)

    second = project.manage("demo", "--check")
    assert "sample content: there already" in second
    assert "sample boards: there already" in second
    # Both runs visited the pages of the same photo.
    assert _pages(second) == _pages(first)
    assert ", 0 differ." in project.manage("mirrors", "check")


@pytest.mark.long_on("mariadb")  # The same code on each backend.
def test_the_demo_with_its_debug_panel(shown: tuple[Project, str]) -> None:
    project, first = shown
    debugged = Project(project.backend, project.folder, dict(project.variables))
    debugged.variables["SHARDED_ORM_DEMO_DEBUG"] = "1"
    output = debugged.manage("demo", "--check")
    assert [page for page in _pages(output) if page not in _pages(first)] == []
    assert len(_pages(output)) == len(_pages(first)) + 1
    # Never on an address that others can reach.
    assert _pages(debugged.manage("demo", "--check", "--host", "0.0.0.0")) == _pages(first)


# Writes two comments. Each is committed on the shard of the photo's owner. The author's shard does not
# answer for the first; the process dies before the second one gets there.
_DYING = """
import os, signal
from django.contrib.auth import get_user_model
from django.db import OperationalError
from sharded_orm import runtime
from sharded_orm.contrib.mirrors import delivery
from testproject.photos.models import Comment, Photo
photo = Photo.objects.scatter().order_by("photo_id").first()
for author in get_user_model().objects.exclude(pk=photo.owner_id):
    second = runtime.locate("photos", author.pk)
    if second is not None and second.alias != photo.shard_alias:
        break
def fail(*ignored):
    raise OperationalError("the connection is lost")
def die(*ignored):
    os.kill(os.getpid(), signal.SIGKILL)
for write in (fail, die):
    delivery.write_rows = write
    print(write.__name__, flush=True)
    Comment.objects.create(owner_id=photo.owner_id, photo=photo, author=author, text="Half of it")
"""
_SIDES = """
from testproject.photos.models import Comment, WrittenComment
for model in (Comment, WrittenComment):
    print(model.objects.scatter().filter(text="Half of it").count())
"""


def test_a_comment_that_its_author_does_not_have_yet(shown: tuple[Project, str]) -> None:
    project, _ = shown

    def run(code: str, fails: bool = False) -> list[str]:
        return project.manage("shell", "--no-imports", "-c", code, fails=fails).split()

    said = run(_DYING, fails=True)
    assert (said[0], said[-1]) == ("fail", "die")
    # A warning about a comment that the user believes to be stored.
    assert "reaches its mirrors later, by a relay" in " ".join(said)
    assert run(_SIDES) == ["2", "0"]
    assert "2 not delivered yet" in project.manage("mirrors", "check")
    assert ", 0 failed" in project.manage("mirrors", "relay", "--once")
    assert run(_SIDES) == ["2", "2"]
    assert ", 0 differ." in project.manage("mirrors", "check")


_STATUSES = """
from django.contrib.auth import get_user_model
from django.test import Client
from sharded_orm import runtime
client = Client()
front = client.get("/")
print("said everybody", front.status_code, client.get("/tags/").status_code)
print("said", b"cannot be shown" in front.content, b"srcset" in front.content)
for user in get_user_model().objects.exclude(username="admin"):
    page = client.get(f"/photos/{user.username}/")
    print("said", runtime.locate("photos", user.pk).node, page.status_code)
"""


def test_pages_while_a_node_is_down(shown: tuple[Project, str]) -> None:
    project, _ = shown
    if project.backend == "sqlite":
        pytest.skip("files are not down")
    variable = VARIABLES[project.backend]
    first, second = json.loads(project.variables[variable])
    servers = json.dumps([first, {**second, "port": 1}])  # nobody listens there
    # With DEBUG, too: connection objects have passwords in their variables, and a traceback shows
    # variables.
    variables = {
        **project.variables,
        variable: servers,
        "SHARDED_ORM_DEMO_DEBUG": "1",
    }
    half = Project(project.backend, project.folder, variables)
    output = half.manage("shell", "--no-imports", "-c", _STATUSES)
    said = re.findall("^said (.*)", output, re.MULTILINE)
    assert said[:2] == ["everybody 200 200", "True True"]
    assert set(said[2:]) == {"node_1 200", "node_2 503"}


def _pages(output: str) -> list[str]:
    return re.findall(r"(?:GET|POST) .*", output)
