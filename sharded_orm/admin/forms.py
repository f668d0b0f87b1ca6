"""Forms of sharded rows.

A stored row keeps its shard key. A new row gets the shard key that the page sets, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import DatabaseError, transaction
from django.db.models import Model
from django.forms.models import BaseInlineFormSet, BaseModelFormSet, ModelChoiceField

from sharded_orm import runtime
from sharded_orm.admin.exceptions import InvalidFocus
from sharded_orm.admin.failures import outage_text
from sharded_orm.admin.shard_scope import read_key
from sharded_orm.exceptions import NoOpenShard
from sharded_orm.models.sharding.key_validation import KEY_STAYS
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    # Base classes that declare private methods of Django, which the type stubs leave out.
    class _ModelForm(forms.ModelForm[Any]):
        def _get_validation_exclusions(self) -> set[str]: ...

    class _ModelFormSet(BaseModelFormSet[Any, Any]):
        _pk_field: Any

    class _ChildFormSet(BaseModelFormSet[Any, Any]):
        instance: Any

        def _construct_form(self, i: int, **kwargs: Any) -> Any: ...

    class _InlineFormSet(BaseInlineFormSet[Any, Any, Any]): ...
else:
    _ModelForm = forms.ModelForm
    _ModelFormSet = _ChildFormSet = BaseModelFormSet
    _InlineFormSet = BaseInlineFormSet

# The number of random shards that draw_shard() tries. If the user may use none of these shards,
# draw_shard() returns None.
_DRAWS = 1000


class KeepsKey(_ModelForm):
    """Model form that does not let a user change the shard key of a stored row.

    :func:`with_fixed_key` combines this class with the project's form. ``new_key`` is the shard key
    for a new row; None if the user types in the key, or if the model generates it. ``new_shard`` is
    the number of the shard for a new row whose key is generated; None if the row may be put on any
    shard.
    """

    sharded: ShardOptions
    new_key: Any = None
    new_shard: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        state: Any = self.instance._state
        if state.adding and self.new_key is not None:
            setattr(self.instance, self._key.attname, self.new_key)
        if state.adding and self.new_shard is not None:
            state.drawn_shard = self.new_shard

    @property
    def _key(self) -> Any:
        return self.sharded.key

    @property
    def _fixed_key(self) -> Any:
        """The shard key that this form must keep. For a stored row, it is the row's key; for a new
        row, it is the key that the page sets. None if the user types the key in, or if the row has
        no key yet.
        """
        if self.instance._state.adding and self.new_key is None and self._key.name in self.fields:
            return None
        value = self.instance.__dict__.get(self._key.attname)
        return None if value is None else self._key.get_prep_value(value)

    def clean(self) -> Any:
        self._refuse_another_key()
        return super().clean()

    def _refuse_another_key(self) -> None:
        key, name = self._fixed_key, self._key.name
        if key is None:
            return
        if name in self.fields:
            # The form has a field for the shard key if the project's model admin lists the key
            # among its fields. So compare the submitted value with the row's key.
            value = self.cleaned_data.get(name, key)
            # For some form fields, such as those of foreign keys, the submitted value is a row.
            # Then the shard key is an attribute of that row.
            if isinstance(value, Model):
                target = self._key if self._key.remote_field is None else self._key.target_field
                value = getattr(value, target.attname)
            same = self._key.get_prep_value(value) == key
        elif self.add_prefix(name) in self.data:
            text = str(self.data[self.add_prefix(name)])
            try:
                same = text == str(key) or read_key(self.sharded, text) == key
            except InvalidFocus:
                same = False
        else:
            return
        if not same:
            error = f"{self._key.verbose_name} is {key} and cannot be changed here. {KEY_STAYS}"
            self.add_error(name if name in self.fields else None, error)

    def _get_validation_exclusions(self) -> set[str]:
        # Overrides BaseModelForm._get_validation_exclusions(). Django skips a constraint if one of
        # its fields is not in the form. The shard key is not in the form, but most constraints of a
        # sharded model include it. So tell Django not to skip the constraints with the shard key.
        excluded = super()._get_validation_exclusions()
        if self._fixed_key is not None:
            excluded.discard(self._key.name)
        return excluded

    def add_error(self, field: Any, error: Any) -> None:
        # Django raises ValueError if an error belongs to a field that is not in the form, such as
        # the shard key. If the row is new, show the errors of the key above the whole form instead.
        # If the row is stored, drop them, because its key cannot be changed.
        errors = getattr(error, "error_dict", {})
        if field is None and self._key.name in errors and self._key.name not in self.fields:
            other_errors = {name: part for name, part in errors.items() if name != self._key.name}
            if self.instance._state.adding:
                messages = [
                    f"{self._key.verbose_name}: {message}"
                    for key_error in errors[self._key.name]
                    for message in key_error.messages
                ]
                other_errors[NON_FIELD_ERRORS] = [
                    *other_errors.get(NON_FIELD_ERRORS, ()),
                    *map(ValidationError, messages),
                ]
            # A stored row keeps its shard key, even if the key refers to a row that no longer
            # exists. So the errors of the key are dropped here.
            error = ValidationError(other_errors)
        super().add_error(field, error)


def with_fixed_key(
    form: type[Any],
    options: ShardOptions,
    *,
    new_key: Any = None,
    new_shard: int | None = None,
    hidden: Any = (),
) -> type[Any]:
    """Return a subclass of ``form`` with :class:`KeepsKey`; ``form`` itself if the model has no shard key.

    :param new_key: the shard key for a new row, as in :class:`KeepsKey`; None if the page sets no
        key.
    :param new_shard: the number of the shard for a new row with a generated key, as in
        :class:`KeepsKey`; None if the row may be put on any shard.
    :param hidden: names of fields to leave out if ``form`` declares them; empty by default.
    """
    if options.key is None:
        # A model without a shard key is the automatic table of a many-to-many field. Each of its
        # rows is on the shard of the two rows that it connects, so its form has no shard key to
        # protect.
        return form
    attributes = dict.fromkeys(name for name in hidden if name in form.declared_fields)
    bases = (form,) if issubclass(form, KeepsKey) else (KeepsKey, form)
    attributes |= {"sharded": options, "new_key": new_key, "new_shard": new_shard}
    metaclass: Any = type(form)
    form_class: type[Any] = metaclass(form.__name__, bases, attributes)
    return form_class


def with_base(formset: type[Any], base: type[Any]) -> type[Any]:
    """Return ``formset`` if it is a subclass of ``base``; else a new class derived from both.

    :param formset: a formset class; it may be written by the project.
    :param base: a formset class of this module.
    """
    if issubclass(formset, base):
        return formset
    return type(formset.__name__, (base, formset), {})


class OnShardFormSet(_ModelFormSet):
    """A formset that sends its queries only to the shard of its rows."""

    def add_fields(self, form: Any, index: int | None) -> None:
        # Overrides BaseModelFormSet.add_fields. If a row was deleted or never existed, its form has
        # a field for the primary key. This field would search for the row without naming a shard,
        # and such a query is refused. So let the field search an empty queryset.
        super().add_fields(form, index)
        field = form.fields.get(self._pk_field.name)
        if isinstance(field, ModelChoiceField) and form.instance._state.db is None:
            rows: Any = field.queryset
            field.queryset = rows.none()

    def is_valid(self) -> bool:
        with self._on_shard():
            return super().is_valid()

    def full_clean(self) -> None:
        with self._on_shard():
            super().full_clean()

    @contextmanager
    def _on_shard(self) -> Iterator[None]:
        # If the user deletes a row, the form of InlineModelAdmin searches for related rows that
        # would be deleted with it, and asks the router for their database. Within this ``with``
        # block, the router returns the shard of the formset's rows.
        rows = list(self.get_queryset())
        if rows:
            with standing_on(rows[0]._state.db):
                yield
        else:
            yield


class ChildFormSet(OnShardFormSet, _ChildFormSet):
    """A formset of children, that is, the rows of an inline. They are on the shard of their parent,
    and new children get the parent's shard key.
    """

    #: The foreign key to the parent, which Django sets; None if the relation is a generic one.
    fk: Any = None

    def _construct_form(self, i: int, **kwargs: Any) -> Any:
        form = super()._construct_form(i, **kwargs)
        self._set_key(form.instance)
        return form

    def save_new(self, form: Any, commit: bool = True) -> Any:
        # Set the shard key again, because the key of a new parent may have been generated after
        # this form was made.
        self._set_key(form.instance)
        return super().save_new(form, commit)

    def _set_key(self, row: Any) -> None:
        options, parent = shard_options(type(row)), self.instance
        above = shard_options(type(parent))
        if not row._state.adding or options is None or options.key in (None, self.fk):
            return
        if above is None or above.key is None or above.group != options.group:
            return
        # If the shard key of a child is generated, do not set it here. It will be generated with
        # the number of the parent's shard, which is found by the foreign key to the parent.
        if not options.key_is_generated:
            setattr(row, options.key.attname, getattr(parent, above.key.attname))


class InlineFormSetOnShard(ChildFormSet, _InlineFormSet):
    """A formset of children that have a foreign key to their parent.

    If the parent is in the global database, it cannot share a transaction with its children. The
    children are then saved in one transaction of their shard. For a stored parent, the children's
    transaction commits before the parent's. For a new parent, it begins after the parent's commit.
    Otherwise, children without a parent would remain if that commit failed.
    """

    #: The shard of the children, if their parent is in the global database; None if the children
    #: have no shard yet. Also None if the parent is in the shard group. The children are then on
    #: the parent's shard, and share its transaction.
    home: Shard | None = None
    #: The message that is shown in place of the children, if the parent is in the global database
    #: and the shard of its children is down. Otherwise an empty string.
    _outage = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parent_is_new = self.instance._state.adding

    def get_queryset(self) -> Any:
        rows = super().get_queryset()
        if self.home is None or self._outage:
            return rows
        # The parent is in the global database. If the shard of its children is down, show the
        # parent without its children.
        try:
            len(rows)
        except DatabaseError as exc:
            if not is_failure(exc):
                raise
            self._outage = f"{outage_text(self.home, exc)} Nothing below can be saved now."
            self._queryset = rows = rows.none()
            self.min_num = self.max_num = self.extra = 0
        return rows

    def clean(self) -> None:
        if self._outage:
            raise ValidationError(self._outage)
        super().clean()

    def non_form_errors(self) -> Any:
        # The shard of the children is down, so the page shows no children. Say so above their
        # forms, where Django's template shows the errors of a formset.
        errors = super().non_form_errors()
        if self._outage and not self.is_bound:
            return self.error_class([self._outage], error_class="nonform")
        return errors

    def save(self, commit: bool = True) -> Any:
        model: Any = self.model
        options = shard_options(model)
        if options is None or shard_options(type(self.instance)) is not None:
            return super().save(commit)
        # The parent is in the global database, and the view has opened its transaction there. The
        # children are on a shard, and need a second transaction. If the parent is new, save the
        # children after the parent's commit. Otherwise, children without a parent would remain if
        # that commit failed.
        if commit and self._parent_is_new:
            rows = super().save(commit=False)
            save_rows = partial(self._save_rows, rows, options)
            transaction.on_commit(save_rows, using=self.instance._state.db)
            return rows
        with transaction.atomic(using=options.group):
            return super().save(commit)

    def _save_rows(self, rows: list[Any], options: ShardOptions) -> None:
        with transaction.atomic(using=options.group):
            for row in rows:
                row.save()
            self.save_m2m()


def is_open(options: ShardOptions, number: int) -> bool:
    """Whether the shard with this number is open: its range is open, and the range's weight is not
    0.

    If the library chooses the shard of a new row, it chooses an open one.
    """
    shard_range = runtime.group(options.group).range_of(number)
    return shard_range.open and shard_range.weight > 0


def draw_shard(options: ShardOptions, permits: Callable[[Shard], bool]) -> Shard | None:
    """Return a random open shard for a new row whose key is generated.

    Return None if no shard is open, or if ``permits`` refuses all of the random open shards that
    were tried (1000).

    :param permits: a function that returns whether the user may put rows on a shard.
    :raises NoReachableShard: no node with open shards can be reached.
    """
    strategy = runtime.strategy(options.group)
    for _ in range(_DRAWS):
        try:
            shard = runtime.shard(options.group, strategy.draw())
        except NoOpenShard:
            return None
        if permits(shard):
            return shard
    return None
