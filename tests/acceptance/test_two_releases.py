"""Two releases of the site work at once on a pair of servers, while the pair gets the newer schema."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.project import ROOT, Project
from tests.conftest import service_missing
from tests.patience import PATIENCE
from tests.services import ServiceMissing
from tests.services.demo_pair import demo_pair
from tests.services.memcached import MemcachedServer
from tests.services.replication import MasterPair, execute

pytestmark = pytest.mark.long

STEPS = ("migrate-passive", "compare", "switch", "migrate-other", "finish")
#: The default of the new field, which the rows of the old release get.
DEFAULT = "CC BY 4.0"

# Writes and reads photos until its input ends. Each old process writes titles of half of all photos,
# and each new one writes licences of half of them, so each value has one writer.
_WORK = """
import itertools, json, os, select, sys
from django.contrib.auth import get_user_model
from testproject.photos.models import Album, Photo
name = os.environ["RELEASE"]
is_new, half = name.startswith("new"), int(name[-1])
assert is_new is any(field.name == "licence" for field in Photo._meta.fields)
albums = {u: Album.objects.filter(owner=u)[0] for u in get_user_model().objects.exclude(username="admin")}
def tell(**values):
    print(json.dumps(values), flush=True)
users = itertools.cycle(albums)
for number in itertools.count():
    if select.select([sys.stdin], [], [], 0.02)[0]:  # leaves time for the operator
        break
    user = next(users)
    title, more = f"{name} {number}", {"licence": f"licence {number}"} if is_new and number % 2 else {}
    photo = Photo.objects.create(owner=user, album=albums[user], title=title, **more)
    tell(what="created", photo=photo.pk, title=title, **more)
    assert Photo.objects.get(owner=user, pk=photo.pk).title.startswith(title)
    for other in Photo.objects.filter(owner=user).order_by("-photo_id")[:4]:
        if other.pk % 2 != half or not other.title.startswith(("old", "new")):
            continue
        if is_new:
            licence = f"licence {number} of {name}"
            assert Photo.objects.filter(owner=user, pk=other.pk).update(licence=licence) == 1
            tell(what="licence", photo=other.pk, value=licence)
            assert Photo.objects.get(owner=user, pk=other.pk).licence == licence
        else:
            other.title += f", {number}"
            other.save()
            tell(what="title", photo=other.pk, value=other.title)
            assert Photo.objects.get(owner=user, pk=other.pk).title == other.title
"""
_READ = """
import json
from django.contrib.auth import get_user_model
from testproject.photos.models import Photo
names = [name for name in ("title", "licence") if any(f.name == name for f in Photo._meta.fields)]
print("read", json.dumps({
    photo.pk: [getattr(photo, name) for name in names]
    for user in get_user_model().objects.all()
    for photo in Photo.objects.filter(owner=user)
    if photo.title.startswith(("old", "new"))
}))
"""


class ReleaseProcess(threading.Thread):
    """A process of one release, and the writes that it has acknowledged."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(name=name, daemon=True)
        self.writes: list[dict[str, Any]] = []
        self._more = threading.Condition()
        self._has_ended = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [*command, "shell", "--no-imports", "-c", _WORK],
            cwd=ROOT,
            env={**environment, "RELEASE": name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._more:
                self.writes.append(json.loads(line))
                self._more.notify_all()
        with self._more:
            self._has_ended = True
            self._more.notify_all()

    def wait_for_more(self) -> None:
        """Return when the process has made ten writes from now on. It must not have ended."""
        with self._more:
            enough = len(self.writes) + 10
            self._more.wait_for(lambda: len(self.writes) >= enough or self._has_ended, PATIENCE)
            if len(self.writes) >= enough:
                return
        self.end()
        raise AssertionError(f"{self.name} has made {len(self.writes)} writes only")

    def end(self) -> None:
        """Let the process end. It must not have had an error."""
        # Not communicate(), because it would read lines that the thread is to read.
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait(PATIENCE)
        self.join()
        self._errors.seek(0)
        assert code == 0, self._errors.read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.join()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            file.close()


@dataclass(frozen=True)
class ReleaseSite:
    """The demo on a pair, with its old and its next release."""

    pair: MasterPair
    project: Project

    @property
    def old(self) -> list[str]:
        return [sys.executable, str(ROOT / "manage.py")]

    @property
    def new(self) -> list[str]:
        return [str(self.project.folder / "next_release" / "manage")]

    def manage(self, release: list[str], *arguments: str) -> str:
        """Run ``manage.py`` of a release, which must succeed. Return its output."""
        done = subprocess.run(
            [*release, *arguments],
            cwd=ROOT,
            env=self.project.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def read(self, release: list[str]) -> dict[int, list[str]]:
        """Return the values of all photos that the releases have written, as a process reads them."""
        output = self.manage(release, "shell", "--no-imports", "-c", _READ)
        photos = json.loads(output.partition("read ")[2])
        return {int(photo): values for photo, values in photos.items()}

    def rows(self, first: bool) -> dict[int, list[str]]:
        """Return the values of the same photos on one of the two servers."""
        server = self.pair.first if first else self.pair.second
        return {
            photo: values
            for number in range(16)
            for photo, *values in execute(
                server,
                f"SELECT photo_id, title, licence FROM demo_photos_{number:05d}.photos_photo"
                " WHERE title LIKE 'old%%' OR title LIKE 'new%%'",
            )
        }


@pytest.fixture
def site(memcached: MemcachedServer, tmp_path: Path) -> Iterator[ReleaseSite]:
    try:
        with demo_pair(tmp_path) as (pair, variables):
            variables["SHARDED_ORM_DEMO_MEMCACHED"] = f"127.0.0.1:{memcached.port}"
            project = Project("mariadb", tmp_path, variables)
            assert "The demo works." in project.manage("demo", "--check")
            yield ReleaseSite(pair, project)
    except ServiceMissing as exc:
        service_missing(exc)


def test_two_releases_work_during_a_rolling_upgrade(site: ReleaseSite) -> None:
    with ExitStack() as stack:
        processes: list[ReleaseProcess] = []

        def begin(release: str, command: list[str]) -> None:
            for number in (0, 1):
                process = ReleaseProcess(f"{release}{number}", command, site.project.environment)
                stack.callback(process.kill)
                processes.append(process)

        begin("old", site.old)
        for number, step in enumerate(STEPS * 2):
            for process in processes:
                process.wait_for_more()
            site.manage(site.new, "migrate_shards", "--rolling", "--until", step)
            if (number, step) == (7, "switch"):
                # The active side of each shard has the new schema.
                begin("new", site.new)
        assert "nothing to migrate" in site.manage(site.new, "migrate_shards", "--rolling")
        for process in processes:
            process.wait_for_more()
        for process in processes:
            process.end()
    writes = [write for process in processes for write in process.writes]
    expected = {
        write["photo"]: [write["title"], write.get("licence", DEFAULT)]
        for write in writes
        if write["what"] == "created"
    }
    for index, field in enumerate(("title", "licence")):
        for write in writes:
            if write["what"] == field:
                expected[write["photo"]][index] = write["value"]
    assert any(titles[0].startswith("old") and titles[1] != DEFAULT for titles in expected.values())
    site.pair.settle()
    assert site.rows(first=True) == expected
    assert site.rows(first=False) == expected
    assert site.read(site.new) == expected
    assert site.read(site.old) == {photo: [title] for photo, (title, _) in expected.items()}
    site.manage(site.new, "pairs", "check")
