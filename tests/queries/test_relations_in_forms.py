"""Relations in forms and formsets outside of the admin: rows of one shard key."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
from django import forms
from django.contrib.contenttypes.forms import generic_inlineformset_factory
from django.db import models, transaction
from django.forms import inlineformset_factory, modelform_factory, modelformset_factory
from django.test import TestCase
from django.test.utils import isolate_apps

from sharded_orm import bound
from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.models import ShardedModel
from tests.photos.models import Album, Person, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO, UNPLACED
from tests.relatives.sharded.models import Agent, Cover, Item, Label, Note, Shelf
from tests.twins.models import Tree, Trunk, Twig

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

OTHER_KEYS = pytest.mark.parametrize("key", [NEAR, TWO])
NOT_OFFERED = "is not one of the available choices"

assert_queries = TestCase().assertNumQueries


@pytest.fixture
def tags(placed: None) -> dict[int, Tag]:
    for key in (*SHARD, UNPLACED):
        Person.objects.create(pk=key, username=f"person {key}")
    # Each shard counts its own ids, so give ids that differ.
    return {key: Tag.objects.create(id=10 + key, user_id=key, name=f"tag {key}") for key in SHARD}


class _AllTags(forms.ModelForm):  # type: ignore[type-arg]  # generic in the stubs only
    """Offers tags of all keys."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tags: Any = self.fields["tags"]
        tags.queryset = Tag.objects.scatter()


PhotoForm = modelform_factory(Photo, _AllTags, fields=["title", "tags"])
# The field of the key comes after that of the tags.
WithKey = modelform_factory(Photo, _AllTags, fields=["title", "tags", "user_id"])


def _new(key: int) -> Photo:
    return Photo(user_id=key)


def _stored(key: int) -> Photo:
    return Photo.objects.create(user_id=key, title="old")


@OTHER_KEYS
@pytest.mark.parametrize("photo_of", [_new, _stored])
def test_a_tag_of_another_key_is_an_error_of_the_field(
    tags: dict[int, Tag], photo_of: Callable[[int], Photo], key: int
) -> None:
    data = {"title": "new", "tags": [tags[ONE].pk, tags[key].pk]}
    form = PhotoForm(data, instance=photo_of(ONE))
    assert list(form.errors) == ["tags"]
    assert f"{tags[key].pk} {NOT_OFFERED}" in str(form.errors["tags"])
    assert not Photo.objects.scatter().filter(title="new").exists()
    form = PhotoForm({**data, "tags": [tags[ONE].pk]}, instance=photo_of(ONE))
    assert list(form.save().tags.all()) == [tags[ONE]]


@OTHER_KEYS
def test_a_field_that_the_form_declares_has_to_name_its_rows(
    tags: dict[int, Tag], key: int
) -> None:
    class Declared(PhotoForm):  # type: ignore[valid-type, misc]  # it is a class
        tags = forms.ModelMultipleChoiceField(Tag.objects.none())

    form = Declared({"title": "new", "tags": [tags[key].pk]}, instance=_new(ONE))
    with transaction.atomic("photos"), pytest.raises(CrossShardRelation, match="tag"):
        form.save()
    assert not Photo.tags.through.objects.scatter().exists()


@pytest.mark.parametrize("key", [NEAR, TWO, UNPLACED])
def test_a_key_that_the_form_sets(tags: dict[int, Tag], key: int) -> None:
    data = {"title": "new", "user_id": key, "tags": [tags[ONE].pk]}
    assert list(WithKey(data).errors) == ["tags"]
    form = WithKey({**data, "user_id": ONE})
    assert list(form.save().tags.all()) == [tags[ONE]]


@OTHER_KEYS
def test_a_formset(tags: dict[int, Tag], key: int) -> None:
    photo = _stored(ONE)
    rows = Photo.objects.filter(user_id=ONE)
    photos = modelformset_factory(Photo, PhotoForm, extra=0)
    data = {
        **_management("form", 1, initial=1),
        "form-0-photo_id": photo.pk,
        "form-0-title": "new",
        "form-0-tags": [tags[key].pk],
    }
    formset = photos(data, queryset=rows)
    (errors,) = formset.errors
    assert list(errors) == ["tags"]


def _offered(form: Any, name: str = "tags") -> list[Any]:
    return list(form[name].field.queryset)


def test_a_preset_key_without_a_field(tags: dict[int, Tag]) -> None:
    for data in (None, {"title": "new", "user_id": TWO}):
        assert _offered(PhotoForm(data, instance=_new(ONE))) == [tags[ONE]]


