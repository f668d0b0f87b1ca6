"""The two forms of boards."""

from __future__ import annotations

from typing import Any

from django import forms

from sharded_orm.contrib.objects.forms import ObjectForm
from testproject.boards.models import Board, Member, MemberBoards


class BoardForm(ObjectForm):
    """Changes a board, unless somebody else has changed it since the form was shown."""

    class Meta:
        model = Board
        fields = ["title", "about"]
        widgets = {"about": forms.Textarea(attrs={"rows": 3})}


class PinForm(forms.Form):
    board = forms.TypedChoiceField(coerce=int, required=False, empty_value=None)
    new_board = forms.CharField(max_length=80, required=False, label="Title of the new board")
    note = forms.CharField(max_length=200, required=False)

    def __init__(self, member: Member, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._boards = {board.pk: board for board in MemberBoards.objects.page(member, size=100)}
        choices: Any = [("", "A new board"), *((pk, str(b)) for pk, b in self._boards.items())]
        self.fields["board"].choices = choices

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        cleaned["board"] = self._boards.get(cleaned.get("board"))
        if cleaned["board"] is None and not cleaned.get("new_board") and not self.errors:
            self.add_error("new_board", "Choose a board, or give the new one a title.")
        return cleaned
