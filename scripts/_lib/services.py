"""Private PostgreSQL and MySQL servers for tests and measurements, and databases on them.

A server listens on a free port of the loopback interface, with its data in the repo's cache. Starting and stopping needs
the standard library only; making databases needs the repo's environment.

A server of one's own is used instead where WAKE_POSTGRESQL_URL or WAKE_MYSQL_URL is set, to an SQLAlchemy URL whose
user may create databases.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _lib.environment import Problem, apt_install, can_apt, locked, run, say
from _lib.paths import CACHE

START_TIMEOUT = 60
STOP_TIMEOUT = 30
DEFAULT_DATABASE = "airflow"


class Server:
    """One kind of private server. Subclasses say how it is installed, prepared and reached."""

    backend: str
    scheme: str
    admin_database: str
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)

    @property
    def own_url(self) -> str | None:
        """Return the URL of the user's own server, if one is given."""
        return os.environ.get(f"WAKE_{self.backend.upper()}_URL") or None

    @functools.cached_property
    def home(self) -> Path:
        """Return the folder of the server: its data, log and state."""
        return CACHE / "services" / self.backend

    @property
    def data(self) -> Path:
        """Return the data folder."""
        return self.home / "data"

    @property
    def log(self) -> Path:
        """Return the log file."""
        return self.home / "log"

    @property
    def account(self) -> str | None:
        """Return the account that the server runs under, where it is not our own."""
        return None

    def install(self) -> None:
        """Get the programs, or raise with what to install."""
        raise NotImplementedError

    def initialize(self) -> None:
        """Fill the data folder."""
        raise NotImplementedError

    def command(self, port: int, durable: bool) -> list[str]:
        """Return the command line of the server."""
        raise NotImplementedError

    def ready(self, port: int) -> bool:
        """Tell whether the server answers."""
        raise NotImplementedError

    def on_started(self, port: int) -> None:
        """Do what a new server needs."""

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return pid, port and so on of the running server; None where none runs, whatever an old file says."""
        try:
            state = json.loads((self.home / "state.json").read_text())
            command = Path("/proc", str(state["pid"]), "cmdline").read_bytes().decode()
        except (OSError, ValueError, KeyError):
            return None
        # A pid may be another process's by now, and a zombie has no command line.
        return state if str(self.data) in command else None

    def write_state(self, **state: Any) -> None:
        """Note what runs; replaced in one step."""
        temporary = self.home / "state.json.new"
        temporary.write_text(json.dumps(state))
        temporary.replace(self.home / "state.json")

    # -- start and stop ------------------------------------------------------------------------------------------

    def start(self, *, durable: bool = False, keep: bool = True) -> None:
        """Start the server unless it runs.

        :param durable: write to disk as a production server does; for tests it is not worth the time.
        :param keep: go on running when nobody uses it any more (see `using`).
        """
        if self.own_url:
            return
        with locked(f"service-{self.backend}"):
            if state := self.state():
                if keep and not state["keep"]:
                    self.write_state(**{**state, "keep": True})
                if durable != state["durable"]:
                    raise Problem(f"{self.backend} runs with other settings: scripts/services stop it first")
                return
            self.install()
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir(parents=True)
            try:
                self._start(durable, keep)
            except BaseException:
                self._stop()
                raise

    def _start(self, durable: bool, keep: bool) -> None:
        say(f"starting {self.backend}")
        self.data.mkdir(mode=0o700)
        self.log.touch()
        if self.account:
            for path in (self.home, self.data, self.log):
                shutil.chown(path, self.account)
        self.initialize()
        port = free_port()
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                self.command(port, durable),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                **self._as_account(),
            )
        self.write_state(pid=process.pid, port=port, durable=durable, keep=keep)
        deadline = time.monotonic() + START_TIMEOUT
        while not self.ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise self._failed("did not start")
            time.sleep(0.1)
        self.on_started(port)

    def _as_account(self) -> dict[str, Any]:
        if self.account is None:
            return {}
        return {"user": self.account, "group": pwd.getpwnam(self.account).pw_gid, "extra_groups": []}

    def call(self, command: Sequence[str]) -> None:
        """Run one of the server's programs to its end, with its output in the log."""
        with open(self.log, "ab") as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, "LC_ALL": "C.UTF-8"},
                check=False,
                **self._as_account(),
            )
        if done.returncode:
            raise self._failed(f"({Path(command[0]).name}) exited with {done.returncode}")

    def _failed(self, what: str) -> Problem:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return Problem(f"{self.backend} {what}: {lines[-1] if lines else 'its log is empty'}")

    def stop(self) -> bool:
        """Stop the server and remove its data; return whether one ran."""
        with locked(f"service-{self.backend}"):
            return self._stop()

    def _stop(self) -> bool:
        state = self.state()
        if state is not None:
            say(f"stopping {self.backend}")
            for number in self.stop_signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state["pid"], number)
                if self._gone(state["pid"]):
                    break
            else:
                raise Problem(f"{self.backend} (pid {state['pid']}) does not stop")
        shutil.rmtree(self.home, ignore_errors=True)
        return state is not None

    def _gone(self, pid: int) -> bool:
        """Wait for the end of a process; tell whether it came."""
        deadline = time.monotonic() + STOP_TIMEOUT
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            try:
                status = Path("/proc", str(pid), "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                return True
            # Its parent may never fetch its exit code.
            if status.rpartition(")")[2].split()[0] == "Z":
                return True
            time.sleep(0.05)
        return False

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Have the server run; whoever started it so and is its last user stops it."""
        folder = CACHE / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"users-{self.backend}.lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            try:
                self.start(keep=False)
                yield
            finally:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    state = self.state()
                    if state is not None and not state["keep"]:
                        self.stop()

    # -- databases -----------------------------------------------------------------------------------------------

    def url(self, database: str | None = None) -> str:
        """Return the SQLAlchemy URL of a database on the running server."""
        if self.own_url:
            if database is None:
                return self.own_url
            from sqlalchemy import make_url

            return make_url(self.own_url).set(database=database).render_as_string(hide_password=False)
        state = self.state()
        if state is None:
            raise Problem(f"{self.backend} does not run: scripts/services start {self.backend}")
        return f"{self.scheme}://airflow@127.0.0.1:{state['port']}/{database or DEFAULT_DATABASE}"

    def fresh_database(self, name: str) -> str:
        """Make an empty database, in place of the one of that name, and return its URL."""
        self.drop_database(name)
        self._execute(self.create_statement.format(name=name))
        return self.url(name)

    create_statement = "CREATE DATABASE {name}"
    drop_statement = "DROP DATABASE IF EXISTS {name}"

    def drop_database(self, name: str) -> None:
        """Drop a database, where there is one of that name."""
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise Problem(f"{name!r} is not a name for a database: small letters, digits and _ only")
        self._execute(self.drop_statement.format(name=name))

    def _execute(self, statement: str) -> None:
        from sqlalchemy import create_engine, text
        from sqlalchemy.pool import NullPool

        url = self.own_url or self.url(self.admin_database)
        engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))


class PostgreSQL(Server):
    """The machine's PostgreSQL programs, with a data folder of ours."""

    backend = "postgresql"
    scheme = "postgresql+psycopg2"
    admin_database = "postgres"
    drop_statement = "DROP DATABASE IF EXISTS {name} WITH (FORCE)"
    # Fast, then immediate.
    stop_signals = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)

    @property
    def account(self) -> str | None:
        if os.geteuid():
            return None
        names = {entry.pw_name for entry in pwd.getpwall()}
        # PostgreSQL refuses to run as root.
        return "postgres" if "postgres" in names else "nobody"

    @functools.cached_property
    def home(self) -> Path:
        inside = super().home
        if self.account is None:
            return inside
        inside.parent.mkdir(parents=True, exist_ok=True)
        command = ["test", "-x", str(inside.parent)]
        if subprocess.run(command, cwd="/", check=False, **self._as_account()).returncode == 0:
            return inside
        # Its account may not enter, say, a clone below /root.
        digest = hashlib.sha256(str(inside).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"wake-postgresql-{digest}"

    def programs(self) -> Path | None:
        """Return the folder with the newest server's programs."""
        folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
        folders.sort(key=lambda folder: float(folder.parent.name))
        if folders:
            return folders[-1]
        found = shutil.which("initdb")
        return Path(found).resolve().parent if found else None

    def install(self) -> None:
        if self.programs():
            return
        if os.environ.get("CI") == "true" and can_apt():
            apt_install("postgresql")
        if not self.programs():
            raise Problem("PostgreSQL is missing: apt-get install postgresql, or set WAKE_POSTGRESQL_URL")

    def _program(self, name: str) -> str:
        folder = self.programs()
        assert folder is not None
        return str(folder / name)

    def initialize(self) -> None:
        options = ["--auth=trust", "--username=airflow", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        self.call([self._program("initdb"), "-D", str(self.data), *options])

    def command(self, port: int, durable: bool) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "max_connections": 300,
            "shared_buffers": "256MB",
            "max_wal_size": "2GB",
        }
        if not durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        chosen = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [self._program("postgres"), "-D", str(self.data), *chosen]

    def ready(self, port: int) -> bool:
        command = [self._program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
        return subprocess.run(command, cwd="/", check=False).returncode == 0

    def on_started(self, port: int) -> None:
        address = ["-h", "127.0.0.1", "-p", str(port), "-U", "airflow"]
        self.call([self._program("createdb"), *address, DEFAULT_DATABASE])


class MySQL(Server):
    """MySQL from Debian unstable, unpacked into the cache and run with the libraries that it comes with."""

    backend = "mysql"
    scheme = "mysql+mysqldb"
    admin_database = "mysql"
    create_statement = "CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"

    tree = CACHE / "mysql"
    package = "mysql-server-core"

    def install(self) -> None:
        if (self.tree / "complete").exists():
            return
        needed = [name for name in ("apt-get", "dpkg") if not shutil.which(name)]
        keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
        if needed or not keyring.exists():
            raise Problem("private MySQL needs Debian's apt, dpkg and archive keyring; or set WAKE_MYSQL_URL")
        work = CACHE / "mysql-apt"
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(self.tree, ignore_errors=True)
        for folder in ("lists/partial", "cache/archives/partial"):
            (work / folder).mkdir(parents=True)
        (work / "status").touch()
        (work / "empty").mkdir()
        sources = f"deb [signed-by={keyring}] {_debian_archive()} sid main\n"
        (work / "sources.list").write_text(sources)
        options = {
            "Dir::Etc::SourceList": work / "sources.list",
            "Dir::Etc::SourceParts": work / "empty",
            "Dir::Etc::Preferences": work / "no-preferences",
            "Dir::Etc::PreferencesParts": work / "empty",
            "Dir::State::Lists": work / "lists",
            "Dir::State::Status": work / "status",
            "Dir::State::Extended_States": work / "extended_states",
            "Dir::Cache": work / "cache",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
        say("reading Debian unstable's index of packages")
        run([*apt, "update"], "apt-get update (Debian unstable, for MySQL)")
        install = [*apt, "install", "-y", self.package]
        listed = run([*install, "--print-uris"], f"apt-get install {self.package}")
        size = sum(int(line.split()[2]) for line in listed.splitlines() if line.startswith("'"))
        _download([*install, "--download-only"], work / "cache" / "archives", size)
        say("unpacking MySQL")
        for package in sorted((work / "cache" / "archives").glob("*.deb")):
            run(["dpkg", "-x", str(package), str(self.tree)], f"unpacking {package.name}")
        self._program()
        shutil.rmtree(work)
        (self.tree / "complete").touch()

    def _program(self) -> list[str]:
        """Return the server's command: through the loader of its own tree, as the machine's libc may be older."""
        loaders = sorted(path for path in self.tree.glob("**/ld-linux-*.so.*") if path.is_file())
        server = self.tree / "usr" / "sbin" / "mysqld"
        if not loaders or not server.exists():
            raise Problem(f"the packages of {self.package} do not have what was expected; remove {self.tree}")
        libraries = {str(path.parent) for path in self.tree.glob("**/*.so.*")}
        return [str(loaders[0]), "--library-path", ":".join(sorted(libraries)), str(server)]

    def _options(self) -> list[str]:
        share = next(self.tree.glob("usr/share/mysql*/charsets")).parent
        options = [
            "--no-defaults",
            f"--datadir={self.data}",
            f"--lc-messages-dir={share}",
            f"--character-sets-dir={share / 'charsets'}",
            "--secure-file-priv=NULL",
            "--mysqlx=OFF",
        ]
        return [*options, "--user=root"] if os.geteuid() == 0 else options

    def initialize(self) -> None:
        self.call([*self._program(), *self._options(), "--initialize-insecure"])
        start = [
            f"CREATE DATABASE IF NOT EXISTS {DEFAULT_DATABASE} CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci;",
            "CREATE USER IF NOT EXISTS 'airflow'@'127.0.0.1';",
            "GRANT ALL ON *.* TO 'airflow'@'127.0.0.1' WITH GRANT OPTION;",
        ]
        (self.home / "start.sql").write_text("\n".join(start) + "\n")

    def command(self, port: int, durable: bool) -> list[str]:
        settings = [
            "--bind-address=127.0.0.1",
            f"--port={port}",
            # Relative to the data folder: an absolute path may be longer than a socket's may be.
            "--socket=mysql.sock",
            f"--pid-file={self.data / 'mysql.pid'}",
            f"--init-file={self.home / 'start.sql'}",
            "--skip-name-resolve",
            "--skip-log-bin",
            "--max-connections=300",
            "--innodb-buffer-pool-size=512M",
            "--performance-schema=ON",
            "--character-set-server=utf8mb4",
            "--collation-server=utf8mb4_unicode_ci",
        ]
        if not durable:
            settings += ["--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=OFF"]
        return [*self._program(), *self._options(), *settings]

    def ready(self, port: int) -> bool:
        """Tell whether the server greets: the fifth byte is the protocol's version, 10."""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                return connection.recv(5)[4:5] == b"\x0a"
        except OSError:
            return False


def _debian_archive() -> str:
    """Return the address of the Debian archive that this machine uses."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    for address in run(command, "apt-get indextargets").splitlines():
        # Not debian-security, nor other vendors'.
        if address.rstrip("/").endswith("/debian"):
            return address
    raise Problem("this machine's apt knows no Debian archive to take MySQL from; set WAKE_MYSQL_URL")


def _download(command: list[str], folder: Path, size: int) -> None:
    """Run a download and report how far it is."""
    shown = -1
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                done = 0
                for path in folder.glob("**/*.deb"):
                    with contextlib.suppress(FileNotFoundError):
                        done += path.stat().st_size
                tenth = min(10 * done // max(size, 1), 10)
                if tenth > shown:
                    shown = tenth
                    say(f"downloading MySQL: {done / 1e6:.0f} of {size / 1e6:.0f} MB")
                time.sleep(0.3)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            output.seek(0)
            sys.stderr.write(output.read())
            raise Problem("downloading MySQL failed (the output of apt-get is above)")


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SERVERS: dict[str, Server] = {server.backend: server for server in (PostgreSQL(), MySQL())}
BACKENDS = ("sqlite", *SERVERS)


def url(backend: str, database: str | None = None) -> str:
    """Return the SQLAlchemy URL of a database, which may not exist."""
    if backend == "sqlite":
        return f"sqlite:///{CACHE / 'services' / 'sqlite' / (database or DEFAULT_DATABASE)}.db"
    return SERVERS[backend].url(database)


def fresh_database(backend: str, name: str) -> str:
    """Make an empty database, in place of the one of that name, and return its SQLAlchemy URL."""
    if backend != "sqlite":
        return SERVERS[backend].fresh_database(name)
    drop_database(backend, name)
    (CACHE / "services" / "sqlite").mkdir(parents=True, exist_ok=True)
    return url(backend, name)


def drop_database(backend: str, name: str) -> None:
    """Drop a database, where there is one of that name."""
    if backend != "sqlite":
        SERVERS[backend].drop_database(name)
        return
    for path in (CACHE / "services" / "sqlite").glob(f"{name}.db*"):
        path.unlink()


@contextlib.contextmanager
def using(backend: str) -> Iterator[None]:
    """Have the server of a backend run as long as it is used."""
    with contextlib.nullcontext() if backend == "sqlite" else SERVERS[backend].using():
        yield
