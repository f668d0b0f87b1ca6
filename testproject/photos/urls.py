"""The addresses of the photo site."""

from __future__ import annotations

from django.urls import path, register_converter

from testproject.photos import views


class IdConverter:
    """A 64-bit id. A longer number is no id, so its address is not found."""

    regex = "[1-9][0-9]{0,18}"

    def to_python(self, value: str) -> int:
        number = int(value)
        if number >= 2**63:
            raise ValueError(value)
        return number

    def to_url(self, value: int) -> str:
        return str(value)


register_converter(IdConverter, "id")

app_name = "photos"
urlpatterns = [
    path("", views.front, name="front"),
    path("tags/", views.all_tags, name="tags"),
    path("tags/<str:text>/", views.tag, name="tag"),
    path("upload/", views.upload, name="upload"),
    path("photos/<str:username>/", views.user, name="user"),
    path("photos/<str:username>/albums/<id:album_id>/", views.album, name="album"),
    path("photos/<str:username>/tags/<str:text>/", views.user_tag, name="user_tag"),
    path("photos/<str:username>/comments/", views.user_comments, name="user_comments"),
    path("photos/<str:username>/<id:photo_id>/", views.photo, name="photo"),
    path(
        "photos/<str:username>/<id:photo_id>/comments/<id:comment_id>/delete/",
        views.delete_comment,
        name="delete_comment",
    ),
    path("photo/<id:photo_id>/", views.old_photo, name="old_photo"),
    path("pictures/<id:photo_id>/<int:width>.webp", views.picture, name="picture"),
]
