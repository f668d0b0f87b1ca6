from __future__ import annotations

import pytest

from tests.integration.references.site import Site


def test_declarations_that_cannot_have_copies_are_refused(site: Site) -> None:
    site.run(
        """
from django.contrib.contenttypes.models import ContentType
from django.test.utils import isolate_apps
from sharded_orm import on_delete
from sharded_orm.contrib.references.declaration import problems_of

def sharded(**fields):
    meta = type("ShardMeta", (), {"group": "books", "shard_key": "owner_id"})
    return type("Owned", (ShardedModel,), {
        "__module__": "tests.integration.references.geo.models", "owner_id": BigIntegerField(),
        "ShardMeta": meta, **fields})

def reference(name="Kind", bases=(ReferenceModel,), **fields):
    return type(name, bases, {"__module__": "tests.integration.references.geo.models", **fields})

def problems(model):
    return [number for number, _, _ in problems_of(model)]

def declare(test):
    with isolate_apps("tests.integration.references.geo"):
        return test()

def inherits():
    parent = reference()
    reference("Child", (parent,))
    return problems(parent)

assert declare(inherits) == ["E002"]
assert declare(lambda: problems(reference(pk=CompositePrimaryKey("a", "b"), a=IntegerField(), b=IntegerField()))) == ["E003"]
assert declare(lambda: problems(reference(type=ForeignKey(ContentType, CASCADE)))) == ["E004"]
assert declare(lambda: problems(reference(type=ForeignKey(ContentType, CASCADE, db_constraint=False)))) == []

def refers(**options):
    other = reference("Other")
    return problems(reference(other=ForeignKey(other, **options)))

assert declare(lambda: refers(on_delete=SET_NULL, null=True)) == ["E005"]
assert declare(lambda: refers(on_delete=CASCADE, null=True)) == ["E005"]
assert declare(lambda: refers(on_delete=CASCADE)) == []

def is_referred_to(**options):
    kind = reference(code=CharField(max_length=5, unique=True))
    sharded(kind=ForeignKey(kind, on_delete.PROTECT, **options))
    return problems(kind)

assert declare(is_referred_to) == []
assert declare(lambda: is_referred_to(db_constraint=False)) == ["E006"]
assert declare(lambda: is_referred_to(to_field="code")) == ["E007"]
"""
    )


@pytest.mark.long
def test_the_global_database_needs_the_backend_with_hooks(site: Site) -> None:
    site.content["databases"]["default"]["ENGINE"] = "django.db.backends.sqlite3"
    site.save()
    done = site.manage("check", code=1)
    assert "sharded_orm_references.E001" in done.err
    site.run(
        "from django.apps import apps\n"
        'assert refused(InvalidReferenceModel, apps.get_app_config("sharded_orm_references").ready)\n'
        'assert refused(InvalidReferenceModel, lambda: Country.objects.create(name="x", code="x"))'
    )


def test_in_a_test_case(site: Site) -> None:
    site.run(
        """
import unittest
from django.test import TestCase

class Case(TestCase):
    databases = "__all__"

    @classmethod
    def setUpTestData(cls):
        with cls.captureOnCommitCallbacks(execute=True):
            cls.france = Country.objects.create(name="France", code="FR")

    def test_refer(self):
        Photo.objects.create(owner_id=1, title="a", country=self.france)
        assert Photo.objects.get(owner_id=1, country__name="France").country_id == self.france.pk
        assert refused(ProtectedError, self.france.delete)

    def test_delete(self):
        self.france.delete()
        assert not Country.objects.exists() and not QuerySet(Country, using="books_00001").exists()

result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))
assert result.wasSuccessful()
assert not Country.objects.exists() and not differences()
"""
    )


def test_forms(site: Site) -> None:
    site.run(
        """
from django import forms
france = Country.objects.create(name="France", code="FR")
photo = Photo.objects.create(owner_id=1, title="a", country=france)

class PhotoForm(forms.ModelForm):
    class Meta:
        model = Photo
        fields = ["owner_id", "title", "country"]

greece = Country.objects.create(name="Greece", code="GR")
form = PhotoForm({"owner_id": 1, "title": "b", "country": greece.pk}, instance=photo)
assert [label for _, label in form.fields["country"].choices][1:] == ["France", "Greece"]
assert form.is_valid(), form.errors
form.save()
assert Photo.objects.get(owner_id=1, country__code="GR").title == "b"
form = PhotoForm({"owner_id": 1, "title": "b", "country": 99}, instance=photo)
assert "country" in form.errors
"""
    )


def test_fields_of_a_mirror_are_made_from_its_source(site: Site) -> None:
    site.run(
        """
from django.test.utils import isolate_apps
from sharded_orm.contrib.mirrors.exceptions import InvalidMirror

def described(model):
    return [(f.attname, type(f).__name__, f.null, f.primary_key, f.unique) for f in model._meta.concrete_fields]

assert described(WrittenRemark) == [
    ("remark_id", "BigIntegerField", False, True, True),
    ("photo_id", "BigIntegerField", False, False, False),
    ("country_id", "BigIntegerField", True, False, False),
    ("text", "CharField", False, False, False),
]
assert WrittenRemark._meta.get_field("text").max_length == 50
assert [name for name, *_ in described(PhotoOfVisa)] == [f.attname for f in Photo._meta.concrete_fields]
assert not PhotoOfVisa._meta.get_field("visa_id").null and PhotoOfVisa._meta.get_field("country_id").null

france = Country.objects.create(name="France", code="FR")
visa = Visa.objects.create(name="v")
photo = Photo.objects.create(owner_id=1, title="a", country=france, visa=visa)
Photo.objects.create(owner_id=2, title="not in the mirror", country=france)
Remark.objects.create(owner_id=1, photo=photo, country=france, text="x")
Photo.objects.filter(owner_id=1).update(title="b")
assert list(WrittenRemark.objects.filter(photo_id=photo.pk).values_list("country_id", "text")) == [(france.pk, "x")]
assert PhotoOfVisa.objects.get(visa_id=visa.pk).title == "b"
assert PhotoOfVisa.objects.scatter().count() == 1
visa.delete()
assert not PhotoOfVisa.objects.scatter().exists() and not WrittenRemark.objects.scatter().exists()

def mirror(**meta):
    with isolate_apps("tests.integration.references.geo"):
        meta = {"group": "books", "shard_key": "owner_id", **meta}
        return type("Copied", (ShardedModel,), {
            "__module__": "tests.integration.references.geo.models", "ShardMeta": type("ShardMeta", (), meta)})

for meta, text in (
    ({"mirror_of": "geo.Later"}, "not loaded yet"),
    ({"mirror_of": "geo.Photo", "fields": ["nothing"]}, "names ['nothing']"),
    ({"mirror_of": "geo.Photo", "fields": "title"}, "must be a list"),
):
    assert text in refused(InvalidMirror, lambda: mirror(**meta))[1]
"""
    )
