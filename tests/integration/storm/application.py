"""A process of the application in the storm: it writes and reads in every way, and keeps a ledger.

Run by ``tests.integration.imports.project``, after Django is set up.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import F

from sharded_orm import runtime, uncached
from sharded_orm.backends.fence_messages import is_deadlock
from sharded_orm.backends.sqlstate import sqlstate_of
from sharded_orm.exceptions import (
    CacheUnavailable,
    KeyMoved,
    PartialCommitError,
    ScatterError,
    ShardMoved,
    TopologyError,
)
from sharded_orm.ids.tickets.exceptions import TicketServersUnavailable
from tests.integration.imports.library.models import Account, Book, Novel, Order, Topic
from tests.integration.storm.ledger import (
    DONE,
    NOT_DONE,
    UNKNOWN,
    Change,
    Ledgers,
    RowName,
    Writing,
)

#: Rows of a process; above this number it rather deletes.
MOST_ROWS = 40
_LOST = frozenset({2002, 2003, 2006, 2013, 2055, 1053, 1927, 1317})
_IN_TRANSACTION = ("transaction", "delete with link")
#: Raw SQL is not run again by the library.
_RAW = ("raw topic",)
_SHARED = ("count", "transaction")


def run(me: int, folder: str, seed: int) -> None:
    """Work until the file ``stop`` exists."""
    Application(me, Path(folder), seed).run()


class Application:
    def __init__(self, me: int, folder: Path, seed: int) -> None:
        self._folder = folder
        self._dice = random.Random(f"{seed} {me}")
        self._ledger = Writing(folder / f"{me:05d}.ledger")
        self._all = Ledgers(folder)
        self._token = me * 10**6
        #: The rows of this process that are there for certain, and their values.
        self._own: dict[RowName, Any] = {}
        self._books = dict(
            Book.objects.scatter().filter(title="shared").values_list("writer_id", "pk")
        )
        self._keys = sorted(self._books)
        self._accounts = sorted(Account.objects.scatter().values_list("name", flat=True))

    def run(self) -> None:
        writes: list[Callable[[], None]] = [
            self.create_topic, self.bulk_topics, self.raw_topic, self.save_topic, self.update_topic,
            self.link, self.unlink, self.delete_topic, self.create_novel, self.save_novel,
            self.delete_novel, self.count, self.transaction, self.create_order, self.bulk_orders,
            self.raw_order, self.order_transaction, self.change_order, self.delete_order,
        ]  # fmt: skip
        deletions = [self.delete_topic, self.delete_novel, self.delete_order]
        reads = [self.read_key, self.read_account, self.read_all, self.read_count]
        (self._folder / f"started-{self._token}").touch()
        while not (self._folder / "stop").exists():
            if self._dice.random() < 0.25:
                self._attempt_read(self._dice.choice(reads))
            elif len(self._own) > MOST_ROWS:
                self._dice.choice(deletions)()
            else:
                self._dice.choice(writes)()

    # ##### Writes of the group with a directory #####

    def create_topic(self) -> None:
        key, row = self._new("topic")
        self._write(
            "create topic",
            [Change(row, None, "created")],
            lambda: Topic.objects.create(id=row.token, writer_id=key, name="created"),
        )

    def bulk_topics(self) -> None:
        key, row = self._new("topic")
        rows = [row, *(RowName("topic", row.owner, self._next()) for _ in range(3))]
        self._write(
            "bulk topics",
            [Change(row, None, "bulk") for row in rows],
            lambda: Topic.objects.bulk_create(
                Topic(id=row.token, writer_id=key, name="bulk") for row in rows
            ),
        )

    def raw_topic(self) -> None:
        key, row = self._new("topic")

        def insert() -> None:
            alias = runtime.shard("books", runtime.strategy("books").locate(key)).alias
            execute(
                alias,
                "INSERT INTO library_topic (id, writer_id, name) VALUES (%s, %s, 'raw')",
                row.token,
                key,
            )

        self._write("raw topic", [Change(row, None, "raw")], insert)

    def save_topic(self) -> None:
        if row := self._known("topic"):
            name = f"saved {self._next()}"
            self._write(
                "save topic",
                [Change(row, self._own[row], name)],
                lambda: Topic(id=row.token, writer_id=int(row.owner), name=name).save(
                    force_update=True
                ),
            )

    def update_topic(self) -> None:
        if row := self._known("topic"):
            name = f"updated {self._next()}"

            def update() -> None:
                topics = Topic.objects.filter(writer_id=int(row.owner), pk=row.token)
                self._require(topics.update(name=name) == 1, f"UPDATE has not found {row}")

            self._write("update topic", [Change(row, self._own[row], name)], update)

    def link(self) -> None:
        row = self._known("topic")
        if row and (link := row._replace(table="link")) not in self._own:
            self._write(
                "link",
                [Change(link, None, 1)],
                lambda: self._book(row).topics.add(row.token),
            )

    def unlink(self) -> None:
        if link := self._known("link"):
            self._write(
                "unlink",
                [Change(link, 1, None)],
                lambda: self._book(link).topics.remove(link.token),
            )

    def delete_topic(self) -> None:
        if row := self._known("topic"):
            link = row._replace(table="link")
            changes = [Change(row, self._own[row], None)]
            if link in self._own:
                changes.append(Change(link, 1, None))
            self._write(
                "delete topic",
                changes,
                lambda: Topic.objects.get(writer_id=int(row.owner), pk=row.token).delete(),
            )

    def create_novel(self) -> None:
        key, row = self._new("novel")
        self._write(
            "create novel",
            [Change(row, None, "new")],
            lambda: Novel.objects.create(writer_id=key, title=str(row.token), genre="new"),
        )

    def save_novel(self) -> None:
        if row := self._known("novel"):
            genre = f"genre {self._next()}"

            def save() -> None:
                novel = Novel.objects.get(writer_id=int(row.owner), title=str(row.token))
                novel.genre = genre
                novel.save()

            self._write("save novel", [Change(row, self._own[row], genre)], save)

    def delete_novel(self) -> None:
        if row := self._known("novel"):
            self._write(
                "delete novel",
                [Change(row, self._own[row], None)],
                lambda: Novel.objects.get(writer_id=int(row.owner), title=str(row.token)).delete(),
            )

    def count(self) -> None:
        key = self._dice.choice(self._keys)
        book = Book.objects.filter(writer_id=key, pk=self._books[key])

        def update() -> None:
            self._require(book.update(pages=F("pages") + 1) == 1, f"no shared book of {key}")

        self._write("count", [], update, counted=str(key))

    def transaction(self) -> None:
        key, row = self._new("topic")
        other = RowName("topic", row.owner, self._next())

        def work() -> None:
            with transaction.atomic(using="books"):
                Topic.objects.create(id=row.token, writer_id=key, name="together")
                book = Book.objects.select_for_update().get(writer_id=key, pk=self._books[key])
                book.pages += 1
                book.save(update_fields=["pages"])
                Topic.objects.create(id=other.token, writer_id=key, name="together")

        changes = [Change(each, None, "together") for each in (row, other)]
        self._write("transaction", changes, work, counted=str(key))

    # ##### Writes of the group without a directory #####

    def create_order(self) -> None:
        name, row = self._new("order")
        self._write(
            "create order",
            [Change(row, None, 1)],
            lambda: Order.objects.create(account_id=name, amount=row.token),
        )

    def bulk_orders(self) -> None:
        name, row = self._new("order")
        rows = [row, *(RowName("order", row.owner, self._next()) for _ in range(3))]
        self._write(
            "bulk orders",
            [Change(row, None, 1) for row in rows],
            lambda: Order.objects.bulk_create(
                Order(account_id=name, amount=row.token) for row in rows
            ),
        )

    def raw_order(self) -> None:
        name, row = self._new("order")
        alias = runtime.shard("accounts", runtime.strategy("accounts").locate(name)).alias
        self._write(
            "raw order",
            [Change(row, None, 1)],
            lambda: execute(
                alias,
                "INSERT INTO library_order (account_id, amount) VALUES (%s, %s)",
                name,
                row.token,
            ),
        )

    def order_transaction(self) -> None:
        name, row = self._new("order")
        other = RowName("order", row.owner, self._next())

        def work() -> None:
            with transaction.atomic(using="accounts"):
                Order.objects.create(account_id=name, amount=row.token)
                Order.objects.create(account_id=name, amount=-row.token).delete()
                Order.objects.create(account_id=name, amount=other.token)

        self._write("transaction", [Change(each, None, 1) for each in (row, other)], work)

    def change_order(self) -> None:
        if row := self._known("order"):
            other = RowName("order", row.owner, self._next())

            def save() -> None:
                order = Order.objects.get(account_id=row.owner, amount=row.token)
                order.amount = other.token
                order.save()

            self._write("change order", [Change(row, 1, None), Change(other, None, 1)], save)

    def delete_order(self) -> None:
        if row := self._known("order"):
            self._write(
                "delete order",
                [Change(row, 1, None)],
                lambda: Order.objects.get(account_id=row.owner, amount=row.token).delete(),
            )

    def _write(
        self, kind: str, changes: list[Change], work: Callable[[], Any], counted: str = ""
    ) -> None:
        began = time.monotonic()
        number = self._ledger.begin(kind, changes, counted)
        try:
            work()
        except Exception as error:
            if isinstance(error, KeyMoved | ShardMoved):
                is_expected = kind in _IN_TRANSACTION or (
                    kind in _RAW and isinstance(error, KeyMoved)
                )
                outcome = UNKNOWN if error.is_in_part else NOT_DONE
                self._ledger.moved(f"{kind} {type(error).__name__}")
            elif is_deadlock(error):
                is_expected, outcome = kind in _SHARED, NOT_DONE
            else:
                is_expected, outcome = is_no_connection(error), UNKNOWN
                self._ledger.error(kind, began, error)
            if not is_expected:
                outcome = UNKNOWN
                self._unexpected(f"{kind} of {changes}")
        else:
            outcome = DONE
        self._ledger.end(number, outcome)
        for row, _, new in changes:
            if outcome == UNKNOWN:
                self._own.pop(row, None)
            elif outcome == DONE and new is None:
                del self._own[row]
            elif outcome == DONE:
                self._own[row] = new

    # ##### Reads #####

    def read_key(self) -> None:
        key = self._dice.choice(self._keys)
        topics = list(Topic.objects.filter(writer_id=key).values_list("pk", "name"))
        self._compare(key, {"topic": [(str(key), *row) for row in topics]})
        novels = list(Novel.objects.filter(writer_id=key).values_list("title", "genre"))
        self._compare(key, {"novel": [(str(key), int(title), genre) for title, genre in novels]})
        self._all.refresh()
        book = Book.objects.get(writer_id=key, pk=self._books[key])
        links = [(str(key), pk, 1) for pk in book.topics.values_list("pk", flat=True)]
        self._compare(key, {"link": links})
        self._all.refresh()
        least = self._all.least.get(str(key), 0)
        cached = Book.objects.get(writer_id=key, pk=self._books[key]).pages
        with uncached():
            pages = Book.objects.get(writer_id=key, pk=self._books[key]).pages
        self._all.refresh()
        most = self._all.most.get(str(key), 0)
        self._require(
            least <= cached <= pages <= most,
            f"counter of {key}: {cached} cached, {pages} stored, not in {least}..{most}",
        )

    def read_account(self) -> None:
        name = self._dice.choice(self._accounts)
        orders = Order.objects.filter(account=name).values_list("amount", flat=True)
        self._compare(name, {"order": [(name, amount, 1) for amount in orders]})

    def read_all(self) -> None:
        topics = Topic.objects.scatter().values_list("writer_id", "pk", "name")
        self._compare(None, {"topic": [(str(key), pk, name) for key, pk, name in topics]})
        orders = Order.objects.scatter().values_list("account_id", "amount")
        self._compare(None, {"order": [(name, amount, 1) for name, amount in orders]})

    def read_count(self) -> None:
        for table, objects in (("topic", Topic.objects), ("order", Order.objects)):
            before = self._bounds(table)
            count = objects.scatter().count()
            after = self._bounds(table)
            # Rows of operations that were under way count in both directions.
            changed = after[2] - before[2]
            self._require(
                before[0] - changed <= count <= after[1] + changed,
                f"{count} rows of {table}, not in {before[0]}..{after[1]}, {changed} changes",
            )

    def _bounds(self, table: str) -> tuple[int, int, int]:
        self._all.refresh()
        states = [state for row, state in self._all.rows.items() if row.table == table]
        return (
            sum(None not in state.allowed for state in states),
            sum(state.allowed != [None] for state in states),
            sum(state.lines for state in states),
        )

    def _compare(self, owner: Any, rows: dict[str, Any]) -> None:
        """Compare rows with the ledgers. They were read before, or are while they are iterated."""
        ((table, read),) = rows.items()
        # What was acknowledged before the last refresh must be in the rows, if it did not change.
        before = {
            row: state.lines
            for row, state in self._all.rows.items()
            if row.table == table and (owner is None or row.owner == str(owner))
        }
        found: dict[RowName, list[Any]] = {}
        for key, token, value in read:
            if token >= 10**6:
                found.setdefault(RowName(table, key, token), []).append(value)
        self._all.refresh()
        for row, values in found.items():
            self._require(len(values) == 1, f"{row} was read {len(values)} times: {values}")
        for row, lines in before.items():
            state = self._all.rows[row]
            values = found.get(row, [None])
            if state.lines == lines:
                self._require(
                    all(value in state.allowed for value in values),
                    f"{row} was read as {values}, is {state.allowed}",
                )

    def _attempt_read(self, read: Callable[[], None]) -> None:
        began = time.monotonic()
        self._all.refresh()
        try:
            read()
        except Exception as error:
            if not is_no_connection(error):
                self._unexpected(read.__name__)
            self._ledger.error(read.__name__, began, error)
        self._ledger.reads(read.__name__)

    # ##### Parts #####

    def _next(self) -> int:
        self._token += 1
        return self._token

    def _new(self, table: str) -> tuple[Any, RowName]:
        owner = self._dice.choice(self._accounts if table == "order" else self._keys)
        return owner, RowName(table, str(owner), self._next())

    def _known(self, table: str) -> RowName | None:
        rows = [row for row in self._own if row.table == table]
        return self._dice.choice(rows) if rows else None

    def _book(self, row: RowName) -> Book:
        key = int(row.owner)
        return Book.objects.get(writer_id=key, pk=self._books[key])

    def _require(self, condition: bool, text: str) -> None:
        if not condition:
            self._ledger.wrong(f"{time.monotonic():.3f} {text}")

    def _unexpected(self, what: str) -> None:
        self._ledger.wrong(f"{time.monotonic():.3f} {what}: {traceback.format_exc()}")


def execute(alias: str, sql: str, *params: Any) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params)


def is_no_connection(error: BaseException) -> bool:
    """Whether a server could not be reached, or the connection was lost."""
    if isinstance(error, ScatterError):
        return all(map(is_no_connection, error.failures.values()))
    if isinstance(error, KeyMoved | ShardMoved):
        return False
    if isinstance(
        error, TicketServersUnavailable | TopologyError | CacheUnavailable | PartialCommitError
    ):
        return True
    causes = Counter(
        cause.args[0] for cause in (error, error.__cause__) if cause is not None and cause.args
    )
    if isinstance(error, InterfaceError):
        return True
    if not isinstance(error, OperationalError):
        return False
    if connections["default"].vendor == "postgresql":
        # The class of connection exceptions, the end of a server, or an error of the client.
        return sqlstate_of(error)[:3] in ("", "080", "57P")
    return bool(_LOST & set(causes))
