"""Forms of sharded rows: the shard key stays what it is, and new rows get it from the page."""

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
from sharded_orm.admin.failures import outage_text
from sharded_orm.admin.shard_scope import read_key
from sharded_orm.exceptions import InvalidFocus, RoutingError
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    # With what the stubs leave out of Django's classes, because it is not public.
    class _ModelForm(forms.ModelForm[Any]):
        def _get_validation_exclusions(self) -> set[str]: ...

    class _ModelFormSet(BaseModelFormSet[Any, Any]):
        _pk_field: Any

    class _InlineFormSet(BaseInlineFormSet[Any, Any, Any]):
        def _construct_form(self, i: int, **kwargs: Any) -> Any: ...
else:
    _ModelForm = forms.ModelForm
    _ModelFormSet = BaseModelFormSet
    _InlineFormSet = BaseInlineFormSet

# Of shards, in search of one that a user may use.
_DRAWS = 1000

KEY_STAYS = (
    "The shard key: it decides on which shard the row is stored, so it never changes. To move the"
    " row, create it under the new key and delete this one."
)


class KeepsKey(_ModelForm):
    """A model form under which no stored row changes its shard key.

    ``new_key`` is that of a new row, if the page says so; ``new_shard`` the number of the shard
    of a new row whose key is made. Mixed into the project's own form by :func:`with_fixed_key`.
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
    def _kept(self) -> Any:
        """The key that the row has and keeps; None if this form is to give it one."""
        if self.instance._state.adding and self.new_key is None and self._key.name in self.fields:
            return None
        value = self.instance.__dict__.get(self._key.attname)
        return None if value is None else self._key.get_prep_value(value)

    def clean(self) -> Any:
        self._refuse_another_key()
        return super().clean()

    def _refuse_another_key(self) -> None:
        kept, name = self._kept, self._key.name
        if kept is None:
            return
        if name in self.fields:
            # A model admin of the project's own shows it as a field all the same.
            value = self.cleaned_data.get(name, kept)
            if isinstance(value, Model):  # what it refers to, or the row of a hidden id
                target = self._key if self._key.remote_field is None else self._key.target_field
                value = getattr(value, target.attname)
            same = self._key.get_prep_value(value) == kept
        elif self.add_prefix(name) in self.data:
            given = str(self.data[self.add_prefix(name)])
            try:
                same = given == str(kept) or read_key(self.sharded, given) == kept
            except InvalidFocus:
                same = False
        else:
            return
        if not same:
            shown = f"{self._key.verbose_name} is {kept} and cannot be changed here. {KEY_STAYS}"
            self.add_error(name if name in self.fields else None, shown)

    def _get_validation_exclusions(self) -> set[str]:
        # Overrides BaseModelForm's. Django skips a constraint if one of its fields is not in
        # the form; the key is not, and belongs to most constraints of a sharded model.
        excluded = super()._get_validation_exclusions()
        if self._kept is not None:
            excluded.discard(self._key.name)
        return excluded

    def add_error(self, field: Any, error: Any) -> None:
        # Of a field that is not in the form, Django would raise ValueError.
        found = getattr(error, "error_dict", {})
        if field is None and self._key.name in found and self._key.name not in self.fields:
            rest = {name: errors for name, errors in found.items() if name != self._key.name}
            if self.instance._state.adding:
                messages = [
                    f"{self._key.verbose_name}: {message}"
                    for one in found[self._key.name]
                    for message in one.messages
                ]
                rest[NON_FIELD_ERRORS] = [
                    *rest.get(NON_FIELD_ERRORS, ()),
                    *map(ValidationError, messages),
                ]
            # A stored row keeps its key, whatever has become of the row that it names.
            error = ValidationError(rest)
        super().add_error(field, error)


def with_fixed_key(
    form: type[Any],
    options: ShardOptions,
    *,
    new_key: Any = None,
    new_shard: int | None = None,
    hidden: Any = (),
) -> type[Any]:
    """``form`` with :class:`KeepsKey`; without the declared fields that are named ``hidden``."""
    if options.key is None:
        return form  # An automatic many-to-many table, whose rows follow their instance.
    attributes = dict.fromkeys(name for name in hidden if name in form.declared_fields)
    bases = (form,) if issubclass(form, KeepsKey) else (KeepsKey, form)
    attributes |= {"sharded": options, "new_key": new_key, "new_shard": new_shard}
    metaclass: Any = type(form)
    made: type[Any] = metaclass(form.__name__, bases, attributes)
    return made


def with_base(formset: type[Any], base: type[Any]) -> type[Any]:
    """``formset``, which may be the project's own, as one of ``base``, a class of this module."""
    if issubclass(formset, base):
        return formset
    return type(formset.__name__, (base, formset), {})


