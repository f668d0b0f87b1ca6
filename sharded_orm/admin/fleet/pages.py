"""The base class of all fleet pages (the pages about nodes and shards), and helper functions.

The base class handles the permissions and URLs of the pages. Some functions remove database
accounts from texts that users see.
"""

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

#: Seconds that a page waits in total for the answers of all nodes.
DEADLINE: Final = 3.0
TEMPLATES: Final = "admin/sharded_orm/fleet"
SOURCE: Final = "the source of the topology"
#: A list of problems on a page shows at most this many sentences, so that the page stays readable.
_MAX_LISTED = 100

T = TypeVar("T")
View = Callable[..., HttpResponse]


def ask_service(service: str, call: Callable[[], T], *, within: float = DEADLINE) -> T | str:
    """Return the result of ``call()``. If it fails or takes too long, return a sentence that says
    so.

    :param service: the service that ``call`` uses, such as ``"the directory"``; named in the
        sentence.
    :param within: seconds to wait for the result.
    """
    try:
        return ask_one(service, call, within=within)
    except (ShardedOrmError, ImproperlyConfigured) as exc:
        return without_accounts(str(exc))
    except TROUBLE as exc:
        name = service[0].upper() + service[1:]
        return without_accounts(f"{name} does not answer: {error_line(exc)}")


def first_sentences(sentences: Sequence[str], most: int = _MAX_LISTED) -> list[str]:
    """Return the first ``most`` sentences as texts from which database accounts are removed.

    If some sentences are left out, a last text such as "and 3 more" says how many.
    """
    texts = [without_accounts(sentence) for sentence in sentences[:most]]
    more = len(sentences) - most
    return [*texts, f"and {more} more"] if more > 0 else texts


def address(node: Mapping[str, Any]) -> str:
    """Return the host and port of a node as text.

    Other settings of the node, such as passwords, are left out.
    """
    if str(node.get("ENGINE", "")).endswith("sqlite3"):
        return "SQLite files"
    port = node.get("PORT")
    return f"{node.get('HOST') or 'localhost'}{f':{port}' if port else ''}"


def groups_of(request: HttpRequest) -> list[str]:
    """Return the shard groups that the user may look into, in the order of the topology."""
    return [name for name in runtime.topology().groups if may_access(request.user, name)]


def sees_all(request: HttpRequest) -> bool:
    """Whether the user may look into every shard group.

    Only such a user may read texts that can name any group.
    """
    return len(groups_of(request)) == len(runtime.topology().groups)


def require_group(request: HttpRequest, group: str) -> None:
    """Check that the user may look into a shard group.

    :raises PermissionDenied: the user may not.
    """
    if not may_access(request.user, group):
        raise PermissionDenied


@dataclass(frozen=True)
class Step:
    """One breadcrumb of a page. The last breadcrumb stands for the page itself, and has no URL."""

    title: str
    url: str = ""


class FleetAdmin(_ModelAdmin):
    """Base class of the admin pages about shards, ticket servers, operations and the topology.

    Each subclass is registered for a model, which only gives the pages their URLs and permissions
    in the admin. The pages replace all URLs of ``ModelAdmin``, so no rows of the model can be
    edited. To look at the pages, a user needs the model's ``view`` or ``change`` permission. To
    change something on a page, a user needs ``change``.
    """

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        return [
            path(route, self._protected(view), name=self.url_name(name))
            for route, view, name in self.routes()
        ]

    def routes(self) -> Iterable[tuple[str, View, str]]:
        """Return a triple ``(route, view, end of the URL name)`` for each page.

        The first page has the URL name of the model's ``changelist``.
        """
        raise NotImplementedError

    def url_name(self, name: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{name}"

    def url(self, name: str, *args: Any) -> str:
        """Return the URL of a page of this model admin.

        :param name: the last part of the URL pattern's name, such as ``change``.
        """
        return reverse(f"admin:{self.url_name(name)}", args=args, current_app=self.admin_site.name)

    def _protected(self, view: View) -> View:
        def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not self.has_view_permission(request):
                raise PermissionDenied
            request.current_app = self.admin_site.name
            return view(request, *args, **kwargs)

        # admin_view() admits staff only, forbids caching, and adds CSRF protection.
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
        """Return the response for one page.

        :param template: the name of a template in :data:`TEMPLATES`, without ``.html``.
        :param above: the breadcrumbs that stand between the model's first page and this page.
        """
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
        """Return links to the pages "Shards", "Tickets", "Operations" and "Topology", without those
        that the user may not look at.
        """
        return [
            Step(str(admin.opts.verbose_name_plural).capitalize(), admin.url("changelist"))
            for admin in self.admin_site._registry.values()
            if isinstance(admin, FleetAdmin) and admin.has_view_permission(request)
        ]

    def admin_of(self, request: HttpRequest, model: type[Model]) -> FleetAdmin | None:
        """Return the model admin that shows the fleet pages of ``model``, such as ``OperationRun``.

        Return None if the site has no such pages, or if the user may not look at them.
        """
        if not self.admin_site.is_registered(model):
            return None
        admin = self.admin_site.get_model_admin(model)
        if not isinstance(admin, FleetAdmin) or not admin.has_view_permission(request):
            return None
        return admin

    def changelists(
        self, request: HttpRequest, group: str
    ) -> Iterator[tuple[type[Model], ShardOptions, str]]:
        """Yield the models of a shard group whose rows the user may see in this admin site.

        Yields triples of the model, its shard options and the URL of its changelist.
        """
        for model, model_admin in self.admin_site._registry.items():
            options = shard_options(model)
            if options is None or options.group != group:
                continue
            if not model_admin.has_view_permission(request):
                continue
            name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
            # Skip a model whose model admin has no changelist URL. The project may have written
            # such a model admin.
            with suppress(NoReverseMatch):
                yield model, options, reverse(name, current_app=self.admin_site.name)

    # ##### Operating #####

    def require_operator(self, request: HttpRequest) -> HttpResponse | None:
        """Check that the request may change something.

        :return: None for a POST; for any other method, a response that refuses the request.
        :raises PermissionDenied: the user may look at the pages, but may not change anything.
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
        """Return a page that asks for confirmation; None if the user has confirmed.

        The form on the page posts all values of this request once more, together with the
        confirmation.

        :param back: the URL to which the page's "no" leads.
        :param expected: a text that changes whenever the user should be asked again, such as the
            version of the topology that will be replaced. If the text in the confirmation is a
            different one, the page asks again. By default, nothing is compared.
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
        """Redirect to the URL ``back``, with a message that nothing was done, and why."""
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
        """Call ``change()``, which publishes a version of the topology; return the version's
        document.

        If ``change()`` fails, return a response that tells the user why.

        :param back: the URL of the page to which the response redirects or links.
        :param above: the breadcrumbs of the response, as in :meth:`page`.
        :param within: seconds to wait. If ``change()`` takes longer, the response says that it is
            not known whether the version was published.
        """
        try:
            return ask_one(SOURCE, change, within=within)
        except TopologyReadOnly as exc:
            return self.page(
                request, "by_hand", "To be changed by hand", *above,
                text=without_accounts(str(exc)), back=back,
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
            return self.refuse(request, f"{error_line(exc)}.", back)

    def note(self, request: HttpRequest, name: str, text: str) -> None:
        """Show ``text`` to the user, and write it to the admin's log.

        :param name: the primary key of the changed object, such as the alias of a shard.
        """
        obj = self.model(**{self.opts.pk.attname: name})
        self.log_change(request, obj, text)
        messages.success(request, f"{obj}: {text}")
