from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.postgres.fields import ArrayField
from django.db import connections, models
from django.test.utils import isolate_apps

from sharded_orm.models.plans.instances import InstanceLoader


@isolate_apps("tests.samples")
@pytest.mark.parametrize(
    "name", ["title", "class", "größe", "ﬁle", "a__b", "__debug__", "two words"]
)
def test_instances_are_those_of_from_db(name: str) -> None:
    class Named(models.Model):
        locals()[name] = models.TextField()

        class Meta:
            app_label = "samples"

    rows = [(1, "a"), (2, "b")]
    loader = InstanceLoader(Named, connections["default"])
    for names, width in ((None, 2), (("id",), 1)):
        loader = InstanceLoader(Named, connections["default"], names)
        values = [row[:width] for row in rows]
        queryset = Named.objects.all()
        instances = loader.instances(values, queryset, ["one", "two"])
        # Querysets of Django 6.1 pass their fetch mode.
        mode = {"fetch_mode": queryset._fetch_mode} if hasattr(queryset, "_fetch_mode") else {}
        expected = [
            Named.from_db(alias, loader.names, row, **mode)
            for alias, row in zip(("one", "two"), values, strict=True)
        ]
        for instance, other in zip(instances, expected, strict=True):
            states = [each.__dict__ for each in (instance._state, other._state)]
            assert states[0] == states[1]
            attributes = [{**each.__dict__, "_state": None} for each in (instance, other)]
            assert attributes[0] == attributes[1]
            assert list(attributes[0]) == list(attributes[1])
            assert instance.get_deferred_fields() == other.get_deferred_fields()
    with pytest.raises(ValueError, match="has not 1 values"):
        loader.instances(rows, Named.objects.all())


class Shouted(models.TextField):
    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return value.upper()


@isolate_apps("tests.samples")
@pytest.mark.parametrize(
    ("field", "is_own", "is_observed"),
    [
        (models.JSONField(), False, False),
        (models.JSONField(decoder=json.JSONDecoder), False, True),
        (Shouted(), True, True),
        (ArrayField(models.TextField()), False, False),
        (ArrayField(ArrayField(models.JSONField())), False, False),
        (ArrayField(models.JSONField(decoder=json.JSONDecoder)), False, True),
        (ArrayField(ArrayField(Shouted())), True, True),
    ],
)
def test_converters_that_call_code_of_a_project(
    field: models.Field[Any, Any], is_own: bool, is_observed: bool
) -> None:
    """The converter of an array calls that of its values."""

    class Holder(models.Model):
        value = field

        class Meta:
            app_label = "samples"

    loader = InstanceLoader(Holder, connections["default"])
    assert (loader.serves_others, loader.is_unobserved()) == (not is_own, not is_observed)
