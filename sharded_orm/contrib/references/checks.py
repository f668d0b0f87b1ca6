"""System checks of reference tables. The ids of the checks never change. No check queries a database.

================================  =====================================================
``sharded_orm_references.E001``  the global database's backend does not report commits
``sharded_orm_references.E002``  multi-table inheritance
``sharded_orm_references.E003``  the primary key is composite, or a relation to another model
``sharded_orm_references.E004``  a foreign key with a constraint to a model without copies
``sharded_orm_references.E005``  an ``on_delete`` between reference tables that copies cannot follow
``sharded_orm_references.E006``  a sharded model refers to a reference table without a constraint
``sharded_orm_references.E007``  a sharded model refers to a field that is not the primary key
================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks

from sharded_orm.contrib.references.backend import problem_of_backend
from sharded_orm.contrib.references.declaration import problems_of, reference_models


@checks.register(checks.Tags.models)
def check_references(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the reference models, and the foreign keys to them."""
    models = reference_models()
    messages = list[checks.CheckMessage]()
    if models and (problem := problem_of_backend()) is not None:
        messages.append(checks.Error(problem, id="sharded_orm_references.E001"))
    for model in models:
        if app_configs is None or model._meta.app_config in app_configs:
            for number, text, where in problems_of(model):
                messages.append(
                    checks.Error(
                        f"{model._meta.label} cannot be a reference model. {text}",
                        obj=where,
                        id=f"sharded_orm_references.{number}",
                    )
                )
    return messages
