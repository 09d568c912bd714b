"""The series for upstream: patches that apply in order, each file in its place in Airflow's repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from _lib import wheel
from _lib.builder import PACKAGE, SUPPORTED, Builder
from _lib.edits import BuildError
from _lib.paths import CACHE, ROOT
from _lib.tree import FIXTURES, PLUGIN, Series

CORE = "airflow-core/src/airflow"
METRICS = "observability/metrics/metrics_template.yaml"
MIGRATION = """\
\"\"\"{title}.\"\"\"

revision = "{revision}"
down_revision = {down!r}
airflow_version = "{version}"
"""
EDITS = """\
[[edit]]
name = "model-is-loaded"
why = "A listener."
file = "airflow/models/asset.py"
place = "end"
lines = "import airflow.models.asset_partition_wake  # noqa: E402, F401"

[[edit]]
name = "scheduler-activation-asks"
why = "Key logs count."
file = "airflow/jobs/scheduler_job_runner.py"
in = "activate"
anchor = "ACTIVE.append(1)"
place = "after"
lines = "ACTIVE.append(2)"

[[edit]]
name = "claim"
why = "What was asked for."
file = "airflow/jobs/scheduler_job_runner.py"
in = "claim"
anchor = "return []"
place = "instead"
lines = "return [1]"

[[edit]]
name = "metric"
why = "Listed."
file = "airflow/_shared/observability/metrics/metrics_template.yaml"
in = "metrics"
anchor = "name: old"
place = "before"
lines = '- name: "new"'
"""
OURS = {
    "airflow-core/edits.toml": EDITS,
    f"{CORE}/models/asset_partition_wake.py": "LISTENER = 1\n",
    f"{CORE}/migrations/versions/0157_3_5_0_add_wake.py": MIGRATION.format(
        title="Revises: aaaa", revision="ours", down="aaaa", version="3.5.0"
    ).replace("'aaaa'", '"aaaa"'),
    "airflow-core/newsfragments/76706.significant.rst": "Wake.\n",
    "airflow-core/tests/unit/jobs/test_wake.py": "import pytest\n\n\ndef test_wake(db):\n    assert pytest\n",
    "airflow-core/tests/unit/jobs/test_here.py": "from _lib import paths\nHELPER = 'helper'\n",
    "airflow-core/tests/unit/jobs/helper.py": "\n",
    "airflow-core/tests/unit/migrations/test_0157.py": 'BASE = "aaaa"\nNAME = "0157_3_5_0_add_wake"\nimport re\n',
    PLUGIN: "import pytest\n\n\n@pytest.fixture\ndef db():\n    pass\n",
    "devel-common/src/tests_common/factories.py": "MADE = 1\n",
}
SCHEDULER = "ACTIVE = []\n\n\ndef activate():\n    ACTIVE.append(1)\n\n\ndef claim():\n    return []\n"
THEIRS = {
    f"{CORE}/models/asset.py": "class Asset:\n    pass\n",
    f"{CORE}/jobs/scheduler_job_runner.py": SCHEDULER,
    f"{CORE}/migrations/versions/0001_3_0_0_first.py": MIGRATION.format(
        title="First", revision="aaaa", down=None, version="3.0.0"
    ),
    f"shared/{METRICS.replace('/', '/src/airflow_shared/observability/', 1)}": 'metrics:\n  - name: "old"\n',
    "devel-common/src/tests_common/pytest_plugin.py": "THEIRS = 1\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def link_shared(root: Path) -> None:
    """Have the package see its shared modules, as Airflow's repository does."""
    links = root / CORE / "_shared"
    links.mkdir(exist_ok=True)
    for module in (root / "shared").iterdir():
        source = module / "src" / "airflow_shared" / module.name
        (links / module.name).symlink_to(os.path.relpath(source, links))


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A small patch set."""
    return write(tmp_path / "ours", OURS)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small Airflow repository."""
    root = write(tmp_path / "airflow", THEIRS)
    link_shared(root)
    return root


