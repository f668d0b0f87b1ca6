"""The labels of the suite that run by default: those that use a database backend."""

from __future__ import annotations

LABELS = (
    "basic", "backends", "queries", "transactions", "transaction_hooks", "select_for_update",
    "bulk_create", "multiple_database", "aggregation", "annotations", "expressions",
    "get_or_create", "delete", "update", "prefetch_related", "migrations", "schema",
    "introspection",
)  # fmt: skip
