"""Checks of our migrations among those of the Airflow that they are applied to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory

from _lib.paths import CORE_SOURCE

OURS = CORE_SOURCE / "airflow" / "migrations" / "versions"
NAME = re.compile(r"(?P<number>\d{4})_(?P<release>\d+_\d+_\d+)_\w+\.py")


def problems(migrations: Path) -> Iterator[str]:
    """Yield what is wrong with our migrations.

    :param migrations: the folder `airflow/migrations` of an Airflow that has them.
    """
    config = Config()
    config.set_main_option("script_location", str(migrations))
    script = ScriptDirectory.from_config(config)
    if len(script.get_heads()) != 1:
        yield f"the migrations have more than one head: {', '.join(script.get_heads())}"
        return
    ours = {path.name for path in OURS.glob("*.py")}
    # Down from the head.
    chain = list(script.walk_revisions())
    names = [Path(revision.path).name for revision in chain]
    if set(names[: len(ours)]) != ours:
        yield f"the newest migrations are {', '.join(names[: len(ours)])}, and ours {', '.join(sorted(ours))}"
        return
    for revision, name, below in zip(chain[: len(ours)], names, names[1:], strict=False):
        match = NAME.fullmatch(name)
        if match is None:
            yield f"{name} is not named NNNN_X_Y_Z_what_it_does.py"
            continue
        if int(match["number"]) <= int(below[:4]):
            yield f"{name} does not have a higher number than {below}, which comes before it"
        release = getattr(revision.module, "airflow_version", None)
        if release != match["release"].replace("_", "."):
            yield f"{name} has airflow_version = {release!r}"
