"""The journal: tables of the global database that record long operations, such as migrations of shards.

Only :mod:`sharded_orm.operations.runs.journal` writes these tables. Rows of finished runs may be
deleted.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import models

from sharded_orm.models.fields.text import ExactCharField


class OperationRun(models.Model):
    """One run of a long operation.

    The process that executes the run has a lease on it, a right that expires unless it is renewed.

    ``unfinished`` is true or NULL. The unique constraint on kind, subject and ``unfinished``
    ignores NULL, so there is at most one unfinished run for each kind and subject.
    """

    kind: models.CharField[str, str] = ExactCharField(max_length=32)
    subject: models.CharField[str, str] = ExactCharField(max_length=128)
    arguments: models.JSONField[dict[str, Any], dict[str, Any]] = models.JSONField(default=dict)
    state: models.CharField[str, str] = models.CharField(max_length=16, default="running")
    unfinished: models.BooleanField[bool | None, bool | None] = models.BooleanField(null=True)
    error: models.TextField[str, str] = models.TextField(default="")
    started_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now_add=True)
    finished_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    # The fields from ``token`` to ``pid`` identify the process that executes the run. They form its
    # lease, a right that expires unless it is renewed. If the token is empty, no process executes
    # the run.
    token: models.CharField[str, str] = models.CharField(max_length=32, default="")
    signs: models.BigIntegerField[int, int] = models.BigIntegerField(default=0)
    #: The last time at which the process that executes the run reported that it is alive. The time
    #: is in UTC, and comes from the database's clock.
    alive_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    user: models.CharField[str, str] = models.CharField(max_length=64, default="")
    host: models.CharField[str, str] = models.CharField(max_length=255, default="")
    #: Identifies the machine of the process that executes the run, because ``pid`` is unique only
    #: within one machine.
    machine: models.CharField[str, str] = models.CharField(max_length=128, default="")
    pid: models.BigIntegerField[int, int] = models.BigIntegerField(default=0)

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_run"
        default_permissions: ClassVar = ("view",)
        verbose_name = "operation"
        verbose_name_plural = "operations"
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "subject", "unfinished"], name="sharded_orm_run_unfinished"
            )
        ]

    def __str__(self) -> str:
        return f"run {self.pk} ({self.kind} {self.subject}): {self.state}"


class OperationStep(models.Model):
    """The progress of one run of a long operation on one shard or node."""

    run: models.ForeignKey[OperationRun, OperationRun] = models.ForeignKey(
        OperationRun, models.CASCADE, related_name="steps"
    )
    run_id: int
    alias: models.CharField[str, str] = ExactCharField(max_length=128)
    state: models.CharField[str, str] = models.CharField(max_length=16, default="pending")
    migration: models.CharField[str, str] = models.CharField(max_length=255, default="")
    operation: models.TextField[str, str] = models.TextField(default="")
    position: models.JSONField[dict[str, Any], dict[str, Any]] = models.JSONField(default=dict)
    error: models.TextField[str, str] = models.TextField(default="")
    #: Usually None, because one process executes all steps of a run. If several processes, called
    #: workers, share the steps, this says which worker executes this step. Each worker has an
    #: :class:`OperationRun` for itself, whose lease shows that the worker is alive. This is the id
    #: of that run. See ``operations/runs/work_units.py``.
    worker: models.BigIntegerField[int | None, int | None] = models.BigIntegerField(null=True)
    updated_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now=True)

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_step"
        constraints = [
            models.UniqueConstraint(fields=["run", "alias"], name="sharded_orm_step_alias")
        ]
        indexes = [models.Index(fields=["state", "alias"], name="sharded_orm_step_state")]

    def __str__(self) -> str:
        return f"{self.alias} in run {self.run_id}: {self.state}"


class OperationScript(models.Model):
    """Content that many steps of one run need, such as recorded SQL.

    A step is the work of a run on one shard. The content is stored once per run, not once per step.
    """

    run: models.ForeignKey[OperationRun, OperationRun] = models.ForeignKey(
        OperationRun, models.CASCADE, related_name="scripts"
    )
    run_id: int
    key: models.CharField[str, str] = ExactCharField(max_length=200)
    content: models.JSONField[dict[str, Any], dict[str, Any]] = models.JSONField()

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_script"
        constraints = [
            models.UniqueConstraint(fields=["run", "key"], name="sharded_orm_script_key")
        ]

    def __str__(self) -> str:
        return f"{self.key} of run {self.run_id}"
