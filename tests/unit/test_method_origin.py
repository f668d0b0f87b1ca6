"""Whose a method is, also if it claims to be another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from django.db.models import Model

from sharded_orm.method_origin import module_of
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.plans.stored_rows import SaveMethods
from tests.transparent_methods import TransparentMethod


@functools.wraps(Model.save)
def wrapped(*args: Any, **kwargs: Any) -> None:
    pass


transparent = TransparentMethod(Model.save, lambda row: None)


def test_a_method_is_of_the_module_that_defines_it() -> None:
    assert module_of(Model.save) == "django.db.models.base"


@pytest.mark.parametrize("replacement", [wrapped, transparent])
def test_a_replacement_is_not_taken_for_the_original(
    replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module_of(replacement) != "django.db.models.base"
    assert SaveMethods(ShardedModel)._are_known
    # Another package may replace it before this package is imported.
    monkeypatch.setattr(Model, "save", replacement)
    assert not SaveMethods(ShardedModel)._are_known
