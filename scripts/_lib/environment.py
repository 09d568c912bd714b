"""Virtual environments with Airflow, stock or patched, made on demand and reused.

`enter()` runs the calling script inside the repo's `.venv`; `ensure()` makes an environment and brings it up to
date. Runs under a bare Python 3.10+ with pip and venv, so it may import nothing but the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from _lib.paths import CACHE, CONSTRAINTS, CORE, CORE_SOURCE, PYPROJECT, ROOT, SCRIPTS

CORE_PACKAGE = "apache-airflow-core"
MINIMUM_UV = (0, 7)
# The packages whose version follows from that of apache-airflow-core.
RELEASED_TOGETHER = (CORE_PACKAGE, "apache-airflow", "apache-airflow-task-sdk")
# Where a release does not take what constraints.txt has.
OTHER_VERSIONS = {"3.3.0": {"aiosqlite": "0.21.0"}}
# The modules beside this one that `scripts/build` does without.
BUILDER = ("builder", "edit_imports", "edit_python", "edit_yaml", "edits", "splice", "wheel")
MYSQL_PACKAGES = ("default-libmysqlclient-dev", "pkg-config", "gcc")


class Problem(Exception):
    """Something that the user has to put right; the message is one line."""


def say(message: str) -> None:
    """Report progress, on standard error: standard output belongs to a script's result."""
    print(f"[env] {message}", file=sys.stderr, flush=True)


