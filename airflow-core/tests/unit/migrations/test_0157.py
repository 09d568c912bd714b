"""Migration 0157: there and back, with rows, after a kill, and to the schema that a new database has (spec 3)."""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import event

from _lib import services
from airflow import settings
from airflow._shared.timezones import timezone
from airflow.models import import_all_models
from airflow.models.asset_partition_wake import AssetPartitionDagRunWake
from airflow.models.base import Base
from airflow.utils.db import _REVISION_HEADS_MAP, _get_alembic_config, _get_script_object
from airflow.utils.db_cleanup import config_dict, run_cleanup

from tests_common.db import new_session
from tests_common.factories import ask, asked

BACKEND = os.environ.get("WAKE_BACKEND", "sqlite")
WAKE = "asset_partition_dag_run_wake"
APDR = "asset_partition_dag_run"
APDR_INDEXES = {"idx_apdr_target_dag_id_partition_key", "idx_apdr_pending"}
HEAD = "b7e4c19d52a8"
BASE = "d2f4e1b3c5a7"


class Killed(Exception):
    """The process that migrates ends here."""


# -- a database as the base makes it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock() -> sa.MetaData:
    """The tables without what the migration adds: those of stock Airflow."""
    import_all_models()
    metadata = sa.MetaData(naming_convention=Base.metadata.naming_convention)
    for table in Base.metadata.sorted_tables:
        if table.name != WAKE:
            table.to_metadata(metadata)
    for index in [index for index in metadata.tables[APDR].indexes if index.name in APDR_INDEXES]:
        metadata.tables[APDR].indexes.remove(index)
    return metadata


@pytest.fixture(scope="module")
def engine(stock: sa.MetaData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Engine]:
    """A database of its own, at the head of the base."""
    name = f"wake_migration_{os.getpid()}"
    if BACKEND == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('migration') / 'airflow.db'}"
    else:
        url = services.fresh_database(BACKEND, name)
    engine = sa.create_engine(url)
    stock.create_all(engine)
    migrate(engine, lambda revision: script()._stamp_revs(BASE, revision))
    yield engine
    engine.dispose()
    if BACKEND != "sqlite":
        services.drop_database(BACKEND, name)


@pytest.fixture
def base(engine: sa.Engine, stock: sa.MetaData) -> sa.Engine:
    """The same, with a new table of pending runs that has a row."""
    with engine.begin() as connection:
        connection.execute(sa.text(f"DROP TABLE IF EXISTS {WAKE}"))
        connection.execute(sa.text(f"DROP TABLE {APDR}"))
        stock.tables[APDR].create(connection)
        connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{BASE}'"))
        now = timezone.utcnow()
        run = {"target_dag_id": "dag", "partition_key": "a", "created_at": now, "updated_at": now}
        connection.execute(sa.insert(stock.tables[APDR]), [run])
    return engine


@functools.cache
def script() -> ScriptDirectory:
    return _get_script_object()


def migrate(engine: sa.Engine, steps: Callable[..., Any]) -> None:
    """Run migrations as Alembic's commands do, without reading all of them each time."""
    config = _get_alembic_config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        with EnvironmentContext(config, script(), fn=lambda revision, context: steps(revision)):
            script().run_env()


def upgrade(engine: sa.Engine) -> None:
    migrate(engine, lambda revision: script()._upgrade_revs("heads", revision))


def downgrade(engine: sa.Engine) -> None:
    migrate(engine, lambda revision: script()._downgrade_revs(BASE, revision))


@contextmanager
def killed_before(engine: sa.Engine, number: int) -> Iterator[None]:
    """Kill whoever is about to send its statement *number* that changes the schema, or notes its version."""
    counter = itertools.count()

    def kill(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        if re.match(r"\s*(CREATE|DROP|ALTER|UPDATE alembic_version)", statement) and next(counter) == number:
            raise Killed

    event.listen(engine, "before_cursor_execute", kill)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", kill)


def schema(engine: sa.Engine) -> dict[str, Any]:
    """Return what there is of the tables that the migration touches."""
    inspector = sa.inspect(engine)

    def named(items: list[Any]) -> list[Any]:
        return sorted(items, key=lambda item: str(item["name"]))

    return {
        table: {
            "columns": [column | {"type": repr(column["type"])} for column in inspector.get_columns(table)],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": named(inspector.get_foreign_keys(table)),
            "unique": named(inspector.get_unique_constraints(table)),
            "indexes": named(inspector.get_indexes(table)),
        }
        for table in (WAKE, APDR)
        if inspector.has_table(table)
    }


def version(engine: sa.Engine) -> str:
    with engine.connect() as connection:
        return connection.scalar(sa.text("SELECT version_num FROM alembic_version"))


def count(engine: sa.Engine, table: str) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.text(f"SELECT count(*) FROM {table}"))


def add_request(engine: sa.Engine) -> int:
    """Insert a request, and return its id."""
    with engine.begin() as connection:
        row = {"apdr_id": 1, "target_dag_id": "dag", "reason": "key log"}
        return connection.execute(sa.insert(AssetPartitionDagRunWake.__table__), row).inserted_primary_key[0]


# -- the place among the others -----------------------------------------------------------------------------------------


