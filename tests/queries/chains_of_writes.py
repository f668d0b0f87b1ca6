"""Random writes of rows with columns of all types: ``save()``, ``update()`` and inserts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import JSONField
from django.db.models.functions import Lower
from django.db.models.signals import post_save, pre_save
from hypothesis import strategies as st

from tests.queries.chains import Chain, Values, chains, keywords, weighted
from tests.queries.chains_of_columns import COLUMNS, MEANINGS, PLACES, values_of
from tests.queries.conftest import START
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
_updates = st.builds(
    "Sample.objects{}{}{}.update({})".format,
    st.sampled_from([*[""] * 7, ".using(<alias>)"]),
    st.sampled_from(_FILTERS),
    st.sampled_from(_OTHER_CALLS),
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


@st.composite
def _saves(draw: st.DrawFn) -> str:
    fields = draw(_fields)
    row = draw(st.sampled_from(_ROWS)).format(row=draw(st.sampled_from(_READS)), fields=fields)
    names = [field.split("=")[0] for field in fields.split(", ")]
    save = draw(st.sampled_from(_SAVES)).format(row=row, names=names)
    return draw(st.sampled_from(_SURROUNDINGS)).format(save)


@st.composite
def _inserts(draw: st.DrawFn) -> str:
    insert = draw(st.sampled_from(_INSERTS)).format(fields=draw(_fields))
    return draw(st.sampled_from(_SURROUNDINGS)).format(insert)


def chains_of_writes() -> st.SearchStrategy[list[Chain]]:
    """Writes of :class:`Sample` that differ only in values."""
    functions = (changed, adding, deleted, saved, heard, with_auto_now)
    meanings = MEANINGS | {thing.__name__: thing for thing in (*functions, JSONField, Lower)}
    return chains(weighted((4, _saves()), (3, _updates), (3, _inserts())), _PLACES, meanings)
