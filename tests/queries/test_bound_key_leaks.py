"""A bound key holds where it was bound, and nowhere else."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module, reload
from io import BytesIO
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.views.generic import ListView

from sharded_orm import bound, unbound
from sharded_orm.exceptions import (
    BoundKeyMismatch,
    InvalidBoundKey,
    InvalidConfiguration,
    ShardKeyRequired,
)
from sharded_orm.middleware import BoundKeyMiddleware
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

TITLES = {ONE: "p0 p3", TWO: "p1 p4", NEAR: "p2 p5"}


def titles() -> str:
    return " ".join(sorted(photo.title for photo in Photo.objects.all()))


def key() -> Any:
    """Return the key that a new row would get."""
    return Photo().user_id


# -- Modules that are imported inside a block -------------------------------------------------

MODULE = """
from sharded_orm import bound
from sharded_orm.exceptions import ShardKeyRequired
from tests.photos.models import Photo

photos = Photo.objects.order_by("title")
row = Photo()
try:
    rows = list(Photo.objects.all())
except ShardKeyRequired:
    rows = None
with bound(user_id=%d):
    of_two = Photo.objects.order_by("title")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that was not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"imported_under_a_key_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE % TWO)
    yield name
    sys.modules.pop(name, None)


def check_module(module: Any) -> None:
    assert module.row.user_id is None
    assert module.rows is None  # It was refused: no key, no rows.
    assert " ".join(photo.title for photo in module.of_two) == TITLES[TWO]
    for number in (ONE, TWO):
        with bound(user_id=number):
            assert " ".join(photo.title for photo in module.photos.all()) == TITLES[number]
    with pytest.raises(ShardKeyRequired):
        list(module.photos.all())


def test_a_module_that_is_imported_inside_a_block(rows: list[Photo], module: str) -> None:
    with bound(user_id=ONE):
        imported = import_module(module)
        assert key() == ONE
    check_module(imported)
    with bound(user_id=ONE):
        reload(imported)
    check_module(imported)


def test_a_module_that_a_thread_of_the_block_imports(rows: list[Photo], module: str) -> None:
    with bound(user_id=ONE):
        imported = async_to_sync(sync_to_async(import_module, thread_sensitive=False))(module)
    check_module(imported)


def test_a_program_that_runs_while_it_is_imported(
    rows: list[Photo], module: str, tmp_path: Path
) -> None:
    """Its blocks hold, and the modules that it imports inside of them see none."""
    program = f"main_{module}"
    (tmp_path / f"{program}.py").write_text(
        "from importlib import import_module\n"
        "from sharded_orm import bound\n"
        "from tests.queries.test_bound_key_leaks import key\n"
        f"with bound(user_id={ONE}):\n"
        f"    imported = import_module({module!r})\n"
        "    key = key()\n"
    )
    main = import_module(program)
    assert main.key == ONE
    check_module(main.imported)


# -- Threads, tasks, generators ------------------------------------------------------------


def test_a_new_thread_has_no_key() -> None:
    keys: list[Any] = []
    with bound(user_id=ONE):
        thread = Thread(target=lambda: keys.append(key()))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(key).result() is None
            assert pool.submit(contextvars.copy_context().run, key).result() == ONE
            assert pool.submit(key).result() is None
    assert keys == [None]


def test_threads_with_one_block_object_have_their_own() -> None:
    blocks = {number: bound(user_id=number) for number in range(1, 5)}
    barrier = Barrier(len(blocks))

    def run(number: int) -> list[Any]:
        keys = []
        for _ in range(50):
            barrier.wait()
            with blocks[number], blocks[number]:
                keys.append(key())
            keys.append(key())
        return keys

    with ThreadPoolExecutor(len(blocks)) as pool:
        for number, keys in zip(blocks, pool.map(run, blocks), strict=True):
            assert keys == [number, None] * 50


