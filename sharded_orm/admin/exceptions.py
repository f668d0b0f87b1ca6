"""The errors of the admin. Like all errors of the package, they are derived from
:exc:`~sharded_orm.exceptions.ShardedOrmError`.
"""

from __future__ import annotations

from django.db import OperationalError

from sharded_orm.exceptions import ShardedOrmError


class AdminError(ShardedOrmError):
    """The admin cannot show or do what a user asks for. The message is shown to the user."""


class InvalidFocus(AdminError, LookupError):
    """The URL of an admin page names a shard or a shard key that cannot be used there.

    For example, the group has no such shard, the text cannot be a key, or the rows of the key are
    not on the shard that the URL also names.

    :ivar home: the alias of the shard that has the rows of the key, if the URL names a different
        shard; otherwise None. The message does not contain this alias. Show it only to users who
        may look at that shard.
    """

    def __init__(self, message: str, *, home: str | None = None) -> None:
        self.home = home
        super().__init__(message)


class InvalidObjectID(AdminError, LookupError):
    """An object id in an admin URL cannot name any row: it is malformed, or no shard can have a row
    with the keys in it.
    """


class TooManyMisplaced(AdminError, OperationalError):
    """An admin action on all rows of a shard did nothing, because too many of the rows are
    misplaced.

    A row is misplaced if its shard key leads to a different shard.
    """
