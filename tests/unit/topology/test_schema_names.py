"""Valid templates of schema names, and whether two groups share a name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.topology.schema_names import SchemaNames, shared_number

Span = tuple[int, int]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{group}_{shard:05d}", "photos_00042"),
        ("{shard:05}", "00042"),
        ("db{shard}", "db42"),
        ("db{shard:d}x", "db42x"),
        ("{{{group}}}{shard:03d}", "{photos}042"),
        ("db{shard:01d}", "db42"),
    ],
)
def test_a_name_is_what_format_makes(template: str, name: str) -> None:
    names = SchemaNames.of(template, "photos")
    assert f"{names.before}{42:0{names.width}d}{names.after}" == name
    assert template.format(group="photos", shard=42) == name


@pytest.mark.parametrize(
    "template",
    [
        "same", "db_{number}", "db_{", "db_}", 7, "{}", "{0}", "{shard:x}", "{shard:5d}", "{shard:,}",
        "{shard!r}", "{shard.real}", "{shard[0]}", "{group:>9}{shard}", "{group!r}{shard}",
        "{shard}{shard}", "{shard:030000000d}", "{shard:0{group}}", "{shard:\u0660\u0665d}",
    ],
)  # fmt: skip
def test_any_other_template_is_refused(template: object) -> None:
    with pytest.raises(ValueError, match="shard"):
        SchemaNames.of(template, "photos")


@pytest.mark.parametrize(
    ("one", "other", "number"),
    [
        ("db_{shard:05d}", "db_{shard:05d}", 3),
        ("db_{shard:05d}", "db_{shard}", 10_000),
        ("db_{shard:05d}", "xy_{shard:05d}", None),
        # "db1" and "00042", or "db" and "100042".
        ("db{shard}", "db1{shard:05d}", None),
        ("db{shard}", "db1{shard:04d}", 3),
        ("db{shard}1", "db{shard}", 31),
        ("{shard}_0", "0_{shard}", None),
    ],
)
def test_names_that_two_templates_share(one: str, other: str, number: int | None) -> None:
    spans = [(3, 60_000)]
    assert (
        shared_number(SchemaNames.of(one, "a"), spans, SchemaNames.of(other, "b"), spans) == number
    )


def test_groups_of_any_size_are_compared_at_once() -> None:
    # One by one this would never end.
    many = [(0, 10**30), (10**30 + 1, 10**40)]
    one, other = SchemaNames.of("a{shard}", "a"), SchemaNames.of("b{shard}", "b")
    assert shared_number(one, many, other, many) is None
    assert shared_number(one, many, one, [(10**39, 10**39)]) == 10**39


TEMPLATES = st.builds(
    lambda before, width, after: f"{before}{{shard{width}}}{after}",
    st.text("01a", max_size=2),
    st.sampled_from(["", ":d", ":01d", ":02d", ":03d"]),
    st.text("01a", max_size=2),
)


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Ascending spans that do not overlap."""
    marks = sorted(draw(st.sets(st.integers(0, 1200), min_size=2, max_size=6)))
    return [(first, last - 1) for first, last in itertools.pairwise(marks) if draw(st.booleans())]


def all_names(template: str, among: Sequence[Span]) -> dict[str, int]:
    return {
        template.format(shard=number): number
        for first, last in among
        for number in range(first, last + 1)
    }


@given(TEMPLATES, spans(), TEMPLATES, spans())
def test_it_is_what_writing_out_all_names_would_tell(
    one: str, of_one: list[Span], other: str, of_other: list[Span]
) -> None:
    names, others = all_names(one, of_one), all_names(other, of_other)
    found = shared_number(SchemaNames.of(one, "a"), of_one, SchemaNames.of(other, "b"), of_other)
    if found is None:
        assert names.keys().isdisjoint(others)
    else:
        assert other.format(shard=found) in names
        assert found in others.values()