def test_a_shared_queryset_that_two_threads_evaluate_is_never_mixed_up() -> None:
    for _ in range(50):
        shared = Photo.objects.none()
        barrier = Barrier(2)

        def run(number: int, shared: Any = shared, barrier: Barrier = barrier) -> Any:
            with bound(user_id=number):
                barrier.wait()
                try:
                    shared.query.take_bound_key()
                except BoundKeyMismatch:
                    return None
                return shared.query.bound_key.value

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(run, (ONE, TWO)), key=str) in ([ONE, None], [TWO, None])


def test_tasks_have_their_own(rows: list[Photo]) -> None:
    async def read(number: int) -> str:
        async with bound(user_id=number):
            await asyncio.sleep(0)
            photos = [photo.title async for photo in Photo.objects.order_by("title")]
            assert await Photo.objects.acount() == len(photos)
            streamed = [photo.title async for photo in Photo.objects.order_by("title").aiterator()]
            assert streamed == photos
            first = await Photo.objects.order_by("title").afirst()
            assert first is not None and await Photo.objects.aget(pk=first.pk) == first
            assert (await Photo.objects.aget_or_create(title=first.title))[1] is False
            assert await sync_to_async(titles)() == " ".join(photos)
            await asyncio.sleep(0)
            assert await asyncio.create_task(inherited()) == key()
        assert key() is None
        return " ".join(photos)

    async def inherited() -> Any:
        return await sync_to_async(key)()

    async def main() -> list[str]:
        return await asyncio.gather(*(read(number) for number in (ONE, TWO, NEAR)))

    assert async_to_sync(main)() == [TITLES[ONE], TITLES[TWO], TITLES[NEAR]]
    assert key() is None


def test_a_task_outlives_the_block_with_its_key() -> None:
    async def main() -> list[Any]:
        gate = asyncio.Event()

        async def later() -> Any:
            await gate.wait()
            return key()

        with bound(user_id=ONE):
            task = asyncio.create_task(later())
        gate.set()
        return [await task, key()]

    assert asyncio.run(main()) == [ONE, None]


def test_an_error_ends_the_block() -> None:
    with pytest.raises(ZeroDivisionError), bound(user_id=ONE):
        raise ZeroDivisionError
    assert key() is None
    with bound(user_id=ONE):
        with pytest.raises(InvalidBoundKey), bound(user_id="x"):
            pass
        with pytest.raises(ZeroDivisionError), unbound():
            raise ZeroDivisionError
        assert key() == ONE
    with pytest.raises(ShardKeyRequired):
        titles()


def test_a_cancelled_task_leaves_nothing() -> None:
    async def wait() -> None:
        with bound(user_id=ONE):
            await asyncio.Event().wait()

    async def main() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0)
        return key()

    assert asyncio.run(main()) is None


def test_a_block_that_ends_in_another_context_changes_nothing_there() -> None:
    def steps() -> Iterator[None]:
        with bound(user_id=ONE):
            yield

    generator = steps()
    contextvars.copy_context().run(next, generator)
    with bound(user_id=TWO):
        generator.close()
        assert key() == TWO


# -- Decorators ----------------------------------------------------------------------------


@bound("user_id")
def task(user_id: int, *, fail: bool = False) -> Any:
    assert not fail
    return key()


@bound("user_id")
async def coroutine(user_id: int) -> Any:
    await asyncio.sleep(0)
    return key()


@bound("user_id")
def generator(user_id: int) -> Iterator[Any]:
    try:
        sent = yield key()
        yield (sent, key())
    except ZeroDivisionError:
        yield ("caught", key())
    finally:
        ended.append(key())


@bound("user_id")
async def asynchronous_generator(user_id: int) -> AsyncIterator[Any]:
    try:
        yield key()
        await asyncio.sleep(0)
        yield key()
    except ZeroDivisionError:
        yield ("caught", key())
    finally:
        ended.append(key())


ended: list[Any] = []


def test_a_decorated_function() -> None:
    assert (task(ONE), task(user_id=TWO), key()) == (ONE, TWO, None)
    with pytest.raises(AssertionError):
        task(ONE, fail=True)
    assert key() is None
    assert asyncio.run(coroutine(ONE)) == ONE
    assert bound(user_id=NEAR)(key)() == NEAR
    with bound(user_id=ONE):
        assert unbound()(key)() is None
        with pytest.raises(BoundKeyMismatch):
            task(TWO)
    with pytest.raises(InvalidBoundKey, match="has none"):
        bound("user_id")(lambda other: None)
    with pytest.raises(InvalidBoundKey, match="decorates"), bound("user_id"):
        pass


