"""The addresses of the photo site."""

from __future__ import annotations

import re
from urllib.parse import unquote

from django.db import connection
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


class SegmentConverter:
    """Any text as one part of an address: a name or a tag as stored in a database.

    Characters that end a part, or have a meaning where they stand alone, are written as ``%2F`` is.
    The address as a whole is encoded once more, so that neither browsers nor servers see the
    character itself. The empty text is written as a lone ``%``, which stands for no other text.
    """

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        text = "" if value == _NOTHING else unquote(value, errors="strict")
        if "\0" in text and connection.features.prohibits_null_characters_in_text_exception:
            raise ValueError("No text in this database has the character NUL.")
        return text

    def to_url(self, value: str) -> str:
        if not value:
            return _NOTHING
        # "." and ".." alone are this folder and the one above.
        special = _SPECIAL if value.strip(".") else _SPECIAL_AND_DOT
        return special.sub(lambda match: f"%{ord(match[0]):02X}", value)


_NOTHING = "%"
_SPECIAL = re.compile(r"[%/\\\x00-\x1f\x7f]")
_SPECIAL_AND_DOT = re.compile(r"[.]")

register_converter(IdConverter, "id")
register_converter(SegmentConverter, "segment")

app_name = "photos"
urlpatterns = [
    path("", views.front, name="front"),
    path("tags/", views.all_tags, name="tags"),
    path("tags/<segment:text>/", views.tag, name="tag"),
    path("upload/", views.upload, name="upload"),
    path("photos/<segment:username>/", views.user, name="user"),
    path("photos/<segment:username>/albums/<id:album_id>/", views.album, name="album"),
    path("photos/<segment:username>/tags/<segment:text>/", views.user_tag, name="user_tag"),
    path("photos/<segment:username>/comments/", views.user_comments, name="user_comments"),
    path("photos/<segment:username>/<id:photo_id>/", views.photo, name="photo"),
    path(
        "photos/<segment:username>/<id:photo_id>/comments/<id:comment_id>/delete/",
        views.delete_comment,
        name="delete_comment",
    ),
    path("photo/<id:photo_id>/", views.old_photo, name="old_photo"),
    path("pictures/<id:photo_id>/<int:width>.webp", views.picture, name="picture"),
]
