"""A site whose keys are moved while it works: processes of the application and of the operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.integration.imports import site as library_site

#: Seconds for which processes remember where a key is.
LEASE = 0.4
WRITER = 3
#: The key has rows of every kind: in tables with the key, without it, of a child model.
_FILL = """
import os
from sharded_orm import runtime
runtime.strategy("books").store.place("books", {str(n): n % 4 for n in range(1, 9)})
moment = datetime.datetime(2020, 3, 4, 5, 6, 7, 890123, tzinfo=datetime.UTC)
for writer in (1, 2, 3, 7):
    topics = [Topic.objects.create(id=writer * 100 + n, writer_id=writer, name=f"topic {n} of {writer}") for n in range(3)]
    for n in range(5):
        book = Book.objects.create(
            writer_id=writer, title=f"book {n} — ‽ of {writer}", extra={"n": n} if n else None,
            price=Decimal("12.30"), weight=0.1 + n, cover=bytes([0, 255, n]), code=uuid.UUID(int=n),
            published=n > 2, length=datetime.timedelta(days=n, microseconds=5), day=moment.date(),
            time=moment.time(),
        )
        book.topics.set(topics[: n % 4])
        Review.objects.create(writer_id=writer, book=book, number=n)
    Novel.objects.create(writer_id=writer, title="a novel", genre="crime")
    if writer % 4 == 3:  # Their ids are counted by each shard, so other shards must not have them.
        Counted.objects.create(writer_id=writer, name=f"counted by {writer}")
"""
#: Everything of a key, as an application sees it.
_ROWS = """
def rows_of(writer):
    rows = {}
    for model in (Topic, Book, Novel, Review):
        names = [f.attname for f in model._meta.concrete_fields]
        rows[model.__name__] = sorted(map(repr, model.objects.filter(writer_id=writer).values_list(*names)))
    rows["topics"] = sorted(
        (book.pk, topic.name) for book in Book.objects.filter(writer_id=writer) for topic in book.topics.all()
    )
    rows["Counted"] = sorted(Counted.objects.filter(writer_id=writer).values_list("name", flat=True))
    return rows
def counts(writer):
    tables = [m._meta.db_table for m in (Topic, Book, Review, Counted)]
    return {n: sum(execute(f"books_{n:05d}", f"SELECT COUNT(*) FROM {t} WHERE writer_id = %s", writer)[0][0]
            for t in tables) for n in range(4)}
"""
_PLACE = """
from sharded_orm.models import Placement
def place(writer):
    return Placement.objects.using("directory").get(group="books", key=str(writer)).shard
"""
#: What a test needs that takes the steps of a mover itself.
MOVER = """
from sharded_orm.backends.change_capture import ChangeCapture
from sharded_orm.backends.row_copy import RowCopy
from sharded_orm.exceptions import LeaseLost, MoveFailed, OperationHeld
from sharded_orm.models import KeyMove, OperationRun
from sharded_orm.operations import moves
from sharded_orm.operations.moves import key_mover, leftovers, record, runner
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.key_mover import KeyMover
from sharded_orm.operations.moves.plan import plan_moves
from sharded_orm.operations.moves.record import MoveRecord
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.tables import tables_of_group
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping

def announced(key, target):
    plan = plan_moves("books", [key], target)
    (move,) = record.announce("books", plan.keys, moves.MoveOptions().keep)
    move.value = GroupKeys("books").stored(move.value)
    return move

def mover_with(sessions):
    return KeyMover(tables_of_group("books"), moves.MoveOptions(), sessions, Stopping(), lambda: None)

def after(owner, name, action, times=1):
    \"\"\"Call ``action`` with the same arguments after the first calls of a method.\"\"\"
    method, left = getattr(owner, name), [times]
    def wrapper(*args, **kwargs):
        result = method(*args, **kwargs)
        if left[0]:
            left[0] -= 1
            action(*args, **kwargs)
        return result
    setattr(owner, name, wrapper)

def before(owner, name, action, times=1):
    \"\"\"Call ``action`` with the same arguments before the first calls of a method.\"\"\"
    method, left = getattr(owner, name), [times]
    def wrapper(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            action(*args, **kwargs)
        return method(*args, **kwargs)
    setattr(owner, name, wrapper)
"""


@dataclass(frozen=True)
class State:
    """A key: its rows as the application reads them, their number on each shard, and its shard."""

    rows: str
    counts: dict[int, int]
    place: int


class Site(library_site.Site):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.content["sharded_orm"]["PLACEMENT_LEASE"] = LEASE
        self.lock_early()
        self.save()

    def initialize(self) -> None:
        self.prepare()
        self.fill()

    def fill(self, count: int = 0) -> None:
        self.run(_FILL)

    def rows(self, writer: int = WRITER) -> str:
        """What the application reads of a key."""
        return self.run(f"{_ROWS}print(rows_of({writer}))")

    def counts(self, writer: int = WRITER) -> dict[int, int]:
        """The number of rows of a key in the tables that have the key, by shard."""
        counts: dict[int, int] = eval(self.run(f"{_ROWS}print(counts({writer}))"))
        return counts

    def state(self, writer: int = WRITER) -> State:
        """The rows, counts and place of a key, read by one process."""
        code = f"{_ROWS}{_PLACE}print(repr(rows_of({writer})), counts({writer}), place({writer}), sep='\\n')"
        rows, counts, place = self.run(code).splitlines()
        return State(rows, eval(counts), int(place))

    def place(self, writer: int = WRITER) -> int:
        return int(self.run(f"{_PLACE}print(place({writer}))"))

    def move(self, *arguments: str, code: int = 0, **environment: str) -> library_site.Done:
        return self.manage("keys", "move", "books", *arguments, code=code, **environment)

    def left(self) -> str:
        """What moves have left on the shards: tables, triggers, fences and copied rows."""
        return self.run(_LEFT)


_LEFT = """
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.tables import tables_of_group
from sharded_orm.models import KeyMove
left = []
with ShardSessions("books") as sessions:
    for number in range(4):
        capture = sessions.capture(number)
        left += [f"{number}: {name}" for name in sorted(capture.triggers())]
        alias = f"books_{number:05d}"
        with connections[alias].cursor() as cursor:
            for table in connections[alias].introspection.table_names(cursor):
                if table.startswith("sharded_orm_capture_"):
                    count = execute(alias, f"SELECT COUNT(*) FROM {table}")[0][0]
                    if count or "rows" not in table:
                        left.append(f"{number}: {table} {count}")
left += [str(row) for row in KeyMove.objects.using("directory").filter(in_flight=True)]
print("; ".join(left))
"""