def test_a_decorated_generator_does_not_bind_its_consumer() -> None:
    ended.clear()
    values = generator(ONE)
    assert (next(values), key()) == (ONE, None)
    with bound(user_id=TWO):
        assert unbound()(values.send)("x") == ("x", ONE)  # type: ignore[attr-defined]
        assert key() == TWO
    assert (list(values), ended, key()) == ([], [ONE], None)
    values = generator(ONE)
    next(values)
    assert values.throw(ZeroDivisionError) == ("caught", ONE)  # type: ignore[attr-defined]
    values.close()  # type: ignore[attr-defined]
    assert (ended, key()) == ([ONE, ONE], None)


def test_a_decorated_asynchronous_generator() -> None:
    async def main() -> None:
        ended.clear()
        values = []
        async for value in asynchronous_generator(ONE):
            assert key() is None
            values.append(value)
        assert values == [ONE, ONE]
        other: Any = asynchronous_generator(TWO)
        await anext(other)
        assert await other.athrow(ZeroDivisionError) == ("caught", TWO)
        await other.aclose()
        assert (ended, key()) == ([ONE, TWO], None)

    asyncio.run(main())


# -- Requests ------------------------------------------------------------------------------


class PhotoList(ListView):  # type: ignore[type-arg]
    queryset = Photo.objects.order_by("title")  # built when the module is imported
    template_name = "unused"

    def render_to_response(self, context: Any, **kwargs: Any) -> Any:
        template = engines["django"].from_string(
            "{% for photo in object_list %}{{ photo.title }} {% endfor %}"
        )
        return TemplateResponse(self.request, template, context)


def parts() -> Iterator[str]:
    yield titles()
    yield "|"
    yield titles()


async def asynchronous_parts() -> AsyncIterator[str]:
    yield " ".join([photo.title async for photo in Photo.objects.order_by("title")])
    yield "|"
    yield await sync_to_async(titles)()


async def asynchronous_view(request: Any) -> HttpResponse:
    return HttpResponse(await sync_to_async(titles)())


def failing_view(request: Any) -> HttpResponse:
    raise ZeroDivisionError


urlpatterns = [
    path("list/", PhotoList.as_view()),
    path("plain/", lambda request: HttpResponse(str(key()))),
    path("stream/", lambda request: StreamingHttpResponse(parts())),
    path("astream/", lambda request: StreamingHttpResponse(asynchronous_parts())),
    path("async/", asynchronous_view),
    path("fail/", failing_view),
]


def keys_of(request: Any) -> dict[str, Any] | None:
    user = request.headers.get("X-User")
    return {"user_id": user} if user else None


async def keys_of_async(request: Any) -> dict[str, Any] | None:
    return keys_of(request)


@pytest.fixture
def site(settings: Any, rows: list[Photo]) -> Any:
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "BOUND_KEY": f"{__name__}.keys_of"}
    settings.MIDDLEWARE = ["sharded_orm.middleware.BoundKeyMiddleware"]
    settings.ROOT_URLCONF = __name__
    return settings


def body(response: Any) -> str:
    return (response.getvalue() if response.streaming else response.content).decode().strip()


def test_each_request_has_its_own_key(site: Any) -> None:
    client = Client(raise_request_exception=False)
    for number in (ONE, TWO, NEAR):
        of_user = {"X-User": str(number)}
        assert body(client.get("/list/", headers=of_user)) == TITLES[number]
        assert body(client.get("/async/", headers=of_user)) == TITLES[number]
        assert body(client.get("/plain/")) == "None"
        assert client.get("/fail/", headers=of_user).status_code == 500
        assert body(client.get("/plain/")) == "None"
        assert key() is None
    assert client.get("/list/").status_code == 500  # No key, no rows.