def test_a_submitted_key_comes_before_a_preset_one(tags: dict[int, Tag]) -> None:
    form = WithKey({"title": "new", "user_id": TWO, "tags": [tags[TWO].pk]}, instance=_new(ONE))
    assert list(form.save().tags.all()) == [tags[TWO]]
    form = WithKey({"title": "new", "user_id": "?"}, instance=_new(ONE))
    assert list(form.errors) == ["user_id"]
    assert _offered(form) == [tags[ONE]]


class FixedKey(WithKey):  # type: ignore[valid-type, misc]  # it is a class
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["user_id"].disabled = True


@OTHER_KEYS
def test_a_disabled_key_is_the_initial_one(tags: dict[int, Tag], key: int) -> None:
    data = {"title": "", "user_id": key, "tags": [tags[key].pk]}
    for form in (
        FixedKey(initial={"user_id": ONE}),
        FixedKey(data, initial={"user_id": ONE}),
        FixedKey(data, instance=_new(ONE)),
    ):
        assert _offered(form) == [tags[ONE]]
        page = form.as_p()
        assert "tag 1" in page and f"tag {key}" not in page


@pytest.mark.parametrize("data", [None, {"title": "new"}])
def test_a_stored_row_whose_key_was_not_loaded(tags: dict[int, Tag], data: Any) -> None:
    photo = Photo.objects.defer("user_id").get(user_id=ONE, pk=_stored(ONE).pk)
    assert _offered(PhotoForm(data, instance=photo)) == [tags[ONE]]
    album = Album.objects.create(owner_id=ONE, title="own")
    Album.objects.create(owner_id=NEAR, title="near")
    photo = Photo.objects.defer("user_id").get(user_id=ONE, pk=photo.pk)
    form_class = modelform_factory(Photo, fields=["title", "album"])
    assert _offered(form_class(data, instance=photo), "album") == [album]


# -- The form fields that Django and others make


def test_all_fields_of_a_child_table() -> None:
    """The link to the parent's row has no form field."""
    form_class: Any = modelform_factory(Tree, fields="__all__")
    assert list(form_class.base_fields) == ["id", "owner", "n", "height"]


