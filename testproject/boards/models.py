"""Boards and pins as Pinterest stores them (P5 to P9, P11).

A user's boards and pins are on the shard of the user's :class:`Member`. So a page of a board sends its
two queries to one shard: one for the entries of the board, one for the pins.
"""

from __future__ import annotations

from typing import Any

from django.urls import reverse

import sharded_orm
from sharded_orm.contrib.objects import Mapping, ObjectLookup, ShardedObject, fields


class Member(ShardedObject):
    """A user as the owner of boards. The users themselves are in the global database."""

    user_id = fields.Integer()
    username = fields.Text()

    class ObjectMeta:
        group = "boards"
        type_id = 1
        cache = True

    def __str__(self) -> str:
        return self.username


class Board(ShardedObject):
    member = fields.Ref(Member)
    title = fields.Char(max_length=80)
    about = fields.Text(default="", blank=True, max_length=400)
    #: The photo that was pinned last.
    cover = fields.Integer(null=True, blank=True)

    class ObjectMeta:
        group = "boards"
        type_id = 2
        cache = True

    def __str__(self) -> str:
        return self.title

    @property
    def shard_alias(self) -> str | None:
        """The alias of the shard that this board was read from."""
        return self._state.db

    def get_absolute_url(self) -> str:
        return reverse("boards:board", args=[self.pk])


class Pin(ShardedObject):
    board = fields.Ref(Board)
    photo_id = fields.Integer()
    note = fields.Char(default="", blank=True, max_length=200)

    class ObjectMeta:
        group = "boards"
        type_id = 3
        cache = True


class MemberBoards(Mapping):
    source, target = Member, Board

    class MappingMeta:
        cache = True

    class Meta(Mapping.Meta):
        verbose_name_plural = "member boards"


class BoardPins(Mapping):
    source, target = Board, Pin

    class MappingMeta:
        cache = True

    class Meta(Mapping.Meta):
        verbose_name_plural = "board pins"


class MembersByUser(ObjectLookup):
    """Finds the member by the id of its user (P11). The md5 of the id decides on the shard."""

    target = Member

    class LookupMeta:
        group = "ratings"
        cache = True

    class Meta(ObjectLookup.Meta):
        verbose_name_plural = "members by user"


def member_of(user: Any) -> Member:
    """Return the member of a user; create it if there is none."""
    member, _ = MembersByUser.objects.find_or_create(
        str(user.pk), user_id=user.pk, username=user.username
    )
    return member


def new_board(member: Member, title: str, about: str = "") -> Board:
    """Store a new board of ``member``, on the member's shard, and return the board."""
    with sharded_orm.atomic(member):
        board = Board.objects.create(near=member, member=member, title=title, about=about)
        MemberBoards.objects.add(member, board)
    return board


def pin_photo(board: Board, photo_id: int, note: str = "") -> Pin:
    """Pin a photo to a board, in one transaction on the board's shard. Return the pin."""
    with sharded_orm.atomic(board), board.edit():
        pin = Pin.objects.create(near=board, board=board, photo_id=photo_id, note=note)
        BoardPins.objects.add(board, pin)
        board.cover = photo_id
    return pin


def unpin(pin: Pin) -> None:
    """Remove a pin from its board, and delete the pin."""
    with sharded_orm.atomic(pin):
        BoardPins.objects.remove(pin.board_id, pin)
        pin.delete()
