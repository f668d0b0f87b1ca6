"""The two forms of the site."""

from __future__ import annotations

from typing import Any

from django import forms

from testproject.photos import tags, words
from testproject.photos.models import Album, Comment


class CommentForm(forms.ModelForm):
    class Meta:
        model = Comment
        fields = ["text"]
        widgets = {"text": forms.Textarea(attrs={"rows": 3})}
        labels = {"text": "Your comment"}


class TagsField(forms.CharField):
    """Text with commas; its value is a list of tags."""

    def clean(self, value: Any) -> Any:
        text: str = super().clean(value)
        try:
            return tags.parse(text)
        except words.InvalidTags as exc:
            raise forms.ValidationError(str(exc)) from exc


class UploadForm(forms.Form):
    """A photo without a picture: the site draws the picture."""

    title = forms.CharField(max_length=200)
    album = forms.ModelChoiceField(Album.objects.none(), required=False, empty_label="A new album")
    new_album = forms.CharField(max_length=100, required=False, label="Title of the new album")
    tags = TagsField(
        max_length=400,
        required=False,
        help_text=f"At most {tags.MOST}, with commas between them: low tide, dunes",
    )

    def __init__(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["album"].queryset = owner.albums.order_by("title")

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if not cleaned.get("album") and not cleaned.get("new_album") and not self.errors:
            self.add_error("new_album", "Choose an album, or give the new one a title.")
        return cleaned
