#
# Licensed to the Apache Software Foundation (ASF) under one
# or more contributor license agreements.  See the NOTICE file
# distributed with this work for additional information
# regarding copyright ownership.  The ASF licenses this file
# to you under the Apache License, Version 2.0 (the
# "License"); you may not use this file except in compliance
# with the License.  You may obtain a copy of the License at
#
#   http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing,
# software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY
# KIND, either express or implied.  See the License for the
# specific language governing permissions and limitations
# under the License.
"""
Add asset_partition_dag_run_wake, and the indexes that asset partitions are looked up by.

Revision ID: b7e4c19d52a8
Revises: d2f4e1b3c5a7
Create Date: 2026-12-01 12:00:00.000000

"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from airflow.migrations.db_types import StringID
from airflow.utils.sqlalchemy import UtcDateTime

revision = "b7e4c19d52a8"
down_revision = "d2f4e1b3c5a7"
branch_labels = None
depends_on = None
airflow_version = "3.5.0"

WAKE = "asset_partition_dag_run_wake"
APDR = "asset_partition_dag_run"
# MySQL keeps an index for each foreign key, named like it, and drops it once another index can serve in its place.
MYSQL_FKEY_INDEX = "apdr_created_dag_run_id_fkey"


def upgrade():
    """Create the table of wake requests and the indexes."""
    # MySQL commits each statement by itself: a run that was killed half way must be able to go on.
    # Those who migrate a copy by hand may have made one of the indexes already.
    inspector = sa.inspect(op.get_bind()) if not op.get_context().as_sql else None

    def missing(table: str, name: str) -> bool:
        return inspector is None or name not in {index["name"] for index in inspector.get_indexes(table)}

    if inspector is None or not inspector.has_table(WAKE):
        op.create_table(
            WAKE,
            sa.Column(
                "id",
                sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
                autoincrement=True,
                nullable=False,
            ),
            sa.Column("apdr_id", sa.Integer(), nullable=True),
            sa.Column("target_dag_id", StringID(), nullable=False),
            sa.Column("reason", sa.String(20), nullable=False),
            sa.Column("created_at", UtcDateTime(), nullable=False),
            sa.PrimaryKeyConstraint("id", name=op.f("asset_partition_dag_run_wake_pkey")),
            sqlite_autoincrement=True,
        )
        if inspector is not None:
            inspector.clear_cache()
    if missing(WAKE, "idx_apdr_wake_target_dag_id"):
        op.create_index("idx_apdr_wake_target_dag_id", WAKE, ["target_dag_id", "id"])
    if missing(APDR, "idx_apdr_target_dag_id_partition_key"):
        op.create_index(
            "idx_apdr_target_dag_id_partition_key", APDR, ["target_dag_id", "partition_key", "id"]
        )
    if missing(APDR, "idx_apdr_pending"):
        op.create_index("idx_apdr_pending", APDR, ["created_dag_run_id", "target_dag_id", "id"])
    if inspector is not None:
        inspector.clear_cache()
        # MySQL has dropped it by itself, unless it is the one that a downgrade made.
        if not missing(APDR, MYSQL_FKEY_INDEX):
            op.drop_index(MYSQL_FKEY_INDEX, table_name=APDR)


def downgrade():
    """Drop the indexes and the table, with the requests in it."""
    mysql = op.get_context().dialect.name == "mysql"
    inspector = sa.inspect(op.get_bind()) if not op.get_context().as_sql else None
    indexes = None if inspector is None else {index["name"] for index in inspector.get_indexes(APDR)}

    if mysql and (indexes is None or MYSQL_FKEY_INDEX not in indexes):
        op.create_index(MYSQL_FKEY_INDEX, APDR, ["created_dag_run_id"])
    for name in ("idx_apdr_pending", "idx_apdr_target_dag_id_partition_key"):
        if indexes is None or name in indexes:
            op.drop_index(name, table_name=APDR)
    if inspector is None or inspector.has_table(WAKE):
        op.drop_table(WAKE)
