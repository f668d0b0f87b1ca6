"""Forms of objects, models whose fields are kept in a JSON column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Any]
else:
    _ModelForm = forms.ModelForm


class ObjectForm(_ModelForm):
    """A ``ModelForm`` of an object, with a hidden field for the version that the visitor has seen.

    Declare it as any ``ModelForm``, with ``Meta.model`` and ``Meta.fields``. If somebody else has
    changed the object since the form was shown, the form has an error. If the object is changed
    between validation and saving, ``save()`` raises
    :exc:`~sharded_orm.contrib.objects.exceptions.ConcurrentEdit`.
    """

    object_version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.instance._state.adding:
            self.initial["object_version"] = self.instance.version

    def clean(self) -> Any:
        cleaned = super().clean()
        seen = self.cleaned_data.get("object_version")
        if not self.instance._state.adding and seen != self.instance.version:
            raise ValidationError(
                _("Somebody else has changed this since the form was shown. Load it again."),
                code="concurrent_edit",
            )
        return cleaned
