"""Reads call the methods that make instances as they are at the time of the read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import Model

from tests.photos.models import Person, Photo
from tests.queries.conftest import DATABASES, ONE
from tests.transparent_methods import TransparentMethod

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

READS: list[Callable[[], Any]] = [
    lambda: Photo.objects.get(user_id=ONE),
    lambda: list(Photo.objects.filter(user_id=ONE)),
    lambda: list(Photo.objects.scatter()),
    lambda: list(Photo.objects.filter(user_id=ONE).select_related("album")),
    lambda: list(Photo.objects.filter(user_id=ONE).only("title")),
    lambda: Person.objects.get(),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("owner", [Model, None])
@pytest.mark.parametrize("kind", ["classmethod", "staticmethod", "transparent", "init", "setattr"])
def test_a_method_that_is_replaced_after_a_plan_was_made_is_called(
    placed: None, monkeypatch: pytest.MonkeyPatch, read: Any, owner: Any, kind: str
) -> None:
    Photo.objects.create(user_id=ONE, title="a")
    Person.objects.create(username="a")
    for _ in range(3):
        read()
    calls: list[Any] = []
    model: Any = Person if read is READS[-1] else Photo
    original: Any = Model.from_db.__func__  # type: ignore[attr-defined]  # a classmethod

    def from_db(cls: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(cls)
        return original(cls, *args, **kwargs)

    if kind in {"init", "setattr"}:
        name = f"__{kind}__"
        method: Any = getattr(model, name)

        def replaced(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(type(self))
            method(self, *args, **kwargs)

        monkeypatch.setattr(owner or model, name, replaced, raising=False)
    else:
        replacement: Any = {
            "classmethod": classmethod(from_db),
            "staticmethod": staticmethod(lambda *args, **kwargs: from_db(model, *args, **kwargs)),
            "transparent": TransparentMethod(classmethod(original), calls.append),
        }[kind]
        monkeypatch.setattr(owner or model, "from_db", replacement, raising=False)
    calls.clear()
    for _ in range(3):
        read()
        assert calls
        calls.clear()
    monkeypatch.undo()
    read()
    assert not calls
