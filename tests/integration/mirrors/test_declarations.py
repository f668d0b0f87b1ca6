"""Declarations that cannot be kept are refused by system checks, and before the first write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.imports.site import site_on
from tests.integration.mirrors.site import Site

_DECLARE = """
from django.db import models
from django.core import checks
from sharded_orm import ShardedModel, TicketField
from sharded_orm.contrib.mirrors.checks import check_mirrors
from sharded_orm.contrib.mirrors.declaration import forget
from sharded_orm.contrib.mirrors.querysets import MirrorManager
class Made(models.BigIntegerField):
    def pre_save(self, row, add):
        return 7
OWN = dict(note_id=models.BigIntegerField(primary_key=True), author_id=models.BigIntegerField())
def declare(name, fields, key="author_id", manager=None, **options):
    meta = type("ShardMeta", (), {"group": "books", "shard_key": key, **options})
    attributes = {"__module__": "tests.integration.mirrors.notes.models", "ShardMeta": meta, **fields}
    return type(ShardedModel)(name, (ShardedModel,), attributes)
def fields(**others):
    return {**{name: field.clone() for name, field in OWN.items()}, **others}
def show():
    for error in check_mirrors():
        print(error.id.rpartition(".")[2], error.msg)
"""
#: What is declared, and a part of the error.
WRONG = {
    "no such source": ("declare('M', fields(), mirror_of='notes.Nothing')", "E001 notes.M cannot be a mirror: mirror_of names 'notes.Nothing'"),
    "a source without shards": ("declare('M', fields(), mirror_of='contenttypes.ContentType')", "E001 notes.M cannot be a mirror: its source contenttypes.ContentType is not a sharded model"),
    "a mirror of a mirror": ("declare('M', fields(), mirror_of='notes.WrittenNote')", "E002 notes.M cannot be a mirror: its source notes.WrittenNote is itself a mirror. Mirror notes.Note instead"),
    "a circle": ("declare('M', fields(), mirror_of='notes.N'); declare('N', fields(), mirror_of='notes.M')", "E002 notes.M cannot be a mirror: mirrors mirror one another in a circle (notes.M -> notes.N -> notes.M)"),
    "itself": ("declare('M', fields(), mirror_of='notes.M')", "E002 notes.M cannot be a mirror: mirrors mirror one another in a circle (notes.M -> notes.M"),
    "ids that shards count": ("declare('S', dict(author_id=models.BigIntegerField())); declare('M', dict(id=models.BigIntegerField(primary_key=True), author_id=models.BigIntegerField()), mirror_of='notes.S')", "E004 notes.M cannot be a mirror: the primary key 'id' of the source notes.S is not unique over all shards"),
    "another primary key": ("declare('M', dict(id=models.BigIntegerField(primary_key=True), author_id=models.BigIntegerField()), mirror_of=Note)", "E004 notes.M cannot be a mirror: its primary key is 'id'. It must be that of the source, 'note_id'"),
    "another field": ("declare('M', fields(colour=models.IntegerField()), mirror_of=Note)", "E005 notes.M cannot be a mirror: its field 'colour' is no field of the source notes.Note"),
    "another type": ("declare('M', fields(text=models.IntegerField()), mirror_of=Note)", "E005 notes.M cannot be a mirror: its field 'text' is a IntegerField"),
    "a clock of its own": ("declare('M', fields(changed_at=models.DateTimeField(auto_now=True)), mirror_of=Note)", "E005 notes.M cannot be a mirror: its field 'changed_at' has auto_now"),
    "a constraint": ("declare('M', fields(answers=models.ForeignKey(Note, models.CASCADE, related_name='+')), mirror_of=Note)", "E006 notes.M cannot be a mirror: its foreign key 'answers' has a constraint"),
    "a condition on another table": ("declare('M', fields(), mirror_of=Note, condition=Q(answers__text='x'))", "E007 notes.M cannot be a mirror: condition <Q: (AND: ('answers__text', 'x'))> reads other tables"),
    "another table inside of a condition": ("declare('M', fields(), mirror_of=Note, condition=Q(text='') & ~(Q(is_public=True) | Q(answers__text='x')))", "E007 notes.M cannot be a mirror: condition"),
    "an expression as a condition": ("declare('M', fields(), mirror_of=Note, condition=Q(models.Exists(Topic.objects.filter(owner_id=1))))", "E007 notes.M cannot be a mirror: condition"),
    "a condition on the time": ("declare('M', fields(), mirror_of=Note, condition=Q(changed_at__lt=models.functions.Now()))", "E007 notes.M cannot be a mirror: condition"),
    "a condition that is none": ("declare('M', fields(), mirror_of=Note, condition=True)", "E007 notes.M cannot be a mirror: condition is True; it must be a Q object"),
    "an unknown field in a condition": ("declare('M', fields(), mirror_of=Note, condition=Q(colour=1))", "E007 notes.M cannot be a mirror: condition <Q: (AND: ('colour', 1))> cannot be used"),
    "a table of a parent": ("S = declare('S', fields()); declare('M', fields(), mirror_of=S); type(ShardedModel)('T', (S,), {'__module__': S.__module__})", "E003 notes.M cannot be a mirror: notes.S shares its rows with another table"),
    "an id that the field makes": ("S = declare('S', {'note_id': Made(primary_key=True), 'author_id': OWN['author_id'].clone()}); declare('M', fields(), mirror_of=S)", "E004 notes.M cannot be a mirror: the primary key 'note_id' of the source notes.S has a pre_save() of its own"),
    "neither yes nor no": ("declare('M', fields(), mirror_of=Note, verify_reads='yes')", "E008 notes.M cannot be a mirror: verify_reads is 'yes'; it must be True or False"),
    "reads that cannot be verified": ("declare('M', fields(objects=MirrorManager()), mirror_of=Note, verify_reads=True)", "E008 notes.M cannot be a mirror: verify_reads needs the field 'owner_id'"),
    "reads that nobody verifies": ("declare('M', fields(owner_id=models.BigIntegerField()), mirror_of=Note, verify_reads=True)", "E008 notes.M has verify_reads = True, and its default manager does not verify reads."),
}  # fmt: skip


@pytest.fixture(scope="module")
def small_site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with site_on("sqlite", request, tmp_path_factory.mktemp("declarations"), Site) as site:
        yield site


@pytest.mark.parametrize("what", WRONG)
def test_a_declaration_is_refused(small_site: Site, what: str) -> None:
    code, error = WRONG[what]
    out = small_site.run(
        _DECLARE
        + f"""
{code}
show()
forget()
try:
    note()
except InvalidMirror as refusal:
    print("refused")
    print(QuerySet(Note, using="books_00001").count())
"""
    )
    lines = out.splitlines()
    assert any(line.startswith(error) for line in lines), out
    if "nobody verifies" not in what:
        assert lines[-2:] == ["refused", "0"], out


_VERIFIED = "fields(owner_id=models.BigIntegerField(), objects=MirrorManager())"


def test_a_base_manager_that_does_not_verify_reads_is_warned_of(small_site: Site) -> None:
    out = small_site.run(
        _DECLARE
        + f"""
class Meta:
    app_label = "notes"
    base_manager_name = "objects"
declare("Bare", {_VERIFIED}, mirror_of=Note, verify_reads=True)
declare("Named", {{"Meta": Meta, **{_VERIFIED}}}, mirror_of=Note, verify_reads=True)
declare("Unverified", {_VERIFIED}, mirror_of=Note)
show()
"""
    )
    (line,) = [
        line
        for line in out.splitlines()
        if any(name in line for name in ("Bare", "Named", "Unver"))
    ]
    assert line.startswith("W010 notes.Bare has verify_reads = True, and its base manager does not")
