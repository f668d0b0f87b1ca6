"""A schema with all that Django's migrations can make on PostgreSQL, and with all that SQL can add."""

from __future__ import annotations

from typing import Any

from django.apps.registry import Apps
from django.contrib.postgres import fields, indexes
from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import RangeOperators
from django.contrib.postgres.search import SearchVector, SearchVectorField
from django.db import models
from django.db.models.functions import Lower, Now, Upper


def django_models() -> list[type[models.Model]]:
    """Return models of an app of their own, in the order in which their tables can be created."""
    registry = Apps()

    class Author(models.Model):
        name = models.CharField(max_length=60, unique=True, db_comment="it's the\nname")
        slug = models.SlugField(db_collation="C")
        mail = models.EmailField(db_index=True, null=True)
        born = models.DateField(null=True)
        active = models.BooleanField(db_default=True)
        rank = models.PositiveSmallIntegerField(db_default=3)
        score = models.FloatField(db_default=0)
        greeting = models.TextField(db_default="a,\n  (b\n) and 'c' \\ %s")
        since = models.DateTimeField(db_default=Now())
        upper_name = models.GeneratedField(
            expression=Upper("name"), output_field=models.CharField(max_length=60), db_persist=True
        )

        class Meta:
            apps = registry
            app_label = "rich"
            db_table_comment = "people who write"
            indexes = [
                models.Index(fields=["-born", "name"], name="by_birth", include=["mail"]),
                models.Index(Lower("name").desc(nulls_last=True), "score", name="by_lower"),
                models.Index(
                    fields=["score"], name="active_score", condition=models.Q(active=True)
                ),
                models.Index(fields=["name"], name="by_pattern", opclasses=["varchar_pattern_ops"]),
            ]
            constraints = [
                models.CheckConstraint(condition=models.Q(score__gte=0), name="positive_score"),
                models.UniqueConstraint(
                    fields=["slug"], name="deferred_slug", deferrable=models.Deferrable.DEFERRED
                ),
                models.UniqueConstraint(
                    fields=["born", "mail"], name="null_birth", nulls_distinct=False
                ),
                models.UniqueConstraint(
                    fields=["name", "born"], name="covering", include=["rank", "score"]
                ),
                models.UniqueConstraint(
                    Lower("mail"), name="one_mail", condition=models.Q(active=True)
                ),
            ]

    class Book(models.Model):
        id = models.UUIDField(primary_key=True)
        author = models.ForeignKey(Author, models.CASCADE)
        sequel_of = models.OneToOneField("self", models.SET_NULL, null=True)
        editors = models.ManyToManyField(Author, related_name="+")
        price = models.DecimalField(max_digits=8, decimal_places=2)
        data = models.JSONField(default=dict)
        cover = models.BinaryField(null=True)
        length = models.DurationField(null=True)
        opens = models.TimeField(null=True)
        address = models.GenericIPAddressField(null=True)
        pages = models.PositiveBigIntegerField()
        tags = fields.ArrayField(models.CharField(max_length=20), default=list)
        matrix = fields.ArrayField(fields.ArrayField(models.IntegerField(), size=2), null=True)
        extra = fields.HStoreField(null=True)
        shelf = fields.IntegerRangeField(null=True)
        big_shelf = fields.BigIntegerRangeField(null=True)
        prices = fields.DecimalRangeField(null=True)
        during = fields.DateTimeRangeField(null=True)
        days = fields.DateRangeField(null=True)
        words = SearchVectorField(null=True)

        class Meta:
            apps = registry
            app_label = "rich"
            db_table = "Book of 100%"
            indexes = [
                indexes.GinIndex(fields=["tags"], name="tags_gin", fastupdate=False),
                indexes.GinIndex(fields=["data"], name="data_gin", opclasses=["jsonb_path_ops"]),
                indexes.GinIndex(fields=["words"], name="words_gin"),
                indexes.GinIndex(SearchVector("data", config="simple"), name="search_gin"),
                indexes.GistIndex(fields=["days"], name="days_gist", fillfactor=70),
                indexes.BrinIndex(fields=["pages"], name="pages_brin", pages_per_range=4),
                indexes.HashIndex(fields=["price"], name="price_hash"),
                indexes.SpGistIndex(fields=["shelf"], name="shelf_spgist"),
                indexes.BTreeIndex(fields=["opens"], name="opens_btree", deduplicate_items=False),
            ]
            constraints = [
                ExclusionConstraint(
                    name="one_book_at_a_time",
                    expressions=[
                        ("author", RangeOperators.EQUAL),
                        ("during", RangeOperators.OVERLAPS),
                    ],
                    condition=models.Q(pages__gt=3),
                    deferrable=models.Deferrable.IMMEDIATE,
                ),
            ]

    return [Author, Book]


def create_models(connection: Any) -> None:
    """Create the tables of :func:`django_models`, as a migration does."""
    with connection.schema_editor() as editor:
        for model in django_models():
            editor.create_model(model)


