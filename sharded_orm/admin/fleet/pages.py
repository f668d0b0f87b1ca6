"""What all fleet pages have in common: permissions, addresses, and what they never show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse

from sharded_orm import runtime
from sharded_orm.exceptions import ShardedOrmError, TopologyReadOnly
from sharded_orm.models.after_migrate.permissions import may_access
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.operations.nodes import TROUBLE, NoAnswer, ask_one
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.shards.status import error_line
from sharded_orm.topology.document import Document

if TYPE_CHECKING:
    _ModelAdmin = ModelAdmin[Any]
else:
    _ModelAdmin = ModelAdmin

#: Seconds that a page waits for nodes, whatever their number.
DEADLINE: Final = 3.0
TEMPLATES: Final = "admin/sharded_orm/fleet"
SOURCE: Final = "the source of the topology"
#: Sentences of one list; a page stays readable whatever is wrong.
_LISTED = 100

T = TypeVar("T")
View = Callable[..., HttpResponse]


def asked(service: str, ask: Callable[[], T], *, within: float = DEADLINE) -> T | str:
    """What ``ask()`` tells within the time; or in a sentence why it does not, without accounts.

    :param service: what is asked: ``"the directory"``.
    """
    try:
        return ask_one(service, ask, within=within)
    except (ShardedOrmError, ImproperlyConfigured) as exc:
        return without_accounts(str(exc))
    except TROUBLE as exc:
        who = service[0].upper() + service[1:]
        return without_accounts(f"{who} does not answer: {error_line(exc)}")


def listed(sentences: Sequence[str], most: int = _LISTED) -> list[str]:
    """The first ones, without accounts, and how many more there are."""
    shown = [without_accounts(one) for one in sentences[:most]]
    more = len(sentences) - most
    return [*shown, f"and {more} more"] if more > 0 else shown


def address(node: Mapping[str, Any]) -> str:
    """Where a node is: host and port, and nothing else of its settings."""
    if str(node.get("ENGINE", "")).endswith("sqlite3"):
        return "SQLite files"
    port = node.get("PORT")
    return f"{node.get('HOST') or 'localhost'}{f':{port}' if port else ''}"


def groups_of(request: HttpRequest) -> list[str]:
    """The groups that the user may look into, in the order of the topology."""
    return [name for name in runtime.topology().groups if may_access(request.user, name)]


def sees_all(request: HttpRequest) -> bool:
    """Whether the user may look into every group: texts that people wrote may name any."""
    return len(groups_of(request)) == len(runtime.topology().groups)


def require_group(request: HttpRequest, group: str) -> None:
    """:raises PermissionDenied: the user may not look into ``group``."""
    if not may_access(request.user, group):
        raise PermissionDenied


@dataclass(frozen=True)
class Step:
    """One part of the path to a page; the last one has no address."""

    title: str
    url: str = ""


class FleetAdmin(_ModelAdmin):
    """Pages of a model that has no rows of its own. Overrides all addresses of ModelAdmin.

    Looking needs the model's ``view`` permission (or ``change``), operating ``change``.
    """

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        return [
            path(route, self._viewed(view), name=self.url_name(name))
            for route, view, name in self.routes()
        ]

    def routes(self) -> Iterable[tuple[str, View, str]]:
        """Route, view and the end of the name of each page; the first is the ``changelist``."""
        raise NotImplementedError

    def url_name(self, name: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{name}"

    def url(self, name: str, *args: Any) -> str:
        """The address of a page of this admin."""
        return reverse(f"admin:{self.url_name(name)}", args=args, current_app=self.admin_site.name)

    def _viewed(self, view: View) -> View:
        def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not self.has_view_permission(request):
                raise PermissionDenied
            request.current_app = self.admin_site.name
            return view(request, *args, **kwargs)

        # Staff only, never cached, with CSRF.
        return self.admin_site.admin_view(update_wrapper(wrapper, view))

    def page(
        self,
        request: HttpRequest,
        template: str,
        title: str,
        *above: Step,
        status: int = 200,
        **context: Any,
    ) -> TemplateResponse:
        """One page; ``above`` are the steps between the model's first page and this one."""
        first = Step(str(self.opts.verbose_name_plural).capitalize(), self.url("changelist"))
        return TemplateResponse(
            request,
            f"{TEMPLATES}/{template}.html",
            {
                **self.admin_site.each_context(request),
                "title": title,
                "subtitle": None,
                "opts": self.opts,
                "above": (first, *above) if title != first.title else above,
                "pages": self._pages(request),
                "may_operate": self.has_change_permission(request),
                "deadline": f"{DEADLINE:g}",
                **context,
            },
            status=status,
        )

    def _pages(self, request: HttpRequest) -> list[Step]:
        """The first pages of all fleet models that the user may look at."""
        return [
            Step(str(each.opts.verbose_name_plural).capitalize(), each.url("changelist"))
            for each in self.admin_site._registry.values()
            if isinstance(each, FleetAdmin) and each.has_view_permission(request)
        ]

    def other(self, request: HttpRequest, model: type[Model]) -> FleetAdmin | None:
        """The pages of another fleet model, if the site has them and the user may look at them."""
        if not self.admin_site.is_registered(model):
            return None
        found = self.admin_site.get_model_admin(model)
        if not isinstance(found, FleetAdmin) or not found.has_view_permission(request):
            return None
        return found

    def changelists(
        self, request: HttpRequest, group: str
    ) -> Iterator[tuple[type[Model], ShardOptions, str]]:
        """The models of ``group`` whose rows the user may look at in this site, with addresses."""
        for model, model_admin in self.admin_site._registry.items():
            options = shard_options(model)
            if options is None or options.group != group:
                continue
            if not model_admin.has_view_permission(request):
                continue
            name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
            with suppress(NoReverseMatch):  # Its admin has pages of its own.
                yield model, options, reverse(name, current_app=self.admin_site.name)

    # ##### Operating #####

    def require_operator(self, request: HttpRequest) -> HttpResponse | None:
        """The answer to a request that must not change anything; None to go on.

        :raises PermissionDenied: the user may look only.
        """
        if not self.has_change_permission(request):
            raise PermissionDenied
        return None if request.method == "POST" else HttpResponseNotAllowed(["POST"])

    def confirm(
        self,
        request: HttpRequest,
        question: str,
        back: str,
        *above: Step,
        expected: str = "",
        **context: Any,
    ) -> TemplateResponse | None:
        """A page that asks whether to go on; None once that was confirmed.

        It posts all that was posted once more.

        :param expected: what the question was made from; it is asked again once that is another.
        """
        confirmed = request.POST.get("confirmed") == "yes"
        if confirmed and request.POST.get("expected", "") == expected:
            return None
        hidden = [
            (name, value)
            for name, value in request.POST.items()
            if name not in ("csrfmiddlewaretoken", "confirmed", "expected")
        ]
        return self.page(
            request, "confirm", "Are you sure?", *above,
            question=question, hidden=hidden, expected=expected, changed=confirmed, back=back,
            **context,
        )  # fmt: skip

    def refuse(self, request: HttpRequest, why: str, back: str) -> HttpResponse:
        """Go ``back``, and say why nothing else was done."""
        messages.error(request, without_accounts(why))
        return HttpResponseRedirect(back)

    def publish(
        self,
        request: HttpRequest,
        change: Callable[[], Document],
        back: str,
        *above: Step,
        within: float = DEADLINE,
    ) -> Document | HttpResponse:
        """What ``change()`` published; or the answer that says why nothing was.

        :param within: seconds. After them nobody knows whether it was published, and that is said.
        """
        try:
            return ask_one(SOURCE, change, within=within)
        except TopologyReadOnly as exc:
            return self.page(
                request, "by_hand", "To be changed by hand", *above,
                told=without_accounts(str(exc)), back=back,
            )  # fmt: skip
        except NoAnswer as exc:
            return self.refuse(
                request,
                f"{SOURCE.capitalize()} gave {exc}: it is not known whether the change was"
                " published. Look at the versions of the topology before you repeat it.",
                back,
            )
        except LookupError as exc:
            return self.refuse(request, str(exc.args[0]) if exc.args else str(exc), back)
        except TROUBLE as exc:
            return self.refuse(request, error_line(exc), back)

    def note(self, request: HttpRequest, name: str, text: str) -> None:
        """Tell the user, and write it to the log of the admin.

        :param name: the primary key of what was operated.
        """
        obj = self.model(**{self.opts.pk.attname: name})
        self.log_change(request, obj, text)
        messages.success(request, f"{obj}: {text}")
