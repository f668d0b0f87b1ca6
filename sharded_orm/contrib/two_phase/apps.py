"""The Django app with the table of commit decisions, for transactions in two phases."""

from django.apps import AppConfig


class TwoPhaseConfig(AppConfig):
    name = "sharded_orm.contrib.two_phase"
    label = "sharded_orm_two_phase"
    verbose_name = "Two-phase commit"
    default_auto_field = "django.db.models.BigAutoField"
