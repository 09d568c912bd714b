"""The option ``[scheduler] asset_partition_resync_interval`` (spec 5)."""

from __future__ import annotations

import pytest

from airflow.configuration import conf
from airflow.exceptions import AirflowConfigException
from airflow.jobs.job import Job
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner

OPTION = ("scheduler", "asset_partition_resync_interval")
VARIABLE = "AIRFLOW__SCHEDULER__ASSET_PARTITION_RESYNC_INTERVAL"


def test_default_is_an_hour():
    """A default install has the value that ``airflow config get-value`` shows, and the scheduler takes it."""
    assert "3600.0" == conf.get(*OPTION)
    assert 3600.0 == SchedulerJobRunner(job=Job())._asset_partition_wake._agenda.resync_interval


def test_is_in_the_reference():
    """The reference of options says what it is, and since when it is there."""
    entry = conf.configuration_description[OPTION[0]]["options"][OPTION[1]]

    assert ("float", "3.5.0", "3600.0") == (entry["type"], entry["version_added"], entry["default"])
    assert "pending asset partition" in entry["description"]


@pytest.mark.parametrize("value", ["1", "0.5", "86400", "1e3"])
def test_positive_number_is_taken(value, monkeypatch):
    """Any positive number of seconds will do."""
    monkeypatch.setenv(VARIABLE, value)

    assert float(value) == SchedulerJobRunner(job=Job())._asset_partition_wake._agenda.resync_interval


@pytest.mark.parametrize("value", ["", "an hour", "0", "0.0", "-1", "nan", "inf", "-inf", "1,5"])
def test_anything_else_is_refused(value, monkeypatch):
    """A scheduler with another value does not start; the error names the option and the value."""
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(AirflowConfigException) as error:
        SchedulerJobRunner(job=Job())

    assert (
        f"[scheduler] asset_partition_resync_interval must be a positive number of seconds, not {value!r}"
        == str(error.value)
    )
