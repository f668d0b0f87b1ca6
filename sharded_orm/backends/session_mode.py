"""The modes of a virtual connection, which say how long it keeps the session that it has leased. (A
virtual connection is the ``connection`` attribute of an alias's ``DatabaseWrapper``.)
"""

from enum import IntEnum


class SessionMode(IntEnum):
    """How long a virtual connection keeps a leased session before other aliases may use the
    session.
    """

    FREE = 0
    """In autocommit, the session is kept for one statement."""
    TRANSACTION = 1
    """With autocommit off, the session is kept from a transaction's first statement to its end."""
    HELD = 2
    """In autocommit, the session is kept while foreign key checks are off, during one_session() (for
    executemany), or from hold() to release().
    """
    PINNED = 3
    """The session is kept until close(), because a statement left state in it."""
    LOST = 4
    """The session that this connection had to keep is gone, and with it a transaction or other state."""
    CLOSED = 5
