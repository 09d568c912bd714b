from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from _lib import environment
from _lib.paths import CONSTRAINTS, ROOT, SCRIPTS

BASE_PYTHON = environment._base_python()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An empty tree in place of the repo, but for the constraints."""
    paths = {
        "ROOT": tmp_path,
        "CACHE": tmp_path / ".cache",
        "CORE": tmp_path / "airflow-core",
        "CORE_SOURCE": tmp_path / "airflow-core" / "src",
        "SCRIPTS": tmp_path / "scripts",
        "CONSTRAINTS": Path(shutil.copy(CONSTRAINTS, tmp_path)),
        "PYPROJECT": Path(shutil.copy(ROOT / "pyproject.toml", tmp_path)),
    }
    for name, path in paths.items():
        monkeypatch.setattr(environment, name, path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "airflow-core" / "src").mkdir(parents=True)
    (tmp_path / "scripts" / "_lib").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """The arguments of each `uv pip install` that would have run."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "_pip_install", lambda _python, *arguments: calls.append(arguments))
    return calls


class TestConstraints:
    def test_names_and_versions_only(self):
        """There is nothing in the file but names, exact versions and the Python that they are for."""
        line = re.compile(
            r"[a-z0-9-]+==[\w.]+( ; python_full_version [<>=]+ '[\d.*]+'( and python_full.*)?)?"
        )
        lines = [text for text in CONSTRAINTS.read_text().splitlines() if not text.startswith("#")]
        assert [] == [text for text in lines if not line.fullmatch(text)]

    def test_everything_that_is_installed_is_pinned(self):
        """The environment that runs this holds no package in another version than the file's."""
        pins = dict(re.findall(r"^(\S+==\S+)()", CONSTRAINTS.read_text(), re.MULTILINE))
        have = set()
        for distribution in importlib.metadata.distributions():
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            have.add(f"{name}=={distribution.version.partition('+')[0]}")
        assert set() == have - set(pins)

    def test_another_release_takes_its_own_versions(self, tree, installed):
        """Packages released with Airflow are not held at the default's version, nor what it cannot take."""
        environment._install(tree / "python", "3.3.0", ["default"])
        written = (tree / ".cache" / "constraints-3.3.0.txt").read_text().splitlines()
        assert "apache-airflow-core==3.3.0" == installed[0][-1]
        assert [] == [line for line in written if line.startswith("apache-airflow-task-sdk==")]
        assert ["aiosqlite==0.21.0"] == [line for line in written if line.startswith("aiosqlite==")]

    def test_dropped_package_is_removed(self, tree, installed, monkeypatch):
        """What the file has no more is taken out of an environment that has it."""
        commands: list[list[str]] = []
        monkeypatch.setattr(environment, "run", lambda command, *_: commands.append(command))
        monkeypatch.setattr(environment, "uv", lambda: "uv")
        monkeypatch.setattr(environment, "_mysql_can_be_built", lambda: False)
        for name in ("rich-1.dist-info", "ruamel.yaml-1.dist-info", "typing_extensions-1.dist-info"):
            (tree / ".venv" / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
        python = environment._prepare(".venv", airflow="3.3.2", groups=())
        uninstall = ["uv", "pip", "uninstall", "--quiet", "--python", str(python), "ruamel-yaml"]
        assert uninstall == commands[-1]


class TestEnter:
    def test_goes_on_in_the_environment(self, tmp_path):
        """A script that a bare Python starts runs in the repo's environment, with its arguments."""
        script = tmp_path / "script"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
            "from _lib import environment; environment.enter()\n"
            "import sqlalchemy; print(sys.prefix, sys.argv[1:])"
        )
        command = [BASE_PYTHON, str(script), "one", "--two"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"{ROOT / '.venv'} ['one', '--two']" == done.stdout.strip()

    @pytest.mark.parametrize("name", ["build", "constraints", "lint", "services", "test"])
    def test_help_needs_no_environment(self, tmp_path, name):
        """`--help` answers under a bare Python, and makes nothing."""
        shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        command = [BASE_PYTHON, "-B", str(tmp_path / "scripts" / name), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("usage: ")
        assert ["scripts"] == [path.name for path in tmp_path.iterdir()]

    def test_a_problem_is_one_line(self, tree, monkeypatch, capsys):
        """What the user has to put right is said in a line, with exit code 1."""
        monkeypatch.setattr(sys, "prefix", "/usr")
        (tree / "constraints.txt").write_text("")
        environment.pinned.cache_clear()
        with pytest.raises(SystemExit) as caught:
            environment.enter()
        environment.pinned.cache_clear()
        assert 1 == caught.value.code
        assert "error: constraints.txt has no version for apache-airflow-core\n" == capsys.readouterr().err


class TestStock:
    @pytest.fixture
    def python(self, tmp_path):
        """An environment whose apache-airflow-core is of one file."""
        packages = tmp_path / "lib" / "python3.11" / "site-packages"
        info = packages / "apache_airflow_core-3.3.2.dist-info"
        info.mkdir(parents=True)
        (packages / "module.py").write_text("x = 1\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
        (info / "RECORD").write_text(f"module.py,sha256={digest},6\n{info.name}/RECORD,,\n")
        return tmp_path / "bin" / "python"

    def test_as_released(self, python):
        """A file that is as RECORD has it is not named."""
        assert [] == environment.changed_files(python)

    def test_changed(self, python, tmp_path):
        """A changed file is named."""
        (tmp_path / "lib" / "python3.11" / "site-packages" / "module.py").write_text("x = 2\n")
        assert ["module.py"] == environment.changed_files(python)

    def test_missing(self, python, tmp_path):
        """A missing file is named."""
        (tmp_path / "lib" / "python3.11" / "site-packages" / "module.py").unlink()
        assert ["module.py"] == environment.changed_files(python)

    def test_changed_is_installed_again(self):
        """A real stock environment that somebody wrote to is as released when it is handed out."""
        name = ".venv-stock-of-a-test"
        try:
            python = environment.ensure(name, patched=False)
            packages = next((ROOT / name / "lib").iterdir()) / "site-packages"
            target = packages / "airflow" / "settings.py"
            # Nothing that is shared with uv's cache, and so with other environments.
            assert 1 == target.stat().st_nlink
            target.write_text("changed")
            assert ["airflow/settings.py"] == environment.changed_files(python)
            environment.ensure(name, patched=False)
            assert [] == environment.changed_files(python)
            assert "changed" != target.read_text()
        finally:
            shutil.rmtree(ROOT / name, ignore_errors=True)

    def test_second_time_runs_nothing(self, monkeypatch):
        """An environment that is up to date is handed out without a run of uv."""
        environment.ensure(patched=False)
        monkeypatch.setattr(environment, "run", lambda *_: pytest.fail("ran a command"))
        started = time.monotonic()
        environment.ensure(patched=False)
        assert time.monotonic() - started < 3


class TestPatched:
    @pytest.fixture
    def builds(self, tree, installed, monkeypatch):
        """The runs of `scripts/build`, in a tree with one source file and a made-up environment."""
        calls: list[list[str]] = []
        wheel = tree / "built.whl"

        def run(command, _what, _env=None):
            calls.append(command)
            wheel.touch()
            return f"some line\n{wheel}\n"

        monkeypatch.setattr(environment, "run", run)
        (tree / "scripts" / "build").write_text("1")
        (tree / "scripts" / "_lib" / "builder.py").write_text("1")
        (tree / "scripts" / "_lib" / "services.py").write_text("1")
        (tree / "airflow-core" / "edits.toml").write_text("1")
        (tree / "airflow-core" / "src" / "new.py").write_text("1")
        (tree / ".venv" / "bin").mkdir(parents=True)
        (tree / ".venv" / "bin" / "python").touch()
        return calls

    def patch(self, tree):
        environment._patch(tree / ".venv" / "bin" / "python", "3.3.2")

    def test_built_once(self, tree, builds, installed):
        """The wheel that `scripts/build` names is installed over the stock one, and not twice."""
        self.patch(tree)
        self.patch(tree)
        assert 1 == len(builds)
        reinstall = ("--no-deps", "--reinstall-package", "apache-airflow-core", str(tree / "built.whl"))
        assert [reinstall] == installed

    @pytest.mark.parametrize(
        "changed",
        ["airflow-core/src/new.py", "airflow-core/edits.toml", "scripts/_lib/builder.py", "scripts/build"],
    )
    def test_built_again_when_an_input_changes(self, tree, builds, changed):
        """A change of the source, of the edits or of the builder makes a new wheel."""
        self.patch(tree)
        (tree / changed).write_text("2")
        self.patch(tree)
        assert 2 == len(builds)

    def test_built_again_when_a_file_is_renamed(self, tree, builds):
        """Names count, not content alone."""
        self.patch(tree)
        (tree / "airflow-core" / "src" / "new.py").rename(tree / "airflow-core" / "src" / "other.py")
        self.patch(tree)
        assert 2 == len(builds)

    def test_other_files_do_not_count(self, tree, builds):
        """Compiled files and the other scripts are no input of the build."""
        self.patch(tree)
        (tree / "airflow-core" / "src" / "__pycache__").mkdir()
        (tree / "airflow-core" / "src" / "__pycache__" / "new.pyc").write_text("2")
        (tree / "scripts" / "_lib" / "services.py").write_text("2")
        self.patch(tree)
        assert 1 == len(builds)

    def test_failed_installation_is_tried_again(self, tree, builds, monkeypatch):
        """What is not known to be installed is not taken for it."""

        def fail(*_):
            raise environment.Problem("no")

        self.patch(tree)
        (tree / "airflow-core" / "edits.toml").write_text("2")
        with monkeypatch.context() as context:
            context.setattr(environment, "_pip_install", fail)
            with pytest.raises(environment.Problem):
                self.patch(tree)
        (tree / "airflow-core" / "edits.toml").write_text("1")
        self.patch(tree)
        assert 3 == len(builds)

    def test_without_a_wheel(self, tree, builds, monkeypatch):
        """A build that names no wheel is a problem."""
        monkeypatch.setattr(environment, "run", lambda *_: "done\n")
        with pytest.raises(environment.Problem, match="did not end with the path of a wheel"):
            self.patch(tree)


class TestMySQLDrivers:
    def test_missing_library_is_said(self, tree, installed, monkeypatch):
        """Without the client library, and without apt, all but MySQL's drivers is installed."""
        monkeypatch.setattr(environment, "_has_mysql_library", lambda: False)
        monkeypatch.setattr(environment, "can_apt", lambda: False)
        monkeypatch.setattr(environment, "run", lambda *_: "")
        (tree / ".venv" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        python = environment._prepare(".venv", airflow="3.3.2", groups=())
        assert 1 == len(installed)
        assert "default-libmysqlclient-dev" in (environment.mysql_problem(python) or "")


def test_lock_is_held_between_processes(tmp_path):
    """A second script waits until the first is done, or dead."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from pathlib import Path; from _lib import environment\n"
        f"environment.CACHE = Path({str(tmp_path)!r})\n"
        "with environment.locked('x'): print('in', flush=True); time.sleep(float(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code]
    first = subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, text=True)
    second = None
    try:
        assert first.stdout is not None
        assert "in\n" == first.stdout.readline()
        second = subprocess.Popen([*command, "0"], stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert "[env] waiting for another script that works on x\n" == second.stderr.readline()
        assert second.poll() is None
        first.kill()
        assert 0 == second.wait(10)
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


def test_failed_command_shows_its_output(capfd):
    """What a command printed is shown before the one line about it."""
    with pytest.raises(environment.Problem, match="making it failed with exit code 3"):
        environment.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], "making it")
    assert "why" in capfd.readouterr().err
