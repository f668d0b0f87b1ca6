"""Forms, views, the admin and Django REST framework under a bound key, without code of the project."""

from __future__ import annotations

from typing import Any

import pytest
from django import forms
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.paginator import Paginator
from django.test import RequestFactory, TestCase
from django.views.generic import CreateView, DetailView, UpdateView

from sharded_orm import bound, unbound
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.photos.models import Comment, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

assert_queries = TestCase().assertNumQueries


class CommentForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Comment
        fields = ("photo", "text")


class TagForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Tag
        fields = ("user_id", "name")


def test_a_form_offers_and_accepts_rows_of_the_key(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        choices = CommentForm().fields["photo"].choices  # type: ignore[attr-defined]
        assert sorted(str(label) for value, label in choices if value) == ["p0", "p3"]
        form = CommentForm({"photo": rows[0].pk, "text": "x"})
        assert form.is_valid(), form.errors
        comment = form.save()
        assert (comment.user_id, comment.photo) == (ONE, rows[0])
        other = CommentForm({"photo": rows[2].pk, "text": "x"})
        assert "not one of the available choices" in str(other.errors)
    with bound(user_id=NEAR):
        assert CommentForm({"photo": rows[2].pk, "text": "x"}).is_valid()


def test_formsets_are_of_the_key(rows: list[Photo]) -> None:
    formset_class = forms.modelformset_factory(Photo, fields=("title",), extra=1)
    data = {"form-TOTAL_FORMS": "3", "form-INITIAL_FORMS": "2", "form-2-title": "new"}
    with bound(user_id=ONE):
        formset = formset_class(queryset=Photo.objects.order_by("pk"))
        shown = [form.instance for form in formset.initial_forms]
        assert shown == [rows[0], rows[3]]
        for number, photo in enumerate(shown):
            data |= {f"form-{number}-photo_id": str(photo.pk), f"form-{number}-title": "changed"}
        formset = formset_class(data, queryset=Photo.objects.order_by("pk"))
        assert formset.is_valid(), formset.errors
        formset.save()
        assert sorted(Photo.objects.values_list("title", flat=True)) == [
            "changed",
            "changed",
            "new",
        ]
    assert Photo.objects.scatter().filter(title="changed").count() == 2


def test_uniqueness_is_checked_in_the_form(placed: None) -> None:
    with bound(user_id=ONE):
        Tag.objects.create(name="x")
        assert not TagForm({"user_id": ONE, "name": "x"}).is_valid()


class PhotoDetail(DetailView):  # type: ignore[type-arg]
    model = Photo
    template_name = "unused"


class PhotoUpdate(UpdateView):  # type: ignore[type-arg]
    queryset = Photo.objects.all()
    fields = ("title",)
    success_url = "/"


class PhotoCreate(CreateView):  # type: ignore[type-arg]
    model = Photo
    fields = ("title",)
    success_url = "/"


def test_generic_views(rows: list[Photo]) -> None:
    requests = RequestFactory()
    with bound(user_id=ONE):
        response = PhotoDetail.as_view()(requests.get("/"), pk=rows[0].pk)
        assert response.context_data["object"] == rows[0]
        with pytest.raises(Exception, match="No photo found"):
            PhotoDetail.as_view()(requests.get("/"), pk=rows[2].pk)
        PhotoUpdate.as_view()(requests.post("/", {"title": "new"}), pk=rows[0].pk)
        assert Photo.objects.get(pk=rows[0].pk).title == "new"
        with pytest.raises(Exception, match="No photo found"):
            PhotoUpdate.as_view()(requests.post("/", {"title": "new"}), pk=rows[2].pk)
        PhotoCreate.as_view()(requests.post("/", {"title": "created"}))
        assert Photo.objects.get(title="created").user_id == ONE
        pages = Paginator(Photo.objects.order_by("title"), 2)
        assert (pages.count, [p.title for p in pages.page(1)]) == (3, ["created", "new"])


def test_a_stock_admin_shows_the_rows_of_the_key(rows: list[Photo]) -> None:
    class PhotoAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
        list_display = ("title",)

    request = RequestFactory().get("/")
    request.user = User(is_superuser=True, is_active=True)
    model_admin = PhotoAdmin(Photo, admin.AdminSite())
    with bound(user_id=ONE):
        changelist = model_admin.get_changelist_instance(request)
        assert sorted(row.title for row in changelist.result_list) == ["p0", "p3"]
        assert model_admin.get_object(request, str(rows[0].pk)) == rows[0]
        assert model_admin.get_object(request, str(rows[2].pk)) is None


def test_a_queryset_and_a_manager_of_the_project(rows: list[Photo]) -> None:
    class Starred(ShardedQuerySet):
        def starred(self) -> Any:
            return self.filter(stars__gte=1)

    starred: Any = Starred.as_manager()
    starred.model = Photo
    with bound(user_id=ONE):
        assert [row.title for row in starred.starred()] == ["p3"]


def test_django_rest_framework(rows: list[Photo]) -> None:
    serializers = pytest.importorskip("rest_framework.serializers")
    viewsets = pytest.importorskip("rest_framework.viewsets")
    from rest_framework.test import APIRequestFactory

    class CommentSerializer(serializers.ModelSerializer):  # type: ignore[misc,name-defined]
        class Meta:
            model = Comment
            fields = ("comment_id", "photo", "text")
            read_only_fields = ("comment_id",)

    class CommentViewSet(viewsets.ModelViewSet):  # type: ignore[misc,name-defined]
        queryset = Comment.objects.order_by("pk")
        serializer_class = CommentSerializer
        authentication_classes = ()
        permission_classes = ()

    requests = APIRequestFactory()
    many = CommentViewSet.as_view({"get": "list", "post": "create"})
    one = CommentViewSet.as_view(
        {"get": "retrieve", "patch": "partial_update", "delete": "destroy"}
    )
    pks = {}
    for key, photo in ((ONE, rows[0]), (TWO, rows[1]), (NEAR, rows[2])):
        with bound(user_id=key):
            created = many(requests.post("/", {"photo": photo.pk, "text": f"of {key}"}, "json"))
            assert created.status_code == 201, created.data
            pks[key] = created.data["comment_id"]
            refused = many(requests.post("/", {"photo": rows[5].pk, "text": "x"}, "json"))
            assert refused.status_code == (201 if key == NEAR else 400)
    for key, other in ((ONE, NEAR), (TWO, ONE)):
        with bound(user_id=key):
            assert [row["text"] for row in many(requests.get("/")).data] == [f"of {key}"]
            assert one(requests.get("/"), pk=pks[key]).data["text"] == f"of {key}"
            assert one(requests.get("/"), pk=pks[other]).status_code == 404
            assert one(requests.delete("/"), pk=pks[other]).status_code == 404
            changed = one(requests.patch("/", {"text": "new"}, "json"), pk=pks[key])
            assert changed.data["text"] == "new"
    with bound(user_id=ONE):
        assert one(requests.delete("/"), pk=pks[ONE]).status_code == 204
        with unbound():
            assert Comment.objects.scatter().count() == 3
