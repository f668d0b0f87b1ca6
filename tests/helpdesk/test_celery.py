"""Celery: a worker takes tasks from a queue and runs them one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker
from celery.fixups.django import DjangoWorkerFixup
from django.db import connections

from tests.helpdesk import tasks
from tests.helpdesk.celery import app
from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case, Message
from tests.patience import PATIENCE

# The worker has connections of its own, so the tests commit.
pytestmark = pytest.mark.django_db(databases=DATABASES, transaction=True)


@pytest.fixture(
    params=[
        pytest.param("solo", marks=pytest.mark.every_backend),
        # The child is a fork, which has no part in the databases in memory.
        pytest.param("prefork", marks=pytest.mark.mysql_settings),
    ]
)
def pool(request: Any) -> str:
    """The worker runs tasks in itself, or in a child process."""
    return request.param


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> None:
    """The results of tasks are files, which a child process can write."""
    app.conf.result_backend = f"file://{tmp_path_factory.mktemp('results')}"


@pytest.fixture
def worker(desk: Desk, results: None, pool: str) -> Iterator[None]:
    desk.case()
    with start_worker(app, pool=pool, perform_ping_check=False, shutdown_timeout=PATIENCE):
        yield


def result(task: Any, *arguments: Any) -> Any:
    return task.delay(*arguments).get(timeout=PATIENCE, interval=0.01)


def test_tasks(desk: Desk, worker: None) -> None:
    case = Case.objects.get(tenant=desk.tenant)
    ids = (desk.tenant.pk, case.pk)
    message = Message.objects.get(tenant=desk.tenant, pk=result(tasks.close_case, *ids, "Done"))
    assert (message.text, message.case.status) == ("Done", "closed")

    # After each task its connections are closed, whether it has failed or not.
    assert result(tasks.open_connections) == []
    with pytest.raises(ValueError, match="as asked"):
        result(tasks.fail, desk.tenant.pk)
    assert result(tasks.open_connections) == []

    # A scope ends with its task.
    assert result(tasks.read_twice_in_scope, *ids) == 1
    assert result(tasks.read_twice, *ids) == 2
    assert result(tasks.read_twice_in_scope, *ids) == 1

    # The connections of this process are untouched.
    case.refresh_from_db()
    assert case.status == "closed"


@pytest.mark.every_backend
def test_a_forked_worker_drops_the_connection_of_a_group(desk: Desk) -> None:
    # A new child closes the descriptors of all connections that its parent has left open.
    desk.case()
    DjangoWorkerFixup(app)._maybe_close_db_fd(connections["helpdesk"])
    assert desk.tenant.cases.count() == 1
