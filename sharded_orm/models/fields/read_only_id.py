"""The base class of fields whose ids are generated, so that no user has to enter them."""

from __future__ import annotations

from typing import Any


class ReadOnlyIDMixin:
    """A mixin for fields that have ``editable=False`` unless the model sets ``editable=True``.

    So model forms have no field for the id, and serializers of Django REST framework do not accept
    an id. Django's AutoField needs no such mixin, because forms and serializers know this class.
    """

    editable: bool

    def __init__(self, *args: Any, editable: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, editable=editable, **kwargs)  # type: ignore[call-arg]  # Field has this method

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()  # type: ignore[misc]  # Field has this method
        # A migration contains only arguments that differ from their defaults. Django's method
        # assumes that ``editable`` is True by default, but here the default is False.
        kwargs.pop("editable", None)
        if self.editable:
            kwargs["editable"] = True
        return name, path, args, kwargs

    def formfield(self, *args: Any, **kwargs: Any) -> Any:
        # Forms have no field for the id, even if the field has editable=True, which is meant for
        # serializers. Django's AutoField does the same.
        return None
