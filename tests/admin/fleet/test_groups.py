"""Users who may look into some groups only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_orm import conf
from sharded_orm.exceptions import InvalidConfiguration
from tests.admin.fleet.site import FIND, MAP, RUNS, TOPOLOGY, Site, serving
from tests.integration.shards.conftest import Fleet

FLEET = ("view_shardmap", "change_shardmap", "view_operationrun", "view_topologyversion")


@pytest.fixture(scope="module")
def restricted(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("restricted") / "fleet"
    shutil.copytree(sqlite_template, folder)
    with serving(Fleet(folder), FLEET_SETTING='{"ADMIN": {"GROUP_PERMISSIONS": true}}') as made:
        yield made


def test_a_group_that_is_not_permitted_is_not_seen(restricted: Site) -> None:
    user = restricted.user("limited", "access_photos", *FLEET)
    page = restricted.get(MAP, user)
    assert len(page.cells("current")) == 8
    assert "events" not in page.text and "pins" not in page.text
    assert restricted.get(f"{MAP}?group=events", user).messages == ["There is no group 'events'."]
    for path in ("shard/events_00000/", "range/events/0-0/", "range/nothing/0-0/"):
        assert restricted.get(MAP + path, user).status == 403
    assert restricted.post(f"{MAP}range/events/0-0/set/", user, do="open").status == 403
    assert restricted.get(f"{FIND}?model=Event&value=x", user).status == 403
    assert "Event" not in restricted.get(FIND, user).text
    assert restricted.get(f"{MAP}shard/photos_00003/", user).status == 200
    runs = restricted.get(RUNS, user).text
    assert "migrate photos" in runs and "migrate events" not in runs
    (other,) = restricted.run(
        "from sharded_orm.models import OperationRun\n"
        "result = list(OperationRun.objects.filter(subject='events').values_list('pk', flat=True))"
    )
    assert restricted.get(f"{RUNS}{other}/change/", user).status == 404
    assert restricted.get(TOPOLOGY, user).status == 200


def test_a_user_without_any_group_sees_an_empty_map(restricted: Site) -> None:
    page = restricted.get(MAP, restricted.user("nobody", *FLEET))
    assert page.status == 200
    assert "There are no shards that you may look at." in page.text


def test_superusers_see_all(restricted: Site) -> None:
    assert len(restricted.get(MAP).cells("current")) == 18


def test_permissions_are_made_once(restricted: Site) -> None:
    names = restricted.run(
        "from django.core.management import call_command\n"
        "from django.contrib.auth.models import Permission\n"
        "call_command('migrate', database='default', verbosity=0)\n"
        "found = Permission.objects.filter(codename__startswith='access_').order_by('codename')\n"
        "result = [f'{one.content_type.model} {one.codename}: {one.name}' for one in found]"
    )
    assert names == [
        f"shardmap access_{name}: Can access shards of {name}"
        for name in ("archive", "events", "photos", "pins", "visits")
    ]


def test_without_the_setting_there_are_none(site: Site) -> None:
    assert not site.run(
        "from django.contrib.auth.models import Permission\n"
        "result = Permission.objects.filter(codename__startswith='access_').exists()"
    )
    user = site.user("plain", "view_shardmap")
    assert len(site.get(MAP, user).cells("current")) == 18


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ([], "ADMIN must be a dict, not list"),
        ({"PERMISSIONS": True}, "ADMIN: unknown key 'PERMISSIONS'; valid keys are"),
        ({"GROUP_PERMISSIONS": "no"}, "ADMIN: GROUP_PERMISSIONS must be True or False, not 'no'"),
    ],
)
def test_a_wrong_setting_is_refused(setting: object, problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match=problem):
        conf.parse({"ADMIN": setting})


def test_a_group_without_a_possible_permission_is_refused() -> None:
    group = {
        "STRATEGY": "modulo",
        "RANGES": [{"range": (0, 0), "primary": "one"}],
    }
    setting = {
        "NODES": {"one": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "/one"}},
        "GROUPS": {"g" * 94: group},
        "ADMIN": {"GROUP_PERMISSIONS": True},
    }
    with pytest.raises(InvalidConfiguration, match="more than 93 characters"):
        conf.parse(setting)
    assert conf.parse({**setting, "GROUPS": {"g" * 93: group}}).admin.group_permissions