class OnShardFormSet(_ModelFormSet):
    """A formset whose forms ask no shard for rows that are not among its own."""

    def add_fields(self, form: Any, index: int | None) -> None:
        # Overrides BaseModelFormSet.add_fields: a row that is gone, or was never there, is
        # looked up on no shard in particular.
        super().add_fields(form, index)
        field = form.fields.get(self._pk_field.name)
        if isinstance(field, ModelChoiceField) and form.instance._state.db is None:
            rows: Any = field.queryset
            field.queryset = rows.none()

    def is_valid(self) -> bool:
        with self._standing():
            return super().is_valid()

    def full_clean(self) -> None:
        with self._standing():
            super().full_clean()

    @contextmanager
    def _standing(self) -> Iterator[None]:
        # InlineModelAdmin's form asks the router where to look for what a deletion takes along.
        rows = list(self.get_queryset())
        if rows:
            with standing_on(rows[0]._state.db):
                yield
        else:
            yield


class InlineFormSetOnShard(OnShardFormSet, _InlineFormSet):
    """Children on the shard of their parent: new ones get its key.

    Those of a global row are saved in one transaction of their shard: before that row's own, or
    after it if the row is new, for then they would be left under a key that nobody has.
    """

    #: The shard of the children of a global row, if they have one.
    home: Shard | None = None
    #: Why they are not shown.
    _silence = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._of_new = self.instance._state.adding

    def get_queryset(self) -> Any:
        rows = super().get_queryset()
        if self.home is None or self._silence:
            return rows
        # Below a global row, whose page is not about this shard: it is shown without them.
        try:
            len(rows)
        except DatabaseError as exc:
            if not is_failure(exc):
                raise
            self._silence = f"{outage_text(self.home, exc)} Nothing below can be saved now."
            self._queryset = rows = rows.none()
            self.min_num = self.max_num = self.extra = 0
        return rows

    def clean(self) -> None:
        if self._silence:
            raise ValidationError(self._silence)
        super().clean()

    def non_form_errors(self) -> Any:
        # What the template shows above the forms.
        found = super().non_form_errors()
        if self._silence and not self.is_bound:
            return self.error_class([self._silence], error_class="nonform")
        return found

    def _construct_form(self, i: int, **kwargs: Any) -> Any:
        form = super()._construct_form(i, **kwargs)
        self._give_key(form.instance)
        return form

    def save_new(self, form: Any, commit: bool = True) -> Any:
        # Again, for a parent whose own key was made only now.
        self._give_key(form.instance)
        return super().save_new(form, commit)

    def save(self, commit: bool = True) -> Any:
        options = shard_options(self.model)
        if options is None or shard_options(type(self.instance)) is not None:
            return super().save(commit)
        # Below a global row, whose transaction is on another database.
        if commit and self._of_new:
            rows = super().save(commit=False)
            later = partial(self._save_rows, rows, options)
            transaction.on_commit(later, using=self.instance._state.db)
            return rows
        with transaction.atomic(using=options.group):
            return super().save(commit)

    def _save_rows(self, rows: list[Any], options: ShardOptions) -> None:
        with transaction.atomic(using=options.group):
            for row in rows:
                row.save()
            self.save_m2m()

    def _give_key(self, row: Any) -> None:
        options, parent = shard_options(type(row)), self.instance
        above = shard_options(type(parent))
        if not row._state.adding or options is None or options.key in (None, self.fk):
            return
        if above is None or above.key is None or above.group != options.group:
            return
        if not options.key_is_generated:  # Else the foreign key tells the shard.
            setattr(row, options.key.attname, getattr(parent, above.key.attname))


def is_open(options: ShardOptions, number: int) -> bool:
    """Whether a shard takes new rows that may go anywhere."""
    found = runtime.group(options.group).range_of(number)
    return found.open and found.weight > 0


def draw(options: ShardOptions, may: Callable[[Shard], bool]) -> Shard | None:
    """A shard for a new row whose key is made, among those where the user ``may`` be.

    None if none was found; it does not try for ever.
    """
    strategy = runtime.strategy(options.group)
    for _ in range(_DRAWS):
        try:
            shard = runtime.shard(options.group, strategy.draw())
        except RoutingError:
            return None
        if may(shard):
            return shard
    return None
