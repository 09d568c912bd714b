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
Reading on with fan-outs and resync passes, a bounded step at a time (spec 5).

Both move a cursor over the pending runs, so that neither remembers what it has still to do.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from airflow.jobs.asset_partition_wake import claim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.orm import Session

    from airflow.jobs.asset_partition_wake.agenda import FanOut, ResyncPass

PAGES = 3
"""How many pages of runs that cannot fire a pass skips before it leaves the rest to the next loop."""


def next_of_fan_outs(fan_outs: Iterable[FanOut], count: int, *, session: Session) -> dict[int, str]:
    """
    Return ``{id: dag_id}`` of the next *count* runs of the fan-outs, evenly shared, and move them on.

    Runs that a peer had locked come again first.
    """
    runs: dict[int, str] = {}
    waiting = [fan_out for fan_out in fan_outs if not fan_out.finished]
    for served, fan_out in enumerate(waiting):
        share = ceil((count - len(runs)) / (len(waiting) - served))
        if share <= 0:
            break
        again = sorted(fan_out.held)[:share]
        fan_out.held -= frozenset(again)
        runs.update(dict.fromkeys(again, fan_out.dag_id))
        limit = share - len(again)
        if not limit or fan_out.exhausted:
            continue
        ids = claim.pending_of_dag(
            fan_out.dag_id, after=fan_out.after, upto=fan_out.upto, limit=limit, session=session
        )
        fan_out.exhausted = len(ids) < limit
        fan_out.after = ids[-1] if ids else fan_out.after
        runs.update(dict.fromkeys(ids, fan_out.dag_id))
    return runs


def next_of_pass(resync: ResyncPass, count: int, *, session: Session) -> list[int]:
    """Return the next *count* runs of the pass, and move it on; skips Dags that cannot run."""
    runs = sorted(resync.held)[:count]
    resync.held -= frozenset(runs)
    for _ in range(PAGES):
        if len(runs) == count or resync.exhausted:
            break
        dag_id, after = resync.after
        limit = count - len(runs)
        ids = claim.pending_of_dag(dag_id, after=after, upto=resync.upto, limit=limit, session=session)
        runs += ids
        if ids:
            resync.after = (dag_id, ids[-1])
        if len(ids) == limit:
            break
        limit -= len(ids)
        page = claim.pending_of_later_dags(dag_id, upto=resync.upto, limit=limit, session=session)
        runs += [apdr_id for _, apdr_id, can_run in page if can_run]
        resync.exhausted = len(page) < limit
        if page:
            dag_id, apdr_id, can_run = page[-1]
            resync.after = (dag_id, apdr_id if can_run else resync.upto)
    return runs
