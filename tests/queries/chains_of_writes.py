"""Random writes of rows with columns of all types: ``save()``, ``update()`` and inserts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from django.db.models import JSONField
from django.db.models.functions import Lower
from django.db.models.signals import post_save, pre_save
from hypothesis import strategies as st

from tests.queries.chains import Chain, Values, chains, formatted, keywords, one_of, weighted
from tests.queries.chains_of_columns import COLUMNS, MEANINGS, PLACES, values_of
from tests.queries.conftest import START
from tests.queries.small_chains import Frame, small_chains
from tests.queries.twins import comparable_value
from tests.samples.models import Sample

#: What may be written besides the values that are compared.
_WRITTEN = [
    "-7", "2**63", "10**30", "-0.0", "'x' * 70", "'%s'", "'a\\x00b'", "' 1'", "b''", "{'a': [1, None]}",
    "SimpleLazyObject(lambda: 5)", "F('number') + 1", "Value('x')", "Value(None, JSONField())", "Lower('name')", "object",
]  # fmt: skip
_NAMES = [name for name in COLUMNS if name != "id"]


def _written(column: str) -> Values:
    fitting, similar, others = values_of(column)
    # For bytes, a number is their count, and no server takes two gigabytes.
    more = [value for value in _WRITTEN if column != "blob" or value not in ("2**31", "2**63")]
    return Values(fitting[:4], [*fitting[4:], *similar], [*others, *more])


_PLACES: dict[str, Values] = {
    **PLACES,
    **{column: _written(column) for column in _NAMES},
    "key": Values(["ONE"], ["TWO", "'1'", "True", "Number.ONE"]),
    "id": Values(["1", "2", "99"], ["2**70", "'1'", "None"]),
    "ids": Values(["[1]", "[2, 1, 2]", "(1, 2, 99)", "{2}"], ["[1, 2**70]", "['1']", "[]", "[None]", "[1, '2']"]),
    "other_id": Values(["2", "99"], ["2**70", "'1'", "'x'", "None", "1.0"]),
    "other_key": Values(["NEAR", "TWO"], ["'1'", "True", "None"]),
    **{name: values_of("number") for name in ("number__gt", "number__lt")},
    "day__lt": values_of("day"),
    "flag__isnull": values_of("flag", "__isnull"),
    "new_id": Values(["50"], ["1", "'51'", "None"]),
}  # fmt: skip

# -- What the expressions call


def changed(row: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(row, name, value)
    return row


def adding(row: Any) -> Any:
    row._state.adding = True
    return row


def deleted(row: Any) -> Any:
    """Return a row that nobody knows to be deleted."""
    Sample.objects.filter(owner=1, id=1).delete()
    return row


def saved(row: Any, **kwargs: Any) -> Any:
    row.save(**kwargs)
    state = row._state
    return comparable_value(row), state.db, state.adding, sorted(vars(state))


def saved_alone(row: Any, **values: Any) -> Any:
    """Save these values alone."""
    return saved(changed(row, **values), update_fields=[*values])


def heard(write: Callable[[], Any], *names: str, **values: Any) -> Any:
    """Write with receivers of signals, the first of which changes values of the row."""
    calls: list[Any] = []

    def receive(instance: Any, signal: Any, **kwargs: Any) -> None:
        kwargs.pop("sender")
        calls.append((signal is pre_save, sorted(kwargs.items(), key=str)))
        if signal is pre_save:
            changed(instance, **values)

    signals = [{"pre_save": pre_save, "post_save": post_save}[name] for name in names]
    for signal in signals:
        signal.connect(receive, sender=Sample)
    try:
        return write(), str(calls)
    finally:
        for signal in signals:
            signal.disconnect(receive, sender=Sample)


def with_auto_now(write: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample._meta.get_field("at"), "auto_now", True)
        patch.setattr("django.utils.timezone.now", lambda: START)
        return write()


# -- Forms

_fields = weighted((3, keywords(_NAMES, 1)), (2, keywords(_NAMES, 3)))
_FILTERS = [
    *[".filter(owner=<key>)"] * 3, *[".filter(owner=<key>, id=<id>)"] * 3, ".filter(id=<id>, owner=<key>)",
    ".filter(owner=<key>, number__gt=<number__gt>)", *[".filter(owner=<key>, id__in=<ids>)"] * 3,
    ".filter(owner=<key>, name=<name>)", ".filter(flag__isnull=<flag__isnull>, owner=<key>, id=<id>)",
    ".filter(owner=<key>, flag=<flag>)", ".filter(owner=<key>, day__lt=<day__lt>)", ".filter(id=<id>).filter(owner=<key>)",
    ".filter(owner=<key>).filter(owner=<key>)", ".filter(Q(number=<number>) | ~Q(name=<name>), owner=<key>)", "",
]  # fmt: skip
_OTHER_CALLS = [
    *[""] * 8, ".exclude(number=<number>)", ".exclude(number__lt=<number__lt>, name=<name>)", ".exclude(id__in=<ids>)",
    ".exclude(name=<name>)", ".exclude(owner=<key>)", ".using(<alias>)", ".order_by('id')", "[:2]", ".values('id')",
    ".all()",
]  # fmt: skip
_updates = formatted(
    "Sample.objects{}{}{}.update({})",
    one_of(*[""] * 7, ".using(<alias>)"),
    one_of(*_FILTERS),
    one_of(*_OTHER_CALLS),
    _fields,
)
_ROWS = [
    *["changed({row}, {fields})"] * 8, "changed(changed({row}, {fields}), id=<other_id>)",
    "changed(changed({row}, {fields}), owner=<other_key>)", "adding(changed({row}, {fields}))", "deleted(changed({row}, {fields}))",
]  # fmt: skip
_READS = [
    *["Sample.objects.get(owner=ONE, id=1)"] * 6, "Sample.objects.using(<alias>).get(owner=ONE, id=1)",
    "Sample.objects.only('owner', 'number').get(owner=ONE, id=1)", "Sample(id=1, owner=ONE)",
]  # fmt: skip
_SAVES = [
    *["saved({row})"] * 4, *["saved({row}, update_fields={names})"] * 6, "saved({row}, force_update=True)",
    "saved({row}, update_fields=[])", "saved({row}, update_fields=['owner'])", "saved({row}, update_fields=['nothing'])",
    "saved({row}, using=<alias>)", "saved({row}, update_fields={names}, using=<alias>)",
]  # fmt: skip
_INSERTS = [
    *["saved(Sample(id=<new_id>, owner=<key>, {fields}))"] * 2,
    *["saved(Sample(id=<new_id>, owner=<key>, {fields}), force_insert=True)"] * 3,
    *["Sample.objects.bulk_create([Sample(id=<new_id>, owner=<key>, {fields})])"] * 2,
    "Sample.objects.create(id=<new_id>, owner=<key>, {fields})",
    "Sample.objects.using(<alias>).create(id=<new_id>, owner=<key>, {fields})",
]  # fmt: skip
_SURROUNDINGS = [
    *["{}"] * 12, "with_auto_now(lambda: {})", "heard(lambda: {}, 'pre_save', 'post_save')", "heard(lambda: {}, 'post_save')",
    "heard(lambda: {}, 'pre_save', number=<number>)", "heard(lambda: {}, 'pre_save', 'post_save', name=<name>)",
]  # fmt: skip


def _saves(pick: Random) -> str:
    fields = _fields(pick)
    row = pick.choice(_ROWS).format(row=pick.choice(_READS), fields=fields)
    names = [field.split("=")[0] for field in fields.split(", ")]
    save = pick.choice(_SAVES).format(row=row, names=names)
    return pick.choice(_SURROUNDINGS).format(save)


def _inserts(pick: Random) -> str:
    insert = pick.choice(_INSERTS).format(fields=_fields(pick))
    return pick.choice(_SURROUNDINGS).format(insert)


# -- Small chains

_SMALL_WRITES = [
    *["Sample.objects.filter(owner=<key>, id=<id>)CONDITIONS.update(FIELDS)"] * 2, "Sample.objects.filter(owner=<key>)CONDITIONS.update(FIELDS)",
    *["saved(changed(Sample.objects.get(owner=ONE, id=1), FIELDS))"] * 2,
    *["saved_alone(Sample.objects.get(owner=ONE, id=1), FIELDS)"] * 2,
    *["saved(Sample(id=<new_id>, owner=<key>, FIELDS), force_insert=True)"] * 2,
    "Sample.objects.bulk_create([Sample(id=<new_id>, owner=<key>, FIELDS)])",
]  # fmt: skip
_COMPARED = [
    "number__gt",
    "number__lt",
    "day__lt",
    "flag__isnull",
    "number__in",
    "name__in",
    "code__in",
    "at__gt",
]
_small_conditions = weighted(
    (2, one_of("")),
    (1, formatted(".filter({})", keywords(_COMPARED, 1))),
    (1, formatted(".exclude({})", keywords(_COMPARED, 1))),
)


def _small_parts(pick: Random) -> list[str]:
    return [pick.choice(_SMALL_WRITES), _small_conditions(pick), _fields(pick)]


def _joined(parts: Sequence[str]) -> str:
    write, conditions, fields = parts
    return write.replace("CONDITIONS", conditions).replace("FIELDS", fields)


_MEANINGS = MEANINGS | {
    thing.__name__: thing
    for thing in (
        changed,
        adding,
        deleted,
        saved,
        saved_alone,
        heard,
        with_auto_now,
        JSONField,
        Lower,
    )
}


def chains_of_writes() -> st.SearchStrategy[list[Chain]]:
    """Writes of :class:`Sample` that differ only in values."""
    return chains(weighted((4, _saves), (3, _updates), (3, _inserts)), _PLACES, _MEANINGS)


def small_chains_of_writes() -> st.SearchStrategy[list[Chain]]:
    """Small writes of :class:`Sample` that differ in one value or in one part."""
    return small_chains(Frame(_small_parts, _joined, compared=(1, 2)), _PLACES, _MEANINGS)
