"""The addresses of boards. They contain ids, which name the shard and the type of an object."""

from __future__ import annotations

from django.urls import path

import testproject.photos.urls  # noqa: F401  # registers the converters "id" and "segment"
from testproject.boards import views

app_name = "boards"
urlpatterns = [
    path("", views.front, name="front"),
    path("of/<segment:username>/", views.of_user, name="of_user"),
    path("<id:board_id>/", views.board, name="board"),
    path("<id:board_id>/edit/", views.edit, name="edit"),
    path("pin/<id:photo_id>/", views.pin, name="pin"),
    path("pins/<id:pin_id>/remove/", views.remove, name="remove"),
]