class LevelChoiceField(forms.ModelChoiceField):  # type: ignore[type-arg]  # generic in the stubs only
    mark = "--"

    def __init__(self, *args: Any, mark: str = mark, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mark = mark

    def label_from_instance(self, row: Any) -> str:
        return f"{self.mark} {row}"


class LevelKey(models.ForeignKey):  # type: ignore[type-arg]  # generic in the stubs only
    """Like ``TreeForeignKey`` of django-mptt."""

    def formfield(self, **kwargs: Any) -> Any:
        return super().formfield(**{"form_class": LevelChoiceField, **kwargs})


@isolate_apps("tests.photos")
def test_the_form_field_of_a_relation_of_another_package(tags: dict[int, Tag]) -> None:
    class Leaf(ShardedModel):
        user_id = models.BigIntegerField()
        tag = LevelKey(Tag, models.CASCADE, related_name="+")

        class Meta:
            app_label = "photos"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    form = modelform_factory(Leaf, fields=["tag"])(instance=Leaf(user_id=ONE))
    field = form["tag"].field
    assert isinstance(field, LevelChoiceField)
    assert [label for _, label in field.choices][1:] == ["-- tag 1"]


def test_the_form_field_that_a_project_asks_for() -> None:
    album: Any = Photo._meta.get_field("album")
    field = album.formfield(form_class=partial(LevelChoiceField, mark="+"))
    for copy in (field, deepcopy(field), album.formfield(form_class=type(field), mark="+")):
        assert isinstance(copy, LevelChoiceField) and copy.mark == "+"
        assert copy.relation is album


def _management(prefix: str, total: int, initial: int = 0) -> dict[str, Any]:
    return {f"{prefix}-TOTAL_FORMS": total, f"{prefix}-INITIAL_FORMS": initial}


# -- Formsets below a parent -------------------------------------------------------


@pytest.fixture
def shelves(placed: None) -> dict[int, Shelf]:
    for key in SHARD:
        Agent.objects.create(id=key, name=f"agent {key}")
        Label.objects.create(id=key, name=f"label {key}", owner_id=key)
    return {
        key: Shelf.objects.create(id=10 + key, name=f"shelf {key}", owner_id=key) for key in SHARD
    }


FIELDS = ["id", "name", "stars", "seller", "labels", "parent"]


class ItemForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in the stubs only
    class Meta:
        model = Item
        fields = FIELDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("labels", "parent"):
            self.fields[name].required = False


Items = inlineformset_factory(Shelf, Item, form=ItemForm, extra=1)


def _items(*forms: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    data = _management("items", len(forms), initial)
    for number, form in enumerate(forms):
        values = {"name": "item", "stars": 0, "seller": ONE, **form}
        data |= {f"items-{number}-{name}": value for name, value in values.items()}
    return data


def test_new_children_get_the_key_of_the_parent(shelves: dict[int, Shelf]) -> None:
    formset = Items(_items({"id": 7, "labels": [ONE]}), instance=shelves[ONE])
    assert formset.is_valid(), formset.errors
    (item,) = formset.save()
    assert (item.owner_id, item._state.db) == (ONE, SHARD[ONE])
    assert [label.pk for label in Item.objects.get(owner=ONE).labels.all()] == [ONE]
    change = _items({"id": 7, "name": "renamed"}, {"id": 8}, initial=1)
    formset = Items(change, instance=shelves[ONE])
    assert formset.is_valid(), formset.errors
    formset.save()
    stored = Item.objects.filter(owner=ONE).order_by("pk")
    assert [(item.pk, item.name) for item in stored] == [(7, "renamed"), (8, "item")]


def test_pickers_offer_rows_of_the_key_of_the_parent(shelves: dict[int, Shelf]) -> None:
    parents = [
        Item.objects.create(id=pk, name="item", owner_id=key, seller_id=ONE, shelf=shelves[key])
        for pk, key in ((20, ONE), (21, NEAR))
    ]
    formset = Items(instance=shelves[ONE])
    for form in (*formset.forms, formset.empty_form):
        assert [label.pk for label in form["labels"].field.queryset] == [ONE]
        assert list(form["parent"].field.queryset) == [parents[0]]
    page = formset.as_p()
    assert "label 1" in page and "label 3" not in page


def test_a_parent_whose_key_was_not_loaded(shelves: dict[int, Shelf]) -> None:
    shelf = Shelf.objects.defer("owner").get(owner=ONE)
    formset = Items(instance=shelf)
    assert [label.pk for label in formset.forms[0]["labels"].field.queryset] == [ONE]
    formset = Items(_items({"id": 7}), instance=Shelf.objects.defer("owner").get(owner=ONE))
    assert formset.is_valid(), formset.errors
    (item,) = formset.save()
    assert item.owner_id == ONE


def test_the_submitted_key_is_looked_up_once(shelves: dict[int, Shelf]) -> None:
    class Whole(ItemForm):
        class Meta(ItemForm.Meta):
            fields = ["parent", "labels", "shelf", "friends", "owner"]

    form = Whole({"owner": ONE, "shelf": shelves[NEAR].pk, "labels": [ONE]})
    # Once for the three relations that follow. Django looks the key up when it cleans the field, and
    # when it validates the row.
    with assert_queries(1 + 2, using="default"):
        assert "shelf" in form.errors and "labels" not in form.errors
    form = Whole({"owner": 99})  # not valid
    with assert_queries(1 + 1, using="default"):
        assert "owner" in form.errors


@OTHER_KEYS
@pytest.mark.parametrize("name", ["labels", "parent"])
def test_a_submitted_row_of_another_key_is_an_error(
    shelves: dict[int, Shelf], name: str, key: int
) -> None:
    Item.objects.create(id=key, name="item", owner_id=key, seller_id=ONE)
    value: Any = [key] if name == "labels" else key
    formset = Items(_items({"id": 7, name: value}), instance=shelves[ONE])
    (errors,) = formset.errors
    assert list(errors) == [name]
    assert not Item.objects.filter(owner=ONE).exists()


@pytest.mark.parametrize("pk", [30, None])
def test_a_new_parent_that_is_saved_after_the_validation(
    shelves: dict[int, Shelf], pk: int | None
) -> None:
    shelf = Shelf(id=pk, name="new", owner_id=TWO)
    formset = Items(_items({"id": 7}), instance=shelf)
    assert formset.is_valid(), formset.errors
    shelf.id = 30
    shelf.save()
    (item,) = formset.save()
    assert (item.owner_id, item.shelf, item._state.db) == (TWO, shelf, SHARD[TWO])


WithOwner = inlineformset_factory(Shelf, Item, form=ItemForm, fields=[*FIELDS, "owner"], extra=1)


@OTHER_KEYS
def test_another_key_than_the_parent_is_an_error(shelves: dict[int, Shelf], key: int) -> None:
    formset = WithOwner(_items({"id": 7, "owner": key}), instance=shelves[ONE])
    (errors,) = formset.errors
    assert errors == {
        "owner": ["Only rows of one owner can be saved here, and this is another one."]
    }
    formset = WithOwner(_items({"id": 7, "owner": ONE}), instance=shelves[ONE])
    assert formset.is_valid(), formset.errors
    (item,) = formset.save()
    assert item.owner_id == ONE


def test_a_visitor_cannot_choose_the_key_by_a_relation(shelves: dict[int, Shelf]) -> None:
    class Choosing(ItemForm):
        class Meta(ItemForm.Meta):
            fields = [*FIELDS, "shelf"]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            shelf: Any = self.fields["shelf"]
            shelf.queryset = Shelf.objects.scatter()

    form = Choosing({"id": 7, "name": "x", "stars": 0, "seller": ONE, "shelf": shelves[TWO].pk})
    with pytest.raises(ShardKeyRequired):
        form.save()


def test_a_one_to_one_child(shelves: dict[int, Shelf]) -> None:
    item = shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    covers = inlineformset_factory(Item, Cover, fields=["id", "name", "stars"])
    prefix = covers.get_default_prefix()
    form = {"id": 9, "name": "cover", "stars": 0}
    data = {**_management(prefix, 1), **{f"{prefix}-0-{name}": v for name, v in form.items()}}
    formset = covers(data, instance=item)
    assert formset.is_valid(), formset.errors
    formset.save()
    assert Item.objects.get(owner=ONE).cover.owner_id == ONE


def test_children_of_a_global_parent_that_is_their_key(tags: dict[int, Tag]) -> None:
    albums = inlineformset_factory(Person, Album, fields=["title"], extra=1)
    data = {**_management("albums", 1), "albums-0-title": "new"}
    formset = albums(data, instance=Person.objects.get(pk=TWO))
    assert formset.is_valid(), formset.errors
    formset.save()
    assert Album.objects.get(owner=TWO).title == "new"


@pytest.mark.parametrize("key", ["", "x", None])
def test_a_key_that_is_not_valid_is_an_error_of_its_field(
    tags: dict[int, Tag], key: str | None
) -> None:
    form_class = modelform_factory(Photo, fields=["tags", "user_id", "title"])
    data = {"title": "x", "tags": [tags[ONE].pk]}
    form = form_class(data if key is None else {**data, "user_id": key})
    assert "user_id" in form.errors
    assert set(form.errors) <= {"user_id", "tags"}
    str(form)  # It is shown again.
    assert form_class({**data, "user_id": ONE}).is_valid()
    # If no key was sent at all, the project has to say which rows there are.
    with pytest.raises(ShardKeyRequired):
        str(form_class())


def test_a_generic_formset_needs_a_bound_key(shelves: dict[int, Shelf]) -> None:
    notes = generic_inlineformset_factory(Note, fields=["id", "name", "stars"], extra=1)
    prefix = notes.get_default_prefix()
    item = shelves[ONE].items.create(id=7, name="item", seller_id=ONE)
    form = {"id": 9, "name": "note", "stars": 0}
    data = {**_management(prefix, 1), **{f"{prefix}-0-{name}": v for name, v in form.items()}}
    formset = notes(data, instance=item)
    assert formset.is_valid(), formset.errors
    with pytest.raises(ShardKeyRequired):
        formset.save()
    with bound(owner=ONE):
        formset = notes(data, instance=item)
        assert formset.is_valid(), formset.errors
        formset.save()
    note = Note.objects.get(owner=ONE)
    assert note.content_object == item


def test_models_that_allow_other_keys(placed: None) -> None:
    trunk = Trunk.objects.create(id=1, owner=0)
    twigs = inlineformset_factory(Trunk, Twig, fields=["id", "owner", "n"], extra=1)
    form = {"id": 2, "owner": 8, "n": 0}  # modulo 8: the same shard
    data = {**_management("twigs", 1), **{f"twigs-0-{name}": v for name, v in form.items()}}
    formset = twigs(data, instance=trunk)
    assert formset.is_valid(), formset.errors
    formset.save()
    assert trunk.twigs.get().owner == 8