def test_stands_on_the_head_of_the_base():
    """It is the only head, and comes right after the last migration of the release it is applied to."""
    revision = script().get_revision(HEAD)

    assert [HEAD] == script().get_heads()
    assert list(_REVISION_HEADS_MAP.values())[-1] == BASE == revision.down_revision
    assert "0157" == Path(revision.path).name[:4]
    assert "3.5.0" == revision.module.airflow_version


# -- there and back -----------------------------------------------------------------------------------------------------


def test_migrated_schema_is_that_of_a_new_database(base):
    """Step by step from the base's head comes the schema that ``airflow db migrate`` makes in an empty database."""
    upgrade(base)

    assert schema(settings.engine) == schema(base)
    assert HEAD == version(base) == version(settings.engine)


def test_downgrade_takes_everything_away(base):
    """The base's schema is back, on MySQL with the index that serves the foreign key."""
    before = schema(base)
    upgrade(base)
    downgrade(base)

    assert before == schema(base)
    assert BASE == version(base)


def test_there_back_and_there_again(base):
    """An upgrade after a downgrade makes the same schema as the first."""
    upgrade(base)
    downgrade(base)
    upgrade(base)

    assert schema(settings.engine) == schema(base)


def test_rows_stay_where_they_belong(base):
    """Pending runs are kept both ways; requests go with their table, and a new one has none."""
    upgrade(base)
    add_request(base)
    assert (1, 1) == (count(base, APDR), count(base, WAKE))

    downgrade(base)
    assert 1 == count(base, APDR)

    upgrade(base)
    assert (1, 0) == (count(base, APDR), count(base, WAKE))


def test_ids_of_a_migrated_table_are_not_given_out_twice(base):
    """The id of a deleted request is not the id of the next, in a migrated table too."""
    upgrade(base)
    first = add_request(base)
    with base.begin() as connection:
        connection.execute(sa.delete(AssetPartitionDagRunWake))

    assert first < add_request(base)


# -- a kill -------------------------------------------------------------------------------------------------------------


def test_upgrade_goes_on_after_a_kill_between_any_two_statements(base):
    """On MySQL, and in effect on SQLite, each statement is committed: a second run does what is left."""
    for number in itertools.count():
        try:
            with killed_before(base, number):
                upgrade(base)
        except Killed:
            upgrade(base)
            assert (HEAD, schema(settings.engine)) == (version(base), schema(base)), f"killed before {number}"
            downgrade(base)
        else:
            break

    assert number >= 5


def test_downgrade_goes_on_after_a_kill_between_any_two_statements(base):
    """So it does downwards."""
    before = schema(base)
    for number in itertools.count():
        upgrade(base)
        try:
            with killed_before(base, number):
                downgrade(base)
        except Killed:
            downgrade(base)
            assert (BASE, before) == (version(base), schema(base)), f"killed before {number}"
        else:
            break

    assert number >= 4


def test_indexes_made_by_hand_are_kept(base):
    """An index that somebody made before, because it takes long, is not made again."""
    with base.begin() as connection:
        connection.execute(
            sa.text(f"CREATE INDEX idx_apdr_pending ON {APDR} (created_dag_run_id, target_dag_id, id)")
        )
    upgrade(base)

    assert schema(settings.engine) == schema(base)


# -- what operators run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "revisions", "expected"),
    [
        (command.upgrade, f"{BASE}:{HEAD}", {"CREATE TABLE": 1, "CREATE INDEX": 3}),
        (command.downgrade, f"{HEAD}:{BASE}", {"DROP TABLE": 1, "DROP INDEX": 2}),
    ],
    ids=["upgrade", "downgrade"],
)
def test_sql_can_be_written_out(run, revisions, expected):
    """``--show-sql-only`` shows all statements, without a look at the database."""
    config = _get_alembic_config()
    config.output_buffer = io.StringIO()
    run(config, revisions, sql=True)
    sql = config.output_buffer.getvalue()

    assert expected == {words: len(re.findall(rf"^{words} ", sql, re.MULTILINE)) for words in expected}


def test_airflow_db_downgrade_and_migrate(base):
    """``airflow db downgrade --to-version 3.3.2`` leads to the base's schema, and ``airflow db migrate`` back."""
    before = schema(base)
    upgrade(base)
    add_request(base)

    airflow(base, "db", "downgrade", "--to-version", "3.3.2", "--yes")
    assert (BASE, before) == (version(base), schema(base))

    airflow(base, "db", "migrate")
    assert (HEAD, schema(settings.engine)) == (version(base), schema(base))
    assert 1 == count(base, APDR)


def airflow(engine: sa.Engine, *arguments: str) -> None:
    url = engine.url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-m", "airflow", *arguments],
        env=os.environ | {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.usefixtures("db")
def test_airflow_db_clean_leaves_requests_alone():
    """However old a request is, ``airflow db clean`` does not delete it: an answer does."""
    (request,) = ask("dag", created_at=timezone.datetime(2020, 1, 1))
    with new_session() as session:
        run_cleanup(
            clean_before_timestamp=timezone.utcnow(), confirm=False, skip_archive=True, session=session
        )

    assert WAKE not in config_dict
    assert [request] == asked()
