"""Validation of the rows of sharded models. Each row is compared with the rows of its shard."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.querysets.route import colocation_on, scoped
from sharded_orm.models.querysets.validation import clean_reference, does_not_exist
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.bound_key import unbound
from sharded_orm.models.sharding.bound_rows import has_other_key, refuse_other_key
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.key_sources import unique_fields
from sharded_orm.models.sharding.key_validation import clean_key
from sharded_orm.models.sharding.options import ShardOptions, group_of
from sharded_orm.models.sharding.same_key import key_for_related
from sharded_orm.models.sharding.statements import check_constraint, check_insert


class RowValidation(models.Model):
    """The methods of a sharded model that Django's forms and ``full_clean()`` call.

    They write nothing. If the shard key of a row has no shard yet, they assign none to it.
    """

    class Meta:
        abstract = True

    @classmethod
    def _shard_options(cls) -> ShardOptions:
        raise NotImplementedError  # ShardedModel has it.

    def clean_fields(self, exclude: Any = None) -> None:
        # Overrides Model.clean_fields(), which could look for the rows to which foreign keys refer
        # on a wrong shard. If the referenced row is of another group, the value of the foreign key
        # determines the shard. If it is of the same group, it must be on this row's shard, and does
        # not exist if this row has no shard yet. Add a condition on the shard key if both rows must
        # have the same key.
        excluded = set(exclude or ())
        options = self._shard_options()
        key, errors = options.key, dict[str, Any]()
        if key is not None and key.name in excluded:
            refuse_other_key(self)
        elif key is not None:
            try:
                clean_key(options, self)
            except ValidationError as exc:
                errors[key.name] = exc.error_list
                excluded.add(key.name)
        references = [
            (field, group_of(field.remote_field.model))
            for field in self._meta.fields
            if isinstance(field, models.ForeignKey)
            and field.name not in excluded
            and not field.remote_field.parent_link
            and getattr(self, field.attname) not in field.empty_values
        ]
        unplaced = [field for field, group in references if group == options.group]
        alias = self._validation_alias()
        if alias is not None:
            unplaced = []
        # Maps each foreign key to the alias of the shard on which the referenced row is looked up.
        # None if the value of the foreign key determines the shard.
        looked_up = {
            field: alias if group == options.group else None
            for field, group in references
            if field not in unplaced
            and (
                group not in (None, options.group)
                or key_for_related(field.remote_field.model, field, self)
            )
        }
        try:
            super().clean_fields(exclude=excluded.union(f.name for f in (*unplaced, *looked_up)))
        except ValidationError as exc:
            errors = exc.update_error_dict(errors)
        for field, place in looked_up.items():
            try:
                clean_reference(field, self, place)
            except ValidationError as exc:
                errors[field.name] = exc.error_list
        if unplaced and key is not None and key.name not in errors:
            has_key = getattr(self, key.attname) is not None or options.awaits_key(self)
            for field in unplaced if has_key else ():
                errors[field.name] = [does_not_exist(field, getattr(self, field.attname))]
        if errors:
            raise ValidationError(errors)

    def _get_unique_checks(
        self, exclude: Any = None, include_meta_constraints: bool = False
    ) -> tuple[list[Any], list[Any]]:
        # Overrides Model._get_unique_checks(), which only knows what is unique on a shard. Values of
        # unique lookups are unique over all shards. A formset also compares its forms by these
        # checks.
        unique_checks, date_checks = super()._get_unique_checks(  # type: ignore[misc]  # not in the stubs
            exclude=exclude, include_meta_constraints=include_meta_constraints
        )
        for check in self._lookup_checks():
            if check[1][0] not in (exclude or ()) and check not in unique_checks:
                unique_checks.append(check)
        return unique_checks, date_checks

    def _lookup_checks(self) -> list[tuple[type[models.Model], tuple[str]]]:
        """Return a unique check for each unique lookup, as ``_get_unique_checks()`` returns them."""
        return [(type(self), (field.name,)) for field in unique_fields(type(self))]

    def _perform_unique_checks(self, unique_checks: Any) -> Any:
        # Overrides Model._perform_unique_checks(), because values must be unique only on this row's
        # shard, except those of unique lookups.
        over_shards = self._lookup_checks()
        on_shard = [check for check in unique_checks if check not in over_shards]
        errors = self._perform_checks_on_shard(on_shard)
        for check in over_shards:
            if check in unique_checks and self._is_taken(self._meta.get_field(check[1][0])):
                errors.setdefault(check[1][0], []).append(self.unique_error_message(*check))
        return errors

    def _is_taken(self, field: Any) -> bool:
        """Whether a row other than this one has its value of ``field``, on any shard and under any
        key.
        """
        value = getattr(self, field.attname)
        if value is None or hasattr(value, "resolve_expression"):
            return False
        with unbound():
            rows = list(type(self)._default_manager.filter(**{field.name: value})[:2])
        return any(self._state.adding or not self._is_same_row(row) for row in rows)

    def _is_same_row(self, row: models.Model) -> bool:
        """Whether ``row``, which was just read, has the primary key and the shard key of this row."""
        key = self._shard_options().key
        try:
            return all(
                getattr(row, each.attname) == each.to_python(getattr(self, each.attname))
                for each in (self._meta.pk, *([] if key is None else [key]))
            )
        except ValidationError:
            return False  # The value cannot be a key. The validation of its field reports it.

    def _perform_checks_on_shard(self, unique_checks: Any) -> dict[str, Any]:
        # If the shard key has no shard yet, no stored row has the key, and nothing can be a
        # duplicate.
        alias = self._validation_alias()
        if alias is None:
            return {}
        check_insert(colocation_on(self._shard_options(), alias), [self])
        # A value must differ from the values of all rows on the shard, whatever their shard keys.
        # So query the rows of all keys, with unbound().
        with scoped(alias), unbound():
            errors: dict[str, Any] = super()._perform_unique_checks(unique_checks)  # type: ignore[misc]  # not in the stubs
        return errors

    def _perform_date_checks(self, date_checks: Any) -> Any:
        alias = self._validation_alias()
        if alias is None:
            return {}
        with scoped(alias), unbound():
            return super()._perform_date_checks(date_checks)  # type: ignore[misc]  # not in the stubs

    def validate_constraints(self, exclude: Any = None) -> None:
        # Overrides Model.validate_constraints(), which asks the router for an alias. If the key has
        # no shard yet, the router would choose one and record it.
        for _, constraints in self.get_constraints():
            for constraint in constraints:
                check_constraint(constraint)
        alias = self._validation_alias()
        if alias is not None:
            check_insert(colocation_on(self._shard_options(), alias), [self])
            with unbound():
                super().validate_constraints(exclude=exclude)
            return
        # The row has no shard yet, so nothing can be a duplicate. A check constraint reads no other
        # rows, so it can be evaluated on any shard.
        errors: dict[str, Any] = {}
        using = runtime.shard(self._shard_options().group, 0).alias
        for model, constraints in self.get_constraints():
            for constraint in constraints:
                if isinstance(constraint, models.CheckConstraint):
                    try:
                        constraint.validate(model, self, exclude=exclude, using=using)
                    except ValidationError as exc:
                        errors = exc.update_error_dict(errors)
        if errors:
            raise ValidationError(errors)

    def _validation_alias(self) -> str | None:
        """Return the alias of the shard whose rows must be queried to validate this row.

        Return None if no rows need to be queried. Then the key has no shard yet, or the row cannot
        be saved because its key is not the bound key (set by ``bound()``).
        """
        options = self._shard_options()
        try:
            if has_other_key(self):
                return None
            if not self._state.adding and self._state.db not in (None, options.group):
                return str(current_alias(options, self))
            if options.key is None:
                return None
            if getattr(self, options.key.attname) is None and not options.awaits_key(self):
                return None
            shard = row_placement.locate(options, self)
        except (ShardKeyRequired, TypeError, ValueError, ValidationError):
            # The value cannot be a shard key. Ignore this here, because the validation of the key's
            # field reports it.
            return None
        return shard.alias if shard is not None else None