#: What SQL can add, after :func:`create_models`.
SQL = (
    "CREATE COLLATION ci (PROVIDER = icu, LOCALE = 'und-u-ks-level2', DETERMINISTIC = false)",
    "CREATE TYPE mood AS ENUM ('sad', 'it''s ok', E'a\\nb\\\\')",
    "CREATE DOMAIN positive AS integer DEFAULT 3 NOT NULL CONSTRAINT above_0 CHECK (VALUE > 0)",
    'CREATE TYPE pair AS (a positive, "B" text COLLATE "C")',
    "CREATE TYPE span AS RANGE (SUBTYPE = float8, SUBTYPE_DIFF = float8mi)",
    "CREATE SEQUENCE own AS integer START 50 INCREMENT -2 MAXVALUE 90 CYCLE CACHE 3",
    "CREATE FUNCTION plus(x integer DEFAULT 1) RETURNS integer LANGUAGE sql AS 'SELECT x + 1'",
    "CREATE FUNCTION checked(x positive) RETURNS boolean IMMUTABLE LANGUAGE sql"
    " BEGIN ATOMIC SELECT plus(x) > 0; END",
    'CREATE TABLE "Mixed Case" (id serial PRIMARY KEY, feeling mood DEFAULT \'sad\', n positive'
    " CONSTRAINT is_checked CHECK (checked(n)), p pair, s span, word text COLLATE ci,"
    " number integer DEFAULT nextval('own'), always bigint GENERATED ALWAYS AS IDENTITY"
    " (START 7 INCREMENT 5), mail extensions.citext, code char(3), bits bit(4) DEFAULT B'0101',"
    " at timestamptz(3), during tsrange, CONSTRAINT no_overlap EXCLUDE USING gist (during WITH &&))"
    " WITH (fillfactor = 70, autovacuum_enabled = false)",
    'CREATE TABLE "a ""b"" 9%" ("c""d" integer PRIMARY KEY, "e\nf" text CHECK ("e\nf" <> \'g,\n  h\n)\'))',
    'ALTER TABLE "Mixed Case" ADD CONSTRAINT later CHECK (number > 0) NOT VALID',
    'ALTER TABLE "Mixed Case" ADD CONSTRAINT author FOREIGN KEY (number) REFERENCES rich_author (id)'
    " ON DELETE CASCADE NOT VALID",
    'CREATE INDEX trigrams ON "Mixed Case" USING gin (word gin_trgm_ops)',
    'CREATE STATISTICS numbers (dependencies) ON n, number FROM "Mixed Case"',
    "CREATE TABLE unlogged (a integer)",
    "ALTER TABLE unlogged SET UNLOGGED, ENABLE ROW LEVEL SECURITY, REPLICA IDENTITY FULL",
    "CREATE POLICY even ON unlogged FOR SELECT USING (a % 2 = 0)",
    "CREATE RULE keep AS ON DELETE TO unlogged DO INSTEAD NOTHING",
    "CREATE TABLE measured (day date NOT NULL, value integer) PARTITION BY RANGE (day)",
    "CREATE TABLE measured_2025 PARTITION OF measured FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
    "CREATE INDEX by_day ON measured (day)",
    "CREATE TABLE child (b integer) INHERITS (unlogged)",
    "CREATE VIEW z_names AS SELECT id, name AS n FROM rich_author WHERE greeting <> E'x\\n;\\n'",
    "CREATE VIEW a_names WITH (security_barrier) AS SELECT n, plus(3) FROM z_names",
    "CREATE MATERIALIZED VIEW counted AS SELECT count(*) AS many FROM a_names",
    "CREATE UNIQUE INDEX a_counted ON counted (many)",
    "CREATE FUNCTION authors() RETURNS SETOF rich_author LANGUAGE sql AS 'SELECT * FROM rich_author'",
    "CREATE VIEW from_function AS SELECT name FROM authors()",
    "CREATE PROCEDURE nothing() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$",
    # A function that names its own schema.
    "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql SET search_path = {schema}, pg_temp AS $$"
    " BEGIN INSERT INTO {schema}.unlogged VALUES (1); RETURN NEW; END $$",
    "CREATE TRIGGER note BEFORE INSERT OR UPDATE OF n ON \"Mixed Case\" FOR EACH ROW"
    " WHEN (NEW.n > 3 OR (NEW.number > 1 AND NEW.number < 3)) EXECUTE FUNCTION noted('a b')",
    'CREATE TRIGGER off AFTER DELETE ON "Mixed Case" FOR EACH STATEMENT EXECUTE FUNCTION noted()',
    'ALTER TABLE "Mixed Case" DISABLE TRIGGER off',
    "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON rich_author DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION noted()",
    "CREATE TRIGGER each_part AFTER INSERT ON measured FOR EACH ROW EXECUTE FUNCTION noted()",
)  # fmt: skip