def fail(message: object, code: int = 1) -> NoReturn:
    """End the script with a one-line error."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def run(command: list[str], what: str, env: dict[str, str] | None = None) -> str:
    """Run a command and return its standard output; where it fails, show what it printed and raise."""
    try:
        done = subprocess.run(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise Problem(f"{what} failed: {error}") from error
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise Problem(f"{what} failed with exit code {done.returncode} (its output is above)")
    return done.stdout


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock that every script of this repo honours; it goes with the process."""
    folder = CACHE / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name.lstrip('.')}.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another script that works on {name}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def apt_install(*packages: str) -> None:
    """Install Debian packages; only for root, on a machine that has apt."""
    say(f"apt-get install {' '.join(packages)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with locked("apt"):
        run(["apt-get", "update", "-qq"], "apt-get update", env)
        options = ["-qq", "-y", "--no-install-recommends"]
        run(["apt-get", "install", *options, *packages], f"apt-get install {' '.join(packages)}", env)


def can_apt() -> bool:
    """Tell whether `apt_install` can be used here."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


@functools.cache
def pinned(package: str) -> str:
    """Return the version that constraints.txt gives a package."""
    match = re.search(rf"^{re.escape(package)}==([^\s;]+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if match is None:
        raise Problem(f"constraints.txt has no version for {package}")
    return match[1]


@functools.cache
def uv() -> str:
    """Return uv: the one on PATH, or one of our own from the package index."""
    for candidate in (shutil.which("uv"), str(CACHE / "uv" / "bin" / "uv")):
        if candidate and _usable_uv(candidate):
            return candidate
    with locked("uv"):
        home = CACHE / "uv"
        if not _usable_uv(str(home / "bin" / "uv")):
            say("installing uv")
            make_venv = [_base_python(), "-m", "venv", "--clear", str(home)]
            run(make_venv, "python -m venv (on Debian it needs the package python3-venv)")
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            run([*pip, "--disable-pip-version-check", f"uv=={pinned('uv')}"], "pip install uv")
    return str(home / "bin" / "uv")


def _usable_uv(path: str) -> bool:
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    match = re.match(r"uv (\d+)\.(\d+)", printed)
    return match is not None and (int(match[1]), int(match[2])) >= MINIMUM_UV


def _base_python() -> str:
    """Return the interpreter that runs this, outside of any virtual environment."""
    return getattr(sys, "_base_executable", None) or sys.executable


def enter() -> None:
    """Go on inside the repo's `.venv`, which is made first where it is missing or out of date.

    The environment has every tool, but its Airflow may still be the stock one: `ensure()` builds and installs the
    patched one. A script should parse its arguments first, so that `--help` answers at once.
    """
    if Path(sys.prefix) == ROOT / ".venv":
        return
    try:
        python = _prepare(".venv", airflow=default_airflow(), groups=())
    except Problem as error:
        fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(python, [str(python), *sys.argv])


def default_airflow() -> str:
    """Return the Airflow version that is patched unless another one is asked for."""
    return pinned(CORE_PACKAGE)


def ensure(
    name: str | None = None,
    *,
    airflow: str | None = None,
    patched: bool = True,
    groups: Iterable[str] = (),
) -> Path:
    """Make an environment, or bring it up to date, and return its Python.

    :param name: folder in the repo; unless given, `.venv` for the default Airflow, patched, and otherwise a name that
        says what differs (`.venv-stock`, `.venv-3.3.0`, `.venv-stock-3.3.0`).
    :param airflow: version of apache-airflow-core; that of constraints.txt unless given.
    :param patched: install the wheel that `scripts/build` makes over the stock one. A stock environment is checked
        against its RECORD each time.
    :param groups: further dependency groups of pyproject.toml (`charts`, `docs`).
    """
    airflow = airflow or default_airflow()
    if name is None:
        differs = [] if patched else ["stock"]
        if airflow != default_airflow():
            differs.append(airflow)
        name = "-".join([".venv", *differs])
    python = _prepare(name, airflow=airflow, groups=tuple(groups))
    with locked(name):
        if patched:
            _patch(python, airflow)
        else:
            _check_stock(python, airflow)
    return python


def _prepare(name: str, *, airflow: str, groups: tuple[str, ...]) -> Path:
    """Make the environment with everything from constraints.txt."""
    home = ROOT / name
    python = home / "bin" / "python"
    with locked(name):
        stamp = _read_stamp(home) if _runs(python) else {}
        wanted: dict[str, Any] = {"inputs": _digest([CONSTRAINTS, PYPROJECT]), "airflow": airflow}
        mysql = _mysql_can_be_built()
        missing = {"default", *groups, *(["mysql"] if mysql else [])} - set(stamp.get("groups", ()))
        if all(stamp.get(key) == value for key, value in wanted.items()) and not missing:
            return python
        if not stamp:
            say(f"making {name} (Airflow {airflow}, Python {sys.version_info[0]}.{sys.version_info[1]})")
            run([uv(), "venv", "--quiet", "--clear", "--python", _base_python(), str(home)], "uv venv")
        else:
            say(f"updating {name}")
        had = set(stamp.get("groups", ())) - {"mysql"}
        installed = sorted({"default", *groups} | had)
        _install(python, airflow, installed)
        if mysql and _install_mysql(python, airflow):
            installed.append("mysql")
        _remove_unpinned(python)
        # An update may have put stock files over patched ones: `patch` is not carried over.
        _write_stamp(home, {**wanted, "groups": installed})
    return python


def _install(python: Path, airflow: str, groups: list[str]) -> None:
    """Install dependency groups in the versions of constraints.txt."""
    lines = CONSTRAINTS.read_text().splitlines()
    if airflow != default_airflow():
        other = OTHER_VERSIONS.get(airflow, {})
        replaced = tuple(f"{package}==" for package in (*RELEASED_TOGETHER, *other))
        lines = [line for line in lines if not line.startswith(replaced)]
        lines += [f"{package}=={version}" for package, version in other.items()]
    constraints = CACHE / f"constraints-{airflow}.txt"
    constraints.write_text("\n".join(lines))
    chosen = [word for group in groups for word in ("--group", f"{PYPROJECT}:{group}")]
    say(f"installing {', '.join(groups)} (the first time this takes a minute or so)")
    _pip_install(python, "--constraint", str(constraints), *chosen, f"{CORE_PACKAGE}=={airflow}")


def _remove_unpinned(python: Path) -> None:
    """Remove what an earlier constraints.txt had and this one has no more."""
    pinned_names = set(re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(), re.MULTILINE))
    found = {path.name.partition("-")[0] for path in site_packages(python).glob("*.dist-info")}
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in found}
    if unpinned := sorted(names - pinned_names):
        say(f"removing {', '.join(unpinned)}")
        run([uv(), "pip", "uninstall", "--quiet", "--python", str(python), *unpinned], "uv pip uninstall")


def site_packages(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    return next((python.parent.parent / "lib").glob("python3.*")) / "site-packages"


def _pip_install(python: Path, *arguments: str) -> None:
    # Copies, as hard links into uv's cache would let a write to one environment change all others.
    env = {**os.environ, "UV_LINK_MODE": "copy"}
    env.pop("VIRTUAL_ENV", None)
    run([uv(), "pip", "install", "--python", str(python), *arguments], "uv pip install", env)


def _mysql_can_be_built() -> bool:
    """Tell whether mysqlclient has what it is built from, or can be given it."""
    return _has_mysql_library() or can_apt()


def _has_mysql_library() -> bool:
    if not shutil.which("pkg-config") or not (shutil.which("gcc") or shutil.which("cc")):
        return False
    for name in ("mysqlclient", "mariadb", "libmariadb", "perconaserverclient"):
        if subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0:
            return True
    return False


def _install_mysql(python: Path, airflow: str) -> bool:
    """Install MySQL's drivers, with the Debian packages that they need; say so where that fails."""
    packages = [] if _has_mysql_library() else list(MYSQL_PACKAGES)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists() and _base_python().startswith("/usr/bin/"):
        packages.append("python3-dev")
    try:
        if packages and can_apt():
            apt_install(*packages)
        _install(python, airflow, ["mysql"])
        run([str(python), "-c", "import MySQLdb, aiomysql"], "importing MySQLdb")
    except Problem as error:
        say(f"no MySQL drivers: {error}")
        return False
    return True


def mysql_problem(python: Path) -> str | None:
    """Return what keeps MySQL's drivers from being used, if anything, as one line."""
    if "mysql" in _read_stamp(python.parent.parent).get("groups", ()):
        return None
    packages = " ".join(MYSQL_PACKAGES)
    return f"mysqlclient could not be built: install {packages} (apt-get install), and python3-dev"


def _patch(python: Path, airflow: str) -> None:
    """Build the patched wheel and install it, unless the installed one is from the same sources."""
    home = python.parent.parent
    stamp = _read_stamp(home)
    digest = _digest(build_inputs())
    if stamp.get("patch") == digest:
        return
    script = SCRIPTS / "build"
    if not script.exists():
        raise Problem("scripts/build is missing")
    say(f"building the patched wheel of Airflow {airflow}")
    builder = ROOT / ".venv" / "bin" / "python"
    if not builder.exists():
        _prepare(".venv", airflow=default_airflow(), groups=())
    out = CACHE / "built" / airflow
    printed = run([str(builder), str(script), "--airflow", airflow, "--out", str(out)], "scripts/build")
    lines = printed.strip().splitlines()
    wheel = ROOT / lines[-1] if lines else ROOT
    if not wheel.is_file():
        raise Problem(f"scripts/build did not end with the path of a wheel: {lines[-1:]}")
    say(f"installing {wheel.name} into {home.name}")
    _write_stamp(home, {key: value for key, value in stamp.items() if key != "patch"})
    _pip_install(python, "--no-deps", "--reinstall-package", CORE_PACKAGE, str(wheel))
    _write_stamp(home, {**stamp, "patch": digest})


def build_inputs() -> list[Path]:
    """Return the files that the patched wheel is made of and by."""
    found = [path for path in CORE_SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found += [path for path in CORE.glob("edits*") if path.is_file()]
    found += [path for path in (CORE / "edits").rglob("*") if path.is_file()]
    found += [SCRIPTS / "build"]
    found += [SCRIPTS / "_lib" / f"{name}.py" for name in BUILDER]
    return sorted(path for path in found if path.exists())


def _check_stock(python: Path, airflow: str) -> None:
    """See to it that a stock environment has what was released; install it again where it has not."""
    changed = changed_files(python)
    if not changed:
        return
    say(f"{python.parent.parent.name} is not as released ({changed[0]} and so on): installing again")
    # Not from uv's cache, which may have the same fault.
    requirement = f"{CORE_PACKAGE}=={airflow}"
    _pip_install(python, "--no-cache", "--no-deps", "--reinstall-package", CORE_PACKAGE, requirement)
    if changed := changed_files(python):
        raise Problem(f"{changed[0]} of the stock environment differs from the released one")


def changed_files(python: Path) -> list[str]:
    """Return the files of the installed apache-airflow-core that differ from its RECORD, or are missing."""
    packages = site_packages(python)
    record = next(packages.glob("apache_airflow_core-*.dist-info/RECORD"), None)
    if record is None:
        return ["RECORD"]
    changed = []
    with open(record, newline="") as handle:
        for name, digest, _size in csv.reader(handle):
            if not digest:
                continue
            algorithm, _, expected = digest.partition("=")
            path = packages / name
            if not path.is_file() or expected != _record_hash(algorithm, path):
                changed.append(name)
    return changed


def _record_hash(algorithm: str, path: Path) -> str:
    digest = hashlib.new(algorithm, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _digest(paths: Iterable[Path]) -> str:
    """Return a hash of files, names and content."""
    total = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return total.hexdigest()


def _runs(python: Path) -> bool:
    try:
        return subprocess.run([str(python), "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _read_stamp(home: Path) -> dict[str, Any]:
    try:
        return json.loads((home / "wake-stamp.json").read_text())
    except (OSError, ValueError):
        return {}


def _write_stamp(home: Path, stamp: dict[str, Any]) -> None:
    temporary = home / "wake-stamp.json.new"
    temporary.write_text(json.dumps(stamp, indent=1))
    temporary.replace(home / "wake-stamp.json")
