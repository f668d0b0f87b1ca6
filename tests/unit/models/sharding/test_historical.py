"""Migrations of models that the code no longer has go to the databases of their tables."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from sharded_orm.routers import ShardRouter

RENAMING = """
from django.db import migrations

class Migration(migrations.Migration):
    operations = [
        migrations.RenameModel("Frame", "Picture"),
        migrations.SeparateDatabaseAndState(
            state_operations=[migrations.RenameModel("Picture", "Photo")]
        ),
        migrations.RenameModel("Poster", "Gone"),
        migrations.RenameModel("Writer", "Person"),
    ]
"""


@pytest.fixture
def renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "renaming_migrations"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "0002_rename.py").write_text(RENAMING)
    monkeypatch.syspath_prepend(str(tmp_path))
    with override_settings(MIGRATION_MODULES={"photos_app": "renaming_migrations"}):
        yield
    for name in [name for name in sys.modules if name.startswith("renaming_migrations")]:
        del sys.modules[name]


def allowed(model: str | None, app: str = "photos_app") -> dict[str, bool | None]:
    router = ShardRouter()
    return {
        alias: router.allow_migrate(alias, app, model)
        for alias in ("default", "photos_00001", "events_00001")
    }


ON_PHOTOS = {"default": False, "photos_00001": True, "events_00001": False}
GLOBAL = {"default": None, "photos_00001": False, "events_00001": False}


@pytest.mark.usefixtures("renaming")
def test_a_renamed_model_is_where_its_successor_is() -> None:
    assert allowed("frame") == allowed("picture") == allowed("photo") == ON_PHOTOS
    assert allowed("writer") == allowed("user") == GLOBAL


@pytest.mark.usefixtures("renaming")
def test_a_deleted_model_of_a_mixed_app_is_global_unless_it_is_named() -> None:
    assert allowed("poster") == allowed("never") == GLOBAL
    setting: dict[str, Any] = copy.deepcopy(settings.SHARDED_ORM)
    setting["GROUPS"]["events"]["FORMER_MODELS"] = ["photos_app.Poster"]
    with override_settings(SHARDED_ORM=setting):
        there = {"default": False, "photos_00001": False, "events_00001": True}
        assert allowed("poster") == there
        assert allowed("never") == GLOBAL
