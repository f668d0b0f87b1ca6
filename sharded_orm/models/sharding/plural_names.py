"""The plural of a model's name, if the name of its class is a plural already or ends in an ``s``."""

from __future__ import annotations

from typing import Any

_VOWELS = "aeiou"
_HISSING = ("ss", "x", "z", "ch", "sh")


def plural_of(name: str) -> str:
    """Return the plural of an English name in lower case, such as ``photo addresses``.

    A name that ends in a single ``s`` counts as a plural, such as ``board pins``. If the name has the
    word "by", as ``member by user``, the part before that word gets the plural.
    """
    noun, by, rest = name.partition(" by ")
    if noun.endswith(_HISSING):
        noun += "es"
    elif noun.endswith("y") and noun[-2:-1] not in _VOWELS:
        noun = f"{noun[:-1]}ies"
    elif not noun.endswith("s"):
        noun += "s"
    return noun + by + rest


def set_plural(model: Any) -> None:
    """Give ``model`` the plural of the name of its class, unless its ``Meta`` has a name.

    Django appends an ``s``. The plural is no option of the model, so that projects need no migration.
    """
    given = model._meta.original_attrs
    if "verbose_name" not in given and "verbose_name_plural" not in given:
        model._meta.verbose_name_plural = plural_of(model._meta.verbose_name)