def series(ours: Path, checkout: Path) -> Series:
    return Series(ours, checkout, CACHE)


def apply(patches: list[Path], checkout: Path) -> None:
    for patch in patches:
        # Not git's own checkout that may be around the folder.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)}
        done = subprocess.run(
            ["git", "apply", str(patch)], cwd=checkout, env=env, capture_output=True, text=True
        )
        assert "" == done.stderr, patch.name


def files(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in root.rglob("*")
        if path.is_file() and not path.is_relative_to(root / CORE / "_shared")
    }


def test_patches_apply_in_order(ours, checkout, tmp_path):
    """Each patch stands on those before it, and edits of one file are shared out among the patches that they belong to."""
    patches = series(ours, checkout).write(tmp_path / "series")
    titles = [path.name[:4] for path in patches]
    assert [f"{n:04}" for n in range(1, len(patches) + 1)] == titles
    scheduler = checkout / CORE / "jobs/scheduler_job_runner.py"
    seen = []
    for patch in patches:
        apply([patch], checkout)
        text = scheduler.read_text()
        seen.append(("append(2)" in text, "[1]" in text))
    assert [(False, False), (True, False), (True, False), (True, True), (True, True)] == seen


def test_files_stand_where_airflow_has_them(ours, checkout, tmp_path):
    """Shared modules under `shared/`, tests and the newsfragment in their places; Airflow's own plugin is left alone."""
    apply(series(ours, checkout).write(tmp_path / "series"), checkout)
    after = files(checkout)
    new = after.keys() - THEIRS.keys()
    expected = {name for name in OURS if name not in ("airflow-core/edits.toml", PLUGIN)} | {FIXTURES}
    left_out = {"airflow-core/tests/unit/jobs/test_here.py", "airflow-core/tests/unit/jobs/helper.py"}
    assert expected - left_out == new
    assert "THEIRS = 1\n" == after[PLUGIN]
    assert '"new"' in after[f"shared/observability/src/airflow_shared/{METRICS}"]
    assert all("Licensed to the Apache" in after[name] for name in new if name.endswith(".py"))


def test_tests_that_airflow_cannot_run_are_named(ours, checkout):
    """A test that needs this repo's scripts stays here, with the helper that only it uses."""
    assert [
        "airflow-core/tests/unit/jobs/test_here.py",
        "airflow-core/tests/unit/jobs/helper.py",
    ] == series(ours, checkout).left_out


def test_tests_find_their_fixtures(ours, checkout, tmp_path):
    """Test modules import the fixtures, since Airflow's plugin has not got them."""
    apply(series(ours, checkout).write(tmp_path / "series"), checkout)
    line = "from tests_common.asset_partition_fixtures import *  # noqa: F403\n"
    assert line in (checkout / "airflow-core/tests/unit/jobs/test_wake.py").read_text()
    assert (checkout / FIXTURES).read_text().endswith('\n\n__all__ = ["db"]\n')


@pytest.mark.parametrize(("newest", "number"), [("0156", "0157"), ("0157", "0158"), ("0203", "0204")])
def test_migration_stands_on_the_head(ours, checkout, tmp_path, newest, number):
    """Our migration follows the newest of the checkout, and has the next free number if its own is taken."""
    write(
        checkout,
        {
            f"{CORE}/migrations/versions/{newest}_3_4_0_newest.py": MIGRATION.format(
                title="Newest", revision="bbbb", down=("aaaa",), version="3.4.0"
            )
        },
    )
    apply(series(ours, checkout).write(tmp_path / "series"), checkout)
    after = files(checkout)
    migration = after[f"{CORE}/migrations/versions/{number}_3_5_0_add_wake.py"]
    assert 'down_revision = "bbbb"' in migration and "Revises: bbbb" in migration
    test = after[f"airflow-core/tests/unit/migrations/test_{number}.py"]
    assert 'BASE = "bbbb"' in test and f'"{number}_3_5_0_add_wake"' in test


