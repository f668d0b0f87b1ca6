"""Checks of the settings of other packages."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.checks.packages import check_cacheops, check_packages
from tests.photos.models import Person, Photo


@pytest.mark.parametrize(
    ("profile", "is_wrong"),
    [
        (None, False),
        ({"ops": ()}, True),
        ({"db_agnostic": True}, True),
        ({"db_agnostic": False}, False),
    ],
)
def test_cacheops_keeps_the_shards_apart(profile: dict[str, Any] | None, is_wrong: bool) -> None:
    models = [Photo, Photo.tags.through, Person]
    found = list(check_cacheops(models, lambda model: profile))
    assert [message.obj for message in found] == (models[:2] if is_wrong else [])
    assert all(message.id == "sharded_orm.E082" and message.hint for message in found)


def test_packages_that_are_not_installed_are_not_checked() -> None:
    assert check_packages() == []