def test_the_first_request_imports_the_urls(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later request sees the rows of the first one's key."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "urls_of_a_new_process.py").write_text(
        "from django.urls import path\n"
        "from tests.queries.test_bound_key_leaks import Photo, PhotoList\n"
        "class Photos(PhotoList):\n"
        "    queryset = Photo.objects.order_by('title')\n"
        "urlpatterns = [path('list/', Photos.as_view())]\n"
    )
    site.ROOT_URLCONF = "urls_of_a_new_process"
    client = Client(raise_request_exception=False)
    try:
        for number in (ONE, TWO):
            answer = client.get("/list/", headers={"X-User": str(number)})
            assert body(answer) == TITLES[number]
        assert client.get("/list/").status_code == 500  # No key, no rows.
    finally:
        sys.modules.pop("urls_of_a_new_process", None)


def test_a_file_is_left_to_the_server(site: Any) -> None:
    request = RequestFactory().get("/", headers={"X-User": "1"})
    file = FileResponse(BytesIO(b"x"))
    response = BoundKeyMiddleware(lambda request: file)(request)
    assert response.file_to_stream is not None
    response.close()


def test_streaming_responses_run_under_their_key(site: Any) -> None:
    client = Client()
    responses = {
        number: client.get("/stream/", headers={"X-User": str(number)})
        for number in (ONE, TWO, NEAR)
    }
    iterators = {number: iter(response) for number, response in responses.items()}
    # The responses of several requests are read in turn, by one thread.
    for expected in (TITLES, dict.fromkeys(TITLES, "|"), TITLES):
        for number, iterator in iterators.items():
            assert next(iterator).decode() == expected[number]
            assert key() is None
    for response in responses.values():
        response.close()
    assert key() is None


def test_an_abandoned_stream_leaves_nothing(site: Any) -> None:
    response = Client().get("/stream/", headers={"X-User": str(ONE)})
    next(iter(response))
    response.close()
    assert (key(), body(Client().get("/plain/"))) == (None, "None")


@pytest.mark.parametrize("function", ["keys_of", "keys_of_async"])
def test_asynchronous_requests(site: Any, function: str) -> None:
    site.SHARDED_ORM = {**site.SHARDED_ORM, "BOUND_KEY": f"{__name__}.{function}"}

    async def read(number: int, address: str) -> str:
        response = await AsyncClient().get(address, headers={"X-User": str(number)})
        if not response.streaming:
            return str(response.content.decode()).strip()
        parts = []
        async for part in response:
            parts.append(part.decode())
            assert key() is None
        return "".join(parts)

    async def main() -> None:
        for address in ("/list/", "/async/"):
            texts = await asyncio.gather(*(read(number, address) for number in TITLES))
            assert texts == list(TITLES.values())
        for address in ("/astream/",):
            texts = await asyncio.gather(*(read(number, address) for number in TITLES))
            assert texts == [f"{text}|{text}" for text in TITLES.values()]
        response = await AsyncClient().get("/plain/")
        assert response.content == b"None"

    async_to_sync(main)()
    assert key() is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "BOUND_KEY is missing"),
        ("tests.nowhere", "cannot be imported"),
        (f"{__name__}.keys_of_async", "needs ASGI"),
    ],
)
def test_a_wrong_setting(settings: Any, value: Any, message: str) -> None:
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "BOUND_KEY": value}
    with pytest.raises(InvalidConfiguration, match=message):
        BoundKeyMiddleware(lambda request: HttpResponse())


@contextmanager
def of_tenant(number: int) -> Iterator[None]:
    with bound(user_id=number):
        yield


def test_a_function_that_returns_no_keys(site: Any) -> None:
    site.SHARDED_ORM = {**site.SHARDED_ORM, "BOUND_KEY": "builtins.str"}
    with pytest.raises(InvalidBoundKey, match=r"BOUND_KEY 'builtins.str' has returned"):
        Client().get("/plain/")


def test_a_context_manager_of_the_project() -> None:
    with of_tenant(ONE):
        assert key() == ONE
    assert key() is None
