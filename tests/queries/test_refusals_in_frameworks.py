"""Refusals reach the developer through code that catches errors for bad input; bad input does not."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.sitemaps import Sitemap
from django.core.exceptions import ValidationError as InvalidRow
from django.db import models, router
from django.forms import ModelChoiceField, ModelMultipleChoiceField
from django.http import Http404
from django.template import Context, Template
from django.test import RequestFactory
from django.views.generic import DetailView
from rest_framework.exceptions import ValidationError
from rest_framework.generics import RetrieveAPIView
from rest_framework.relations import PrimaryKeyRelatedField, SlugRelatedField
from rest_framework.serializers import ModelSerializer
from rest_framework.test import APIRequestFactory

from sharded_orm import exceptions
from sharded_orm.exceptions import (
    CrossShardRelation,
    RoutingError,
    ShardedOrmError,
    ShardKeyChanged,
    ShardKeyRequired,
)
from tests.photos.models import Comment, Event, Photo, Tag, Visit
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


class PhotoSerializer(ModelSerializer):
    class Meta:
        model = Photo
        fields = ["user_id", "title", "stars"]


class EventSerializer(ModelSerializer):
    class Meta:
        model = Event
        fields = ["account", "number"]


class PhotoView(RetrieveAPIView):
    queryset = Photo.objects.all()
    serializer_class = PhotoSerializer


class PhotoOfUserView(PhotoView):
    def get_queryset(self) -> Any:
        return Photo.objects.filter(user_id=self.kwargs["user"])


class EventView(RetrieveAPIView):
    queryset = Event.objects.all()
    serializer_class = EventSerializer
    lookup_field = "account"


def get(view: Any, **kwargs: Any) -> Any:
    return view.as_view()(APIRequestFactory().get("/"), **kwargs)


# -- Django REST framework -----------------------------------------------------------


def test_a_refused_query_of_a_view_is_no_404(rows: list[Photo]) -> None:
    with pytest.raises(ShardKeyRequired, match="sharded by 'user_id'"):
        get(PhotoView, pk=rows[0].pk)
    assert get(PhotoOfUserView, user=ONE, pk=rows[0].pk).data["title"] == "p0"


@pytest.mark.parametrize(("user", "pk"), [(ONE, "x"), (ONE, 404), (TWO, 2**80), (404, 1)])
def test_bad_input_is_a_404(user: Any, pk: Any, rows: list[Photo]) -> None:
    assert get(PhotoOfUserView, user=user, pk=pk).status_code == 404


def test_a_key_that_no_row_can_have_is_a_404(db: None) -> None:
    assert get(EventView, account="lone \udcff").status_code == 404


def test_a_refused_query_of_a_related_field_is_no_bad_input(rows: list[Photo]) -> None:
    for field in (
        PrimaryKeyRelatedField(queryset=Photo.objects.all()),
        SlugRelatedField(slug_field="title", queryset=Photo.objects.all()),
    ):
        with pytest.raises(ShardKeyRequired):
            field.run_validation(rows[0].pk)
    of_user = PrimaryKeyRelatedField(queryset=Photo.objects.filter(user_id=ONE))
    assert of_user.run_validation(rows[0].pk) == rows[0]
    for wrong in (rows[1].pk, "x"):
        with pytest.raises(ValidationError):
            of_user.run_validation(wrong)


def test_a_refused_query_does_not_make_a_value_unique(db: None) -> None:
    class VisitSerializer(ModelSerializer):
        class Meta:
            model = Visit
            fields = ["page"]

    with pytest.raises(ShardKeyRequired):
        VisitSerializer(data={"page": "/"}).is_valid()


def test_a_row_without_its_key_is_no_mistake_of_the_serializer(db: None) -> None:
    class TitleSerializer(ModelSerializer):
        class Meta:
            model = Photo
            fields = ["title"]

    serializer = TitleSerializer(data={"title": "x"})
    assert serializer.is_valid()
    with pytest.raises(ShardKeyRequired, match="is None"):
        serializer.save()


# -- Django ------------------------------------------------------------------------------


def test_a_refused_query_of_a_choice_field_is_no_bad_choice(rows: list[Photo]) -> None:
    with pytest.raises(ShardKeyRequired):
        ModelChoiceField(Photo.objects.all()).clean(rows[0].pk)
    with pytest.raises(ShardKeyRequired):
        ModelMultipleChoiceField(Photo.objects.all()).clean([rows[0].pk])
    assert ModelChoiceField(Photo.objects.filter(user_id=ONE)).clean(rows[0].pk) == rows[0]


def test_a_refused_query_of_a_generic_view_is_no_404(rows: list[Photo]) -> None:
    request = RequestFactory().get("/")
    with pytest.raises(ShardKeyRequired):
        DetailView.as_view(model=Photo)(request, pk=rows[0].pk)
    with pytest.raises(Http404):
        DetailView.as_view(queryset=Photo.objects.filter(user_id=ONE))(request, pk=404)


def test_a_refused_query_has_no_length_in_a_template(rows: list[Photo]) -> None:
    for text in ("{{ photos|length }}", "{% for photo in photos %}{% endfor %}"):
        with pytest.raises(ShardKeyRequired):
            Template(text).render(Context({"photos": Photo.objects.all()}))


def test_a_refused_query_of_a_sitemap_is_no_missing_date(rows: list[Photo]) -> None:
    class PhotoMap(Sitemap):
        def items(self) -> Any:
            return Photo.objects.all()

        def lastmod(self, photo: Photo) -> Any:
            return photo.posted_at

    with pytest.raises(ShardKeyRequired):
        PhotoMap().get_latest_lastmod()


def test_full_clean_of_a_row_whose_field_gives_no_key(db: None, monkeypatch: Any) -> None:
    """The validation of the field reports what is wrong with the key."""
    monkeypatch.setattr(
        type(Event._meta.get_field("account")), "pre_save", lambda *_: None, raising=False
    )
    Event(account="ada").full_clean()


# -- The classes ---------------------------------------------------------------------------

#: What Django and the packages that people bring catch around a query, and take for bad input.
TAKEN_FOR_BAD_INPUT = (TypeError, ValueError, AttributeError, KeyError, IndexError)


@pytest.mark.parametrize(
    "refusal", [ShardKeyRequired, ShardKeyChanged, CrossShardRelation, exceptions.InexactShardKey]
)
def test_a_refusal_is_a_runtime_error(refusal: type[Exception]) -> None:
    assert issubclass(refusal, RuntimeError)
    assert not issubclass(refusal, TAKEN_FOR_BAD_INPUT)


def test_only_bad_values_are_errors_of_values() -> None:
    errors = [
        error
        for error in vars(exceptions).values()
        if isinstance(error, type) and issubclass(error, ShardedOrmError)
    ]
    routing = {error.__name__ for error in errors if issubclass(error, RoutingError)}
    bad = {e.__name__ for e in errors if issubclass(e, TAKEN_FOR_BAD_INPUT)}
    assert routing & bad == {"InvalidShardKey"}


def test_an_assignment_to_another_shard_is_no_bad_input(rows: list[Photo]) -> None:
    with pytest.raises(CrossShardRelation) as caught:
        Comment(user_id=TWO, text="x", photo=rows[0]).save()
    assert not isinstance(caught.value, TAKEN_FOR_BAD_INPUT)


def test_a_condition_that_the_alias_of_a_group_would_check(placed: None) -> None:
    """``Q.check()`` takes a condition for true if a database answers with an error."""
    tag = Tag.objects.create(user_id=ONE, name="sea")
    kept = models.CheckConstraint(condition=models.Q(name="sea"), name="kept")
    broken = models.CheckConstraint(condition=models.Q(name="hill"), name="broken")
    new = Tag(user_id=NEAR, name="sea")
    for constraint in (kept, broken):
        with pytest.raises(ShardKeyRequired, match=r"using=router\.db_for_read"):
            constraint.validate(Tag, tag, using="photos")
    for row in (tag, new):
        kept.validate(Tag, row, using=router.db_for_read(Tag, instance=row))
        with pytest.raises(InvalidRow):
            broken.validate(Tag, row, using=router.db_for_read(Tag, instance=row))
