"""The ``ChangeList`` of a sharded model: the rows of one shard, of one key, or of all shards."""

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
from sharded_orm.admin.global_lookups import global_lookup, lookup_notes
from sharded_orm.admin.identity import identify, is_misplaced, object_id
from sharded_orm.admin.shard_picker import ShardPicker
from sharded_orm.admin.shard_scope import KEY_VAR, SHARD_VAR, scope_of
from sharded_orm.models.querysets.route import scoped
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import ShardOptions, shard_options

COUNT_VAR = "_count"


class ShardedChangeList(ChangeList):
    """Django's ``ChangeList``, restricted to the scope of the request (:class:`ShardScope`).

    If the scope is one shard or one key, the page sends the same queries as Django's. If the scope
    is all shards, the page counts the rows only if the user asks for their number; see
    :func:`pagination.read` for the cost. In both cases, :func:`identify` looks up the shard to
    which each row's shard key leads, to recognize misplaced rows.
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
        model_admin: Any,
        sortable_by: Any,
        search_help_text: Any,
    ) -> None:
        options = shard_options(model)
        assert options is not None
        self.shard_options: ShardOptions = options
        self.scope = scope_of(request, options)
        self.all_shards = self.scope.everywhere
        permits = partial(model_admin.has_shard_permission, request)
        self.picker = ShardPicker(options, request.GET, self.scope, permits)
        #: Sentences that the page shows to the user, for example that a filter does not work over
        #: all shards.
        self.notes: list[str] = []
        self.page_of_rows: pagination.PageOfRows | None = None
        self.date_choices: dict[str, Any] | None = None
        self.counted = COUNT_VAR in request.GET
        list_filter = routed_filters(model, list_filter)
        if self.all_shards:
            list_display = [*list_display, self._shard_column()]
        if self.scope.home is None:
            list_filter, unusable = split_filters(model, list_filter)
            if unusable:
                self.notes.append(f"To filter by {', '.join(unusable)}, choose a shard.")
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
            model_admin,
            sortable_by,
            search_help_text,
        )

    # -- Queries ---------------------------------------------------------------

    def get_filters_params(self, params: Any = None) -> Any:
        # Remove the parameters that this package adds to URLs, because Django would take them for
        # filters. The links of the page still have the shard and the key; see get_query_string().
        filter_params = super().get_filters_params(params)
        for name in (SHARD_VAR, KEY_VAR, COUNT_VAR):
            filter_params.pop(name, None)
        return filter_params

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        # Leave out the parameter that asks for the number of rows. It applies only to this page,
        # and not to the pages to which the links on it lead.
        return str(super().get_query_string(new_params, [*(remove or ()), COUNT_VAR]))

    def get_filters(self, request: HttpRequest) -> Any:
        # Filters query related rows for their choices. The ``with`` block sends these queries to
        # the shard that the page shows.
        with scoped(self.scope.alias) if self.scope.alias is not None else nullcontext():
            return self._filters(request)

    def _filters(self, request: HttpRequest) -> Any:
        specs, has_filters, remaining, duplicates, active = super().get_filters(request)
        lookups: dict[str, Any] = remaining
        for name in list(lookups):
            lookup = global_lookup(self.model, name)
            if lookup is not None:
                values = lookup.find_by({lookup.rest: lookups.pop(name)}, request)
                if lookup.name in lookups:
                    # Another filter or the URL has already given a list of values for the same
                    # lookup, such as owner__in. Django would join the two lists, and so find the
                    # rows that match any of the values in them. But a row must match both lists. So
                    # keep only the values that are in both.
                    others = {str(value) for part in lookups[lookup.name] for value in part}
                    values = [value for value in values if str(value) in others]
                lookups[lookup.name] = [values]
        for spec in specs:
            if self.all_shards:
                count_where_possible(spec)
            if note := getattr(spec, "note", ""):
                self.notes.append(note)
            choices = getattr(spec, "lookup_choices", None)
            if isinstance(choices, QuerySet) and choices.model is not self.model:
                # Read the choices of the filter now. Filters query lazily, when the template is
                # rendered. At that time, no default shard is set any more, so the query would be
                # refused.
                len(choices)
        return specs, has_filters, lookups, duplicates, active

    def apply_select_related(self, qs: Any) -> Any:
        """Join related rows of the same shard group, and prefetch all other related rows."""
        select_related = self.list_select_related
        paths: list[str] = []
        if isinstance(select_related, bool):
            paths = [
                field.name
                for field in self.lookup_opts.concrete_fields
                if isinstance(field, ForeignKey)
                and (field.name in self.list_display or (select_related is True and not field.null))
            ]
        elif select_related:
            paths = list(select_related)
        inside = [path for path in paths if not self._leaves_group(path)]
        outside = [path for path in paths if self._leaves_group(path)]
        if inside:
            qs = qs.select_related(*inside)
        return qs.prefetch_related(*outside) if outside else qs

    def _leaves_group(self, path: str) -> bool:
        """Whether a relation in ``path`` leads to another shard group or to the global database."""
        group = self.shard_options.group
        fields: list[Any] = get_fields_from_path(self.model, path)
        models = [field.path_infos[-1].to_opts.model for field in fields]
        related = [shard_options(model) for model in models]
        return any(options is None or options.group != group for options in related)

    def get_ordering_field(self, field_name: Any) -> Any:
        ordering = super().get_ordering_field(field_name)
        if not isinstance(ordering, str):
            return ordering
        path = ordering.lstrip("-")
        try:
            field: Any = self.lookup_opts.get_field(path)
        except FieldDoesNotExist:
            # Drop the ordering if its column is in the global database, because no shard can join
            # the table of that column.
            return (
                None if global_lookup(self.model, path, joins_copies=True) is not None else ordering
            )
        if (
            isinstance(field, ForeignKey)
            and self._leaves_group(path)
            and not has_copies(field.related_model)
        ):
            # Order by the value of the foreign key. Django would order by a column of the related
            # model, whose table is not in this database.
            return field.attname
        return ordering

    # -- Results ---------------------------------------------------------------

    def get_results(self, request: HttpRequest) -> None:
        self.notes += lookup_notes(request)
        if not self.all_shards:
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
        self.page_of_rows = pagination.read(self.queryset, self.page_num, size)
        self.result_list = self.page_of_rows.rows
        identify(self.result_list)
        self.multi_page = self.page_of_rows.more or self.page_num > 1
        # The rows are not counted, so show the number of rows that are known to exist. These are
        # all rows up to the end of this page, and one more if there is a next page.
        known = (
            pagination.first_row(self.page_num, size)
            + len(self.page_of_rows.rows)
            + self.page_of_rows.more
        )
        self.counted = self.counted and not self.page_of_rows.silent
        self.result_count = self.queryset.count() if self.counted else known
        if not self.page_of_rows.rows and self.page_num > 1:
            self.notes.append(f"There is no page {self.page_num}.")
        # Show the date drill-down only if no shard has failed, because the query of the drill-down
        # would wait for the failed shard once more.
        if self.date_hierarchy and not self.page_of_rows.errors:
            self.date_choices = self._date_choices()

    def _date_choices(self) -> dict[str, Any] | None:
        """Return the context of Django's template tag ``date_hierarchy``.

        If a search goes through a relation, its joins may return a row twice, so Django adds
        ``distinct()`` to the query of the list. This method leaves ``distinct()`` out, because
        aggregates of distinct rows cannot be merged over shards. Rows that are returned twice do no
        harm here, because the tag reads only dates, and each date once.
        """
        not_distinct = copy.copy(self)
        not_distinct.queryset = self.queryset._chain()
        not_distinct.queryset.query.distinct = False
        context: dict[str, Any] | None = date_hierarchy(not_distinct)
        return context

    def _mark_misplaced(self, count: int) -> None:
        """If the page has misplaced rows, add a note, and a column with each row's shard.

        The shard key of a misplaced row leads to a different shard. A list of the rows of one key
        has none, because it reads only the shard of that key.

        :param count: the number of misplaced rows on the page.
        """
        if count and self.scope.key is None:
            self.list_display = [*self.list_display, self._shard_column()]
            rows = "row is" if count == 1 else "rows are"
            self.notes.append(
                f"{count} {rows} misplaced: the key leads to another shard. They can be looked at,"
                " not changed."
            )

    def _shard_column(self) -> Callable[[Any], str]:
        """Return a column that names the shard of each row, and links to the list of that shard."""
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
    def is_exact(self) -> bool:
        """True if :attr:`result_count` is the number of all matching rows. False if the rows were
        not counted, so that :attr:`result_count` is only the number of rows that are known to
        exist.
        """
        return not self.all_shards or self.counted

    @property
    def count_link(self) -> str:
        return self._link(**{COUNT_VAR: "1"})

    @property
    def all_link(self) -> str:
        """The link to the list of the same shard, key or group without a search or filters."""
        scope_and_flags = {SHARD_VAR, KEY_VAR, "_popup", "_to_field", "_facets"}
        filters = [name for name in self.filter_params if name not in scope_and_flags]
        return str(self.get_query_string(remove=filters))

    @property
    def previous_link(self) -> str | None:
        """The link to the previous page; None on the first page.

        If the URL asks for a page after row :data:`pagination.LAST_ROW`, the page is empty. The
        link on it leads to the last page that can be shown.
        """
        if self.page_num <= 1:
            return None
        page = min(self.page_num - 1, pagination.last_page(self.list_per_page))
        return self._link(**{PAGE_VAR: page})

    @property
    def next_link(self) -> str | None:
        if self.page_of_rows is None or not self.page_of_rows.more:
            return None
        return self._link(**{PAGE_VAR: self.page_num + 1})

    @property
    def search_parameters(self) -> list[tuple[str, str]]:
        """Names and values of the URL parameters that the search form keeps in hidden inputs."""
        return [
            (name, value)
            for name, value in self.params.items()
            if name not in (SEARCH_VAR, COUNT_VAR)
        ]

    @property
    def first_number(self) -> int:
        """The number of the first row of this page, counted from 1."""
        return pagination.first_row(self.page_num, self.list_per_page) + 1

    @property
    def last_number(self) -> int:
        return self.first_number + len(self.result_list) - 1

    @property
    def scope_query(self) -> str:
        """The query string that names this list's shard or shard key in links to other pages.

        An empty string if the list shows the whole shard group.
        """
        return self.scope.query_string

    def _link(self, **new: Any) -> str:
        return str(super().get_query_string(new, [COUNT_VAR]))
