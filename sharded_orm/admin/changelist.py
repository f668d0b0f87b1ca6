"""The changelist of a sharded model: one shard, one key, or a page of all shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from django.contrib import admin
from django.contrib.admin.templatetags.admin_list import date_hierarchy
from django.contrib.admin.utils import get_fields_from_path, quote
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.core.exceptions import FieldDoesNotExist
from django.db.models import ForeignKey, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html

from sharded_orm.admin import pagination
from sharded_orm.admin.filters import count_where_possible, routed_filters, split_filters
from sharded_orm.admin.global_lookups import crossing, cuts
from sharded_orm.admin.identity import identify, is_misplaced, object_id
from sharded_orm.admin.shard_picker import ShardPicker
from sharded_orm.admin.shard_scope import KEY_VAR, SHARD_VAR, focus_of
from sharded_orm.models.querysets.route import scoped
from sharded_orm.models.sharding.options import ShardOptions, shard_options

COUNT_VAR = "_count"


class ShardedChangeList(ChangeList):
    """Django's, of the place that the request is about.

    Of one shard or key it costs what Django's does. Of all shards nothing is counted: see
    :func:`paging.read`.
    """

    def __init__(
        self,
        request: HttpRequest,
        model: Any,
        list_display: Any,
        list_display_links: Any,
        list_filter: Any,
        date_hierarchy: Any,
        search_fields: Any,
        list_select_related: Any,
        list_per_page: int,
        list_max_show_all: int,
        list_editable: Any,
        *rest: Any,
    ) -> None:
        options = shard_options(model)
        assert options is not None
        self.shard_options: ShardOptions = options
        self.focus = focus_of(request, options)
        self.across = self.focus.everywhere
        model_admin: Any = rest[0]
        permits = partial(model_admin.has_shard_permission, request)
        self.picker = ShardPicker(options, request.GET, self.focus, permits)
        #: What the page cannot offer here, in sentences.
        self.notes: list[str] = []
        self.answer: pagination.PageOfRows | None = None
        self.dates: dict[str, Any] | None = None
        self.counted = COUNT_VAR in request.GET
        list_filter = routed_filters(model, list_filter)
        if self.across:
            list_display = [*list_display, self._shard_column()]
        if self.focus.home is None:
            list_filter, left_out = split_filters(model, list_filter)
            if left_out:
                self.notes.append(f"To filter by {', '.join(left_out)}, choose a shard.")
            if list_editable:
                self.notes.append("To edit rows in the list, choose a shard or a key.")
                list_editable = ()
        super().__init__(
            request,
            model,
            list_display,
            list_display_links,
            list_filter,
            date_hierarchy,
            search_fields,
            list_select_related,
            list_per_page,
            list_max_show_all,
            list_editable,
            *rest,
        )

    # -- What the page asks ----------------------------------------------------

    def get_filters_params(self, params: Any = None) -> Any:
        # Where one looks is no filter. It stays in every link; see get_query_string().
        found = super().get_filters_params(params)
        for name in (SHARD_VAR, KEY_VAR, COUNT_VAR):
            found.pop(name, None)
        return found

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        # The number of rows is asked for once, not with every further page.
        return str(super().get_query_string(new_params, [*(remove or ()), COUNT_VAR]))

    def get_filters(self, request: HttpRequest) -> Any:
        # The choices of filters: related rows of this shard.
        with scoped(self.focus.alias) if self.focus.alias is not None else nullcontext():
            return self._filters(request)

    def _filters(self, request: HttpRequest) -> Any:
        specs, has, given, duplicates, active = super().get_filters(request)
        lookups: dict[str, Any] = given
        for name in list(lookups):
            found = crossing(self.model, name)
            if found is not None:
                theirs = found.find_by({found.rest: lookups.pop(name)}, request)
                if found.name in lookups:
                    # By another condition, or as text of the URL. Django takes several lists for
                    # alternatives, and all conditions must hold.
                    before = {str(value) for some in lookups[found.name] for value in some}
                    theirs = [value for value in theirs if str(value) in before]
                lookups[found.name] = [theirs]
        for spec in specs:
            if self.across:
                count_where_possible(spec)
            if note := getattr(spec, "note", ""):
                self.notes.append(note)
            choices = getattr(spec, "lookup_choices", None)
            if isinstance(choices, QuerySet) and choices.model is not self.model:
                # Read now: the page is rendered when the shard is no longer assumed.
                len(choices)
        return specs, has, lookups, duplicates, active

    def apply_select_related(self, qs: Any) -> Any:
        """Follows relations inside the group by joins, and those to global rows by a prefetch."""
        wanted = self.list_select_related
        paths: list[str] = []
        if wanted is True or (wanted is False and self.has_related_field_in_list_display()):
            paths = [
                field.name
                for field in self.lookup_opts.concrete_fields
                if isinstance(field, ForeignKey)
                and (field.name in self.list_display or (wanted is True and not field.null))
            ]
        elif wanted:
            paths = list(wanted)
        beside = [path for path in paths if not self._leaves(path)]
        outside = [path for path in paths if self._leaves(path)]
        if beside:
            qs = qs.select_related(*beside)
        return qs.prefetch_related(*outside) if outside else qs

    def _leaves(self, path: str) -> bool:
        """Whether the relations of ``path`` lead to another group or the global database."""
        group = self.shard_options.group
        fields: list[Any] = get_fields_from_path(self.model, path)
        related = [field.path_infos[-1].to_opts.model for field in fields]
        theirs = [shard_options(model) for model in related]
        return any(options is None or options.group != group for options in theirs)

    def get_ordering_field(self, field_name: Any) -> Any:
        found = super().get_ordering_field(field_name)
        if not isinstance(found, str):
            return found
        path = found.lstrip("-")
        try:
            field: Any = self.lookup_opts.get_field(path)
        except FieldDoesNotExist:
            # No shard can order by a column of the global database.
            return None if crossing(self.model, path) is not None else found
        if isinstance(field, ForeignKey) and self._leaves(path):
            return field.attname  # Django orders by the ordering of the related model.
        return found

    # -- What it shows ---------------------------------------------------------

    def get_results(self, request: HttpRequest) -> None:
        self.notes += cuts(request)
        if not self.across:
            super().get_results(request)
            self._mark_misplaced(len(identify(self.result_list)))
            return
        size = self.list_per_page
        self.page_num = max(1, self.page_num)
        self.full_result_count = None
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = False
        self.paginator = None
        self.result_list: Any = []
        self.result_count = 0
        if pagination.is_too_far(self.page_num, size):
            self.multi_page = True
            self.notes.append(
                f"Pages over all shards end at row {pagination.LAST_ROW}. To see rows behind it,"
                " narrow the search, or choose a shard or a key."
            )
            return
        model_admin: Any = self.model_admin
        if not model_admin.may_look_everywhere(request):
            self.multi_page = False
            self.notes.append("You may not look at all shards: choose a shard or a key.")
            return
        self.answer = pagination.read(self.queryset, self.page_num, size)
        self.result_list = self.answer.rows
        identify(self.result_list)
        self.multi_page = self.answer.more or self.page_num > 1
        # As many as are known of, unless they are counted.
        seen = pagination.first_row(self.page_num, size) + len(self.answer.rows) + self.answer.more
        self.counted = self.counted and not self.answer.silent
        self.result_count = self.queryset.count() if self.counted else seen
        if not self.answer.rows and self.page_num > 1:
            self.notes.append(f"There is no page {self.page_num}.")
        # Not while somebody is waited for in vain: it would be once more.
        if self.date_hierarchy and not self.answer.errors:
            self.dates = self._dates()

    def _dates(self) -> dict[str, Any] | None:
        """What Django's template tag shows, of rows that need not be told apart.

        A search through a relation finds rows twice; that dates are distinct is enough, and
        aggregates of distinct rows cannot be merged.
        """
        unlike = copy.copy(self)
        unlike.queryset = self.queryset._chain()
        unlike.queryset.query.distinct = False
        found: dict[str, Any] | None = date_hierarchy(unlike)
        return found

    def _mark_misplaced(self, away: int) -> None:
        """Show the shard of rows that are not where their key leads."""
        if away and self.focus.key is None:
            self.list_display = [*self.list_display, self._shard_column()]
            rows = "row is" if away == 1 else "rows are"
            self.notes.append(
                f"{away} {rows} misplaced: the key leads to another shard. They can be looked at,"
                " not changed."
            )

    def _shard_column(self) -> Callable[[Any], str]:
        """The column that says the shard, and links to its list."""
        picker = self.picker

        @admin.display(description="shard")
        def sharded_orm_shard(row: Any) -> str:
            alias = row._state.db
            link = format_html('<a href="{}">{}</a>', picker.link_to(alias), alias)
            if not is_misplaced(row):
                return link
            return format_html('{} <strong class="misplaced">misplaced</strong>', link)

        return sharded_orm_shard

    def url_for_result(self, result: Any) -> str:
        return reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_change",
            args=(quote(object_id(result)),),
            current_app=self.model_admin.admin_site.name,
        )

    @property
    def exact(self) -> bool:
        """Whether :attr:`result_count` is the number of all rows."""
        return not self.across or self.counted

    @property
    def count_link(self) -> str:
        return self._linked(**{COUNT_VAR: "1"})

    @property
    def all_link(self) -> str:
        """This place without a search or filters."""
        kept = {SHARD_VAR, KEY_VAR, "_popup", "_to_field", "_facets"}
        return str(self.get_query_string(remove=[n for n in self.filter_params if n not in kept]))

    @property
    def previous_link(self) -> str | None:
        """To the page before this one; from far behind, to the last one that there may be."""
        if self.page_num <= 1:
            return None
        page = min(self.page_num - 1, pagination.last_page(self.list_per_page))
        return self._linked(**{PAGE_VAR: page})

    @property
    def next_link(self) -> str | None:
        if self.answer is None or not self.answer.more:
            return None
        return self._linked(**{PAGE_VAR: self.page_num + 1})

    @property
    def search_parameters(self) -> list[tuple[str, str]]:
        """What a search keeps of this page, for hidden inputs."""
        return [
            (name, value)
            for name, value in self.params.items()
            if name not in (SEARCH_VAR, COUNT_VAR)
        ]

    @property
    def first_number(self) -> int:
        """The number of the first row of this page, from 1."""
        return pagination.first_row(self.page_num, self.list_per_page) + 1

    @property
    def last_number(self) -> int:
        return self.first_number + len(self.result_list) - 1

    @property
    def place(self) -> str:
        """Where this list looks, as the query of another page's URL; may be empty."""
        return self.focus.query_string

    def _linked(self, **new: Any) -> str:
        return str(super().get_query_string(new, [COUNT_VAR]))
