"""What a database error is, in few words."""

from __future__ import annotations

import re

CUT_SIGNS = (
    "terminating connection",
    "server closed the connection",
    "connection already closed",
    "connection has been closed",
    "cursor already closed",
    "could not receive data",
    "could not send data",
    "query execution was interrupted",
    "lost connection",
    "server has gone away",
    "connection was killed",
    "(0, '')",
    "can't reconnect until invalid transaction",
)

KINDS = {
    "deadlock": ("deadlock",),
    "lock timeout": ("lock wait timeout", "lock timeout"),
    # What NOWAIT is for: Airflow goes on without the lock.
    "lock not free": ("could not be acquired immediately", "could not obtain lock"),
}

FAULTS_OF_AIRFLOW = {
    # `_update_asset_orphanage`, called by a timer, looks which assets are inactive and adds them at its commit. Nothing holds
    # off a second scheduler, or a Dag processor, that does so at this moment, and the error is let through.
    "two activated one asset": (
        r"event_scheduler\.py",
        r"INSERT INTO asset_active ",
        r"asset_active[._](pkey|PRIMARY)",
    ),
    # It deletes from all of `asset_active` in one order, while a Dag processor locks the assets of its Dags in another.
    "deadlock over active assets": (r"event_scheduler\.py", r"DELETE FROM asset_active", r"[Dd]eadlock"),
}

LOCK_OF_AN_ASSET = "SELECT asset"
"""
Where a writer's deadlock is Airflow's own: it locks one asset after the other (`_lock_asset_model`), while on MySQL that DELETE
locks all assets that it looks at. Both are stock's, and so was the deadlock where stock ran them alone.
"""


def is_cut(text: str) -> bool:
    """Tell whether an error's text is that of a connection that was cut, or of what follows from that."""
    lower = text.lower()
    return any(sign in lower for sign in CUT_SIGNS)


def kind_of(error: BaseException) -> str:
    """Return "cut", "deadlock", "lock timeout", or the error's own text."""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    if is_cut(text):
        return "cut"
    for kind, signs in KINDS.items():
        if any(sign in text.lower() for sign in signs):
            return kind
    return text[:200]


def airflows_own(log: str) -> str | None:
    """Return which known fault of stock Airflow ended a scheduler, if it is one, by the end of its log."""
    for what, signs in FAULTS_OF_AIRFLOW.items():
        if all(re.search(sign, log) for sign in signs):
            return what
    return None
