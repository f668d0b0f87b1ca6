"""The pages of boards."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

import sharded_orm
from sharded_orm.contrib.objects import Page
from sharded_orm.contrib.objects.exceptions import ConcurrentEdit, InvalidCursor, WrongObjectType
from sharded_orm.exceptions import InvalidID
from testproject.boards.forms import BoardForm, PinForm
from testproject.boards.models import (
    Board,
    BoardPins,
    Member,
    MemberBoards,
    MembersByUser,
    Pin,
    member_of,
    new_board,
    pin_photo,
    unpin,
)
from testproject.photos.models import Photo
from testproject.photos.scenes import scene

PER_PAGE = 24


def _object(cls: Any, pk: int) -> Any:
    try:
        return cls.objects.get(pk)
    except (cls.DoesNotExist, WrongObjectType, InvalidID) as exc:
        raise Http404 from exc


def _board(pk: int) -> Board:
    """Return a board with its member. As on the other pages, a board without its member is not shown."""
    found: Board = _object(Board, pk)
    found.member = _object(Member, found.member_id)
    return found


def _page(mapping: Any, source: Any, request: HttpRequest) -> Page:
    """Return a page of a mapping, the newest objects first.

    If the cursor in the address is invalid, the first page is returned.
    """
    try:
        after = request.GET.get("after") or None
        return mapping.objects.page(source, after=after, size=PER_PAGE, newest_first=True)
    except InvalidCursor:
        return mapping.objects.page(source, size=PER_PAGE, newest_first=True)


def _with_pictures(rows: Any, name: str) -> list[dict[str, Any]]:
    """Return a dict for each row, with its photo or None. Costs one query of all shards.

    If a shard does not answer, all photos count as existing.

    :param name: the attribute of a row that has the id of the photo.
    """
    named = {getattr(row, name) for row in rows} - {None}
    found = Photo.objects.filter(photo_id__in=named).only("photo_id").scatter(partial=True)
    present = {photo.photo_id for photo in found}
    if found.failed_shards:
        present = named
    shown = []
    for row in rows:
        photo_id = getattr(row, name)
        photo = None
        if photo_id in present:
            photo = {"photo_id": photo_id, "description": scene(photo_id).description}
        shown.append({"row": row, "photo": photo})
    return shown


@require_safe
def front(request: HttpRequest) -> HttpResponse:
    """Show the boards that were changed last.

    Costs one query of all shards for the boards, and one read of several shards for the members.
    """
    newest = Board.objects.order_by("-ts", "-id").scatter(partial=True)[:PER_PAGE]
    members = Member.objects.get_many(board.member_id for board in newest)
    boards = _with_pictures([board for board in newest if board.member_id in members], "cover")
    for board in boards:
        board["member"] = members[board["row"].member_id]
    context = {"boards": boards, "missing": newest.failed_shards}
    return render(request, "boards/front.html", context)


@require_safe
def of_user(request: HttpRequest, username: str) -> HttpResponse:
    """Show the boards of a user: a lookup finds the member, and a mapping finds the boards."""
    user = get_object_or_404(get_user_model(), username=username, is_active=True)
    try:
        page = _page(MemberBoards, MembersByUser.objects.find(str(user.pk)), request)
    except Member.DoesNotExist:
        page = Page([], None)
    context = {"owner": user, "page": page, "boards": _with_pictures(page, "cover")}
    return render(request, "boards/of_user.html", context)


@require_safe
def board(request: HttpRequest, board_id: int) -> HttpResponse:
    """Show a page of the pins of a board. Pages stay in place if pins are added meanwhile."""
    shown_board = _board(board_id)
    page = _page(BoardPins, shown_board, request)
    context = {
        "board": shown_board,
        "is_mine": request.user.pk == shown_board.member.user_id,
        "page": page,
        "pins": _with_pictures(page, "photo_id"),
    }
    return render(request, "boards/board.html", context)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def edit(request: HttpRequest, board_id: int) -> HttpResponse:
    changed_board = _mine(request, _board(board_id))
    form = BoardForm(request.POST or None, instance=changed_board)
    if request.method == "POST" and form.is_valid():
        try:
            # If the request or a test has a transaction open, it stays usable after the error.
            with sharded_orm.atomic(changed_board):
                form.save()
        except ConcurrentEdit:
            form.add_error(
                None, "Somebody else has changed the board at the same time. Load it again."
            )
        else:
            return redirect("boards:board", board_id)
    return render(request, "boards/form.html", {"title": "Change the board", "form": form})


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def pin(request: HttpRequest, photo_id: int) -> HttpResponse:
    """Pin a photo to one of the user's boards."""
    if not Photo.objects.filter(photo_id=photo_id).exists():
        raise Http404
    member = member_of(request.user)
    form = PinForm(member, request.POST or None)
    if request.method == "POST" and form.is_valid():
        given = form.cleaned_data
        chosen = given["board"] or new_board(member, given["new_board"])
        pin_photo(chosen, photo_id, given["note"])
        messages.success(request, "Your pin is on the board.")
        return redirect(chosen)
    photo = {"photo_id": photo_id, "description": scene(photo_id).description}
    context = {"title": "Pin to a board", "form": form, "photo": photo}
    return render(request, "boards/form.html", context)


@require_POST
def remove(request: HttpRequest, pin_id: int) -> HttpResponse:
    removed_pin = _object(Pin, pin_id)
    from_board = _mine(request, _board(removed_pin.board_id))
    unpin(removed_pin)
    messages.success(request, "The pin is removed.")
    return redirect(from_board)


def _mine(request: HttpRequest, shown_board: Board) -> Board:
    if request.user.pk != shown_board.member.user_id:
        raise Http404
    return shown_board
