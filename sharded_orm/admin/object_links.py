"""Wrappers that let the templates of Django's admin link to sharded rows by their object ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.contrib.admin import helpers
from django.contrib.admin.utils import quote
from django.urls import NoReverseMatch, reverse
from django.utils.functional import cached_property
from django.utils.html import conditional_escape, format_html

from sharded_orm.admin.identity import object_id
from sharded_orm.models.sharding.options import shard_options


class NamedRow:
    """A wrapper of a row. The wrapper's ``pk`` is the row's object id (see :mod:`identity`).

    All other attributes are read from the row. Django uses ``obj.pk`` for links and log entries in
    a dozen places, most of them templates, so wrapping the row changes all of them.
    """

    def __init__(self, row: Any) -> None:
        self.row = row

    @cached_property
    def pk(self) -> str:
        return object_id(self.row)

    def __getattr__(self, name: str) -> Any:
        # copy.copy() calls this method on the new object before it has set the attribute ``row``.
        # Without this check, ``self.row`` would then call this method without end.
        if "row" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.row, name)

    def __str__(self) -> str:
        return str(self.row)


def named_row(row: Any) -> Any:
    """Return ``row`` wrapped in a :class:`NamedRow` if its model is sharded; else ``row`` itself."""
    if row is None or isinstance(row, NamedRow) or shard_options(type(row)) is None:
        return row
    return NamedRow(row)


def change_url(row: Any, site: str) -> str | None:
    """Return the URL of the page on which ``row``, of any model, is changed; None if ``site`` has none."""
    opts = row._meta
    try:
        return reverse(
            f"admin:{opts.app_label}_{opts.model_name}_change",
            args=[quote(named_row(row).pk)],
            current_app=site,
        )
    except NoReverseMatch:
        return None


def unwrap(row: Any) -> Any:
    """Return the row inside a :class:`NamedRow`, or ``row`` itself if it is not a wrapper."""
    return row.row if isinstance(row, NamedRow) else row


def site_url(admin: Any, row: Any) -> str | None:
    """Return the "view on site" link of a row; None if the page should not have this link.

    Django's link leads to a view of content types, which does not know the shard. So link to
    ``site_view`` of the row's model admin, which calls ``get_absolute_url()`` only when somebody
    follows the link. If the model admin has no such view, return the result of
    ``get_absolute_url()``, which may cost queries.

    :param admin: the model admin or the inline whose page shows the link.
    """
    if row is None or not admin.view_on_site:
        return None
    if callable(admin.view_on_site):
        return str(admin.view_on_site(row))
    if not hasattr(row, "get_absolute_url"):
        return None
    url = change_url(row, admin.admin_site.name)
    if url is not None and hasattr(admin.admin_site.get_model_admin(type(row)), "site_view"):
        return f"{url.removesuffix('change/')}site/"
    return str(row.get_absolute_url())


class ReadonlyField(helpers.AdminReadonlyField):
    """A read-only field that links to sharded rows by their object ids."""

    def contents(self) -> Any:
        contents = super().contents()
        options = shard_options(type(self.form.instance))
        if options is None or options.key is None or options.key.name != self.field["field"]:
            return contents
        if contents != self.empty_value_display:
            return contents
        # The shard key may refer to a row that does not exist, because no database constraint
        # prevents that. Django would show such a key as if it were empty, so show its value.
        return conditional_escape(getattr(self.form.instance, options.key.attname))

    def get_admin_url(self, remote_field: Any, remote_obj: Any) -> str:
        # Overrides AdminReadonlyField.get_admin_url(), which would link to the related row by its
        # primary key. Link by the object id instead. (The type stubs allow None as the model admin,
        # but on a page it is never None.)
        model_admin: Any = self.model_admin
        url = change_url(remote_obj, model_admin.admin_site.name)
        return format_html('<a href="{}">{}</a>', url, remote_obj) if url else str(remote_obj)


class _LinkedFieldline(helpers.Fieldline):
    def __iter__(self) -> Iterator[Any]:
        for field in super().__iter__():
            if isinstance(field, helpers.AdminReadonlyField):
                name: Any = field.field["field"]
                yield ReadonlyField(self.form, name, field.is_first, self.model_admin)
            else:
                yield field


if TYPE_CHECKING:
    _Lined = helpers.Fieldset
else:
    _Lined = object


class _Lines(_Lined):
    """Mixin for fieldsets whose read-only fields link to rows by object ids (see
    :class:`ReadonlyField`).
    """

    def __iter__(self) -> Iterator[Any]:
        for line in super().__iter__():
            yield _LinkedFieldline(line.form, line.fields, line.readonly_fields, line.model_admin)


class _Fieldset(_Lines, helpers.Fieldset):
    pass


class _InlineFieldset(_Lines, helpers.InlineFieldset):
    pass


class _Like:
    @classmethod
    def like(cls, original: Any) -> Any:
        """Return an instance of this class with all attributes of ``original``.

        :param original: an instance of the Django class that this class extends.
        """
        copy = cls.__new__(cls)
        copy.__dict__.update(original.__dict__)
        return copy


class Form(_Like, helpers.AdminForm):
    """Django's ``AdminForm``, with :class:`ReadonlyField` for its read-only fields."""

    def __iter__(self) -> Iterator[Any]:
        for name, field_options in self.fieldsets:
            options: dict[str, Any] = field_options
            yield _Fieldset(
                self.form, name, self.readonly_fields, model_admin=self.model_admin, **options
            )


class InlineForm(_Like, helpers.InlineAdminForm):
    """Django's ``InlineAdminForm``, with :class:`ReadonlyField` for its read-only fields."""

    @classmethod
    def like(cls, original: Any) -> Any:
        copy = super().like(original)
        # The template builds links from ``original.pk``. So put a wrapper into ``original``, whose
        # ``pk`` is the object id. The model form keeps the row without a wrapper.
        copy.original = named_row(original.original)
        return copy

    def __iter__(self) -> Iterator[Any]:
        for name, field_options in self.fieldsets:
            options: dict[str, Any] = field_options
            yield _InlineFieldset(
                self.formset,
                self.form,
                name,
                self.readonly_fields,
                model_admin=self.model_admin,
                **options,
            )


class InlineFormSet(_Like, helpers.InlineAdminFormSet):
    """Django's ``InlineAdminFormSet``, with forms of the class :class:`InlineForm`."""

    def __iter__(self) -> Iterator[Any]:
        for form in super().__iter__():
            yield InlineForm.like(form)
