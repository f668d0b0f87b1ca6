"""Checks of a sharded user model name a remedy that does not change apps of Django."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import AbstractBaseUser, PermissionsMixin
from django.db import models
from django.test import override_settings
from django.test.utils import isolate_apps

from sharded_orm.checks.relations import check_relations
from sharded_orm.models import ShardedModel

KEPT = "Keep the user model Member in the global database, and make a sharded profile for what is large"


@override_settings(AUTH_USER_MODEL="photos_app.Member")
@isolate_apps("tests.photos")
def test_relations_of_a_sharded_user_model_to_apps_of_django() -> None:
    class Member(ShardedModel, AbstractBaseUser, PermissionsMixin):
        number = models.BigIntegerField(primary_key=True)

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "photos"
            shard_key = "number"

    meta = type("Meta", (), {"app_label": "admin"})
    attrs: dict[str, Any] = {
        "__module__": "django.contrib.admin.models",
        "Meta": meta,
        "user": models.ForeignKey(Member, models.CASCADE),
    }
    entry = type("Entry", (models.Model,), attrs)

    class Order(models.Model):
        member = models.ForeignKey(Member, models.CASCADE)

        class Meta:
            app_label = "photos_app"

    permissions = list(check_relations(Member))
    assert {m.id for m in permissions} == {"sharded_orm.E008"}
    assert {m.hint for m in permissions} == {f"{KEPT}; or do without PermissionsMixin."}
    log = list(check_relations(entry))
    assert [m.id for m in log] == ["sharded_orm.E006", "sharded_orm.E007"]
    assert {m.hint for m in log} == {f"{KEPT}; or do without 'django.contrib.admin'."}
    own = list(check_relations(Order))
    assert [m.id for m in own] == ["sharded_orm.E006", "sharded_orm.E007"]
    for message in own:
        assert "on_delete=DO_NOTHING" in str(message.hint)
        assert "If 'tests.photos' is not an app of yours, keep the user model" in str(message.hint)