def test_checkout_is_only_read(ours, checkout, tmp_path):
    """Making the series changes nothing in the checkout, and is the same each time; an older series is replaced."""
    before = files(checkout)
    stale = write(tmp_path / "series", {"0099-Old.patch": "", "notes": ""})
    first = {path.name: path.read_text() for path in series(ours, checkout).write(stale)}
    assert first == {path.name: path.read_text() for path in series(ours, checkout).write(stale)}
    assert {*first, "notes"} == {path.name for path in stale.iterdir()}
    assert before == files(checkout)


def test_git_am_takes_it(ours, checkout, tmp_path):
    """In a checkout with git, each patch is a commit by whoever made the series."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "--quiet")
    git("config", "user.name", "Žofie O'Hara, Jr")
    git("config", "user.email", "z@example.org")
    git("config", "commit.gpgsign", "false")
    git("add", ".")
    git("commit", "--quiet", "--message", "base")
    patches = series(ours, checkout).write(tmp_path / "series")
    git("am", "--quiet", *map(str, patches))
    log = git("log", "--format=%an <%ae>|%s", f"-{len(patches)}").splitlines()
    assert len(patches) == len(log)
    assert {"Žofie O'Hara, Jr <z@example.org>"} == {line.partition("|")[0] for line in log}
    assert "Add wake requests for pending asset partitions" == log[-1].partition("|")[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "is not a checkout of Airflow"),
        (
            {f"{CORE}/migrations/versions/0002_3_1_0_other.py": 'revision = "cccc"\ndown_revision = None\n'},
            "one head",
        ),
        (
            {f"{CORE}/migrations/versions/0157_3_5_0_x.py": 'revision = "ours"\ndown_revision = "aaaa"\n'},
            "is ours",
        ),
        ({f"{CORE}/models/asset_partition_wake.py": ""}, "expected a new file, found it in the checkout"),
        (
            {f"{CORE}/jobs/scheduler_job_runner.py": "def claim():\n    pass\n"},
            'edit "scheduler-activation-asks"',
        ),
    ],
    ids=["elsewhere", "two heads", "twice", "file is there", "anchor is gone"],
)
def test_refusals(ours, checkout, tmp_path, change, says):
    """What does not fit is one line that says so, and no patch is written."""
    tree = write(checkout, change) if change else tmp_path
    with pytest.raises(BuildError, match=says):
        series(ours, tree).write(tmp_path / "series")
    assert not (tmp_path / "series").exists()


def test_what_no_patch_takes_is_refused(ours, checkout):
    """A file or an edit that belongs to none of the patches must not be lost."""
    write(ours, {f"{CORE}/elsewhere.py": "\n"})
    with pytest.raises(BuildError, match=r"airflow/elsewhere\.py: no patch of the series takes it"):
        series(ours, checkout)


def test_our_series_makes_what_the_wheel_has(tmp_path):
    """On a tree laid out from the release, the series makes the same files as the patched wheel has."""
    released = wheel.Wheel(wheel.fetch(PACKAGE, SUPPORTED[-1], CACHE / "wheels"))
    root = tmp_path / "airflow"
    for name in released:
        if name.startswith("airflow/"):
            path = root / f"airflow-core/src/{name}"
            if name.startswith("airflow/_shared/") and name.count("/") > 2:
                module, _, rest = name.removeprefix("airflow/_shared/").partition("/")
                path = root / f"shared/{module}/src/airflow_shared/{module}/{rest}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(released.read(name))
    link_shared(root)
    apply(Series(ROOT, root, CACHE).write(tmp_path / "series"), root)
    for change in Builder(ROOT, CACHE).patch(SUPPORTED[-1]).changes:
        assert change.after == (root / f"airflow-core/src/{change.name}").read_bytes(), change.name
