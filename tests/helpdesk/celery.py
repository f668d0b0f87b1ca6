"""The Celery application, as Celery's documentation writes it for Django."""

from __future__ import annotations

from celery import Celery

app = Celery("helpdesk")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
