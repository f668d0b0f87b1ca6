"""Commands about users, if the user model is sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.django_commands.test_every_command import (  # noqa: F401  # fixtures
    ROOT,
    Project,
    migrated,
    project,
)
from tests.integration.shards.conftest import sqlite_template  # noqa: F401  # a fixture

MODELS = """
from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.db import models

from sharded_orm.contrib.lookups import Lookup
from sharded_orm.models import ExactCharField, ShardedManager, ShardedModel


class MemberManager(BaseUserManager, ShardedManager):
    def create_superuser(self, password=None, **values):
        member = self.model(**values)
        member.set_password(password)
        member.save(using=self._db)
        return member


class Member(ShardedModel, AbstractBaseUser):
    number = models.BigIntegerField(primary_key=True)
    email = ExactCharField(max_length=100, unique=True)
    objects = MemberManager()

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS = ["number"]

    class ShardMeta:
        group = "photos"
        shard_key = "number"
        lookups = [Lookup("email", unique=True)]
"""
MIGRATION = """
from django.db import migrations, models
from sharded_orm.models import ExactCharField


class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel("Member", [
            ("number", models.BigIntegerField(primary_key=True, serialize=False)),
            ("password", models.CharField(max_length=128)),
            ("last_login", models.DateTimeField(blank=True, null=True)),
            ("email", ExactCharField(max_length=100, unique=True)),
        ], options={"abstract": False}),
    ]
"""


class Members(Project):
    """Members 1 and 2 are on the shards 1 and 2 of the group."""

    @property
    def variables(self) -> dict[str, str]:
        settings = "tests.integration.django_commands.settings_of_members"
        return {"DJANGO_SETTINGS_MODULE": settings, "PYTHONPATH": f"{self.folder}:{ROOT}"}

    def emails(self, number: int) -> list[str]:
        return [
            email for (email,) in self.sql("photos", number, "SELECT email FROM members_member")
        ]


@pytest.fixture
def members(project: Project) -> Members:  # noqa: F811
    folder: Path = project.folder
    for name, text in {
        "__init__.py": "",
        "models.py": MODELS,
        "migrations/__init__.py": "",
        "migrations/0001_initial.py": MIGRATION,
    }.items():
        (folder / "members" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "members" / name).write_text(text)
    fleet = Members(folder)
    fleet.manage_all("migrate -v0", "migrate_shards -v0 --group photos", "lookups build")
    return fleet


def create(members: Members, number: int, *arguments: str) -> tuple[int, str]:
    run = members.manage(
        "createsuperuser", "--noinput", "--email", f"{number}@example.org", "--number",
        str(number), *arguments,
    )  # fmt: skip
    assert "Traceback" not in run.err, run.err
    return run.code, run.err


def test_a_user_is_made_on_the_shard_of_its_key(members: Members) -> None:
    assert create(members, 1)[0] == 0
    assert create(members, 2, "--database", "photos")[0] == 0
    assert [members.emails(number) for number in (1, 2)] == [["1@example.org"], ["2@example.org"]]
    code, error = create(members, 1)
    assert code == 1
    assert "already taken" in error


def test_the_password_of_a_user_is_changed(members: Members) -> None:
    create(members, 1)
    changed = members.manage(
        "shell", "-c",
        "import getpass; from django.core.management import call_command;"
        "getpass.getpass = lambda **_: 'quite a secret';"
        "call_command('changepassword', '1@example.org');"
        "from members.models import Member;"
        "print(Member.objects.get(number=1).check_password('quite a secret'))",
    )  # fmt: skip
    assert changed.out.splitlines()[-1] == "True", changed.err
    nobody = members.manage("changepassword", "nobody")
    assert nobody.code == 1
    assert "user 'nobody' does not exist" in nobody.err


@pytest.mark.parametrize("alias", ["photos_00001", "events", "directory"])
def test_another_alias_is_refused(members: Members, alias: str) -> None:
    code, error = create(members, 1, "--database", alias)
    assert code == 1
    assert f"'{alias}' is not where users are" in error
    assert "leave --database out" in error
