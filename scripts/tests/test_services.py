from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from _lib import services
from _lib.environment import Problem
from _lib.paths import SCRIPTS


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the test's own, so that servers that run are left alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(services, "CACHE", folder)
        for backend in services.SERVERS:
            patch.delenv(f"WAKE_{backend.upper()}_URL", raising=False)
        yield folder


@pytest.fixture(scope="module", params=["postgresql", "mysql"])
def server(request, cache):
    """A stopped server of each kind, with its programs installed."""
    server = type(services.SERVERS[request.param])()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(services.SERVERS, request.param, server)
        try:
            server.install()
        except Problem as problem:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(problem))
        yield server
        server.stop()


@pytest.fixture
def running(server):
    """A running server."""
    server.start()
    return server


def connect(url):
    return create_engine(url, poolclass=NullPool).connect()


def pid(server):
    state = server.state()
    assert state is not None
    return state["pid"]


class TestRunning:
    def test_second_start_does_nothing(self, running):
        """The server that runs is kept."""
        before = running.state()
        running.start()
        assert before == running.state()

    def test_url(self, running):
        """The URL is that of a database on the loopback interface that can be used."""
        with connect(running.url()) as connection:
            assert 1 == connection.scalar(text("SELECT 1"))
            assert "127.0.0.1" == connection.engine.url.host

    def test_listens_on_loopback_only(self, running):
        """No other address of the machine is served."""
        state = running.state()
        assert state is not None
        listening = set()
        for name in ("tcp", "tcp6"):
            with suppress(FileNotFoundError):
                for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                    address, port = line.split()[1].split(":")
                    if line.split()[3] == "0A" and int(port, 16) == state["port"]:
                        listening.add(address)
        assert {"0100007F"} == listening

    def test_skip_locked(self, running):
        """A row that another transaction has locked is passed over, and only that."""
        url = running.fresh_database("wake_locks")
        with connect(url) as one, connect(url) as other:
            one.execute(text("CREATE TABLE t (id integer PRIMARY KEY)"))
            one.execute(text("INSERT INTO t VALUES (1), (2)"))
            one.commit()
            query = "SELECT id FROM t WHERE id <= {} ORDER BY id FOR UPDATE OF t SKIP LOCKED"
            assert [1] == list(one.scalars(text(query.format(1))))
            assert [2] == list(other.scalars(text(query.format(2))))

    def test_fresh_database(self, running):
        """A database is made empty, also while the one of its name is in use."""
        url = running.fresh_database("wake_fresh")
        with connect(url) as connection:
            connection.execute(text("CREATE TABLE t (id integer)"))
            connection.commit()
            assert url == running.fresh_database("wake_fresh")
        with connect(url) as connection:
            connection.execute(text("CREATE TABLE t (id integer)"))

    def test_drop_database(self, running):
        """A dropped database is gone, and dropping it again is no error."""
        url = running.fresh_database("wake_dropped")
        running.drop_database("wake_dropped")
        running.drop_database("wake_dropped")
        with pytest.raises(Exception, match="wake_dropped"):
            connect(url)

    @pytest.mark.parametrize("name", ["", "Upper", "a-b", "a; DROP DATABASE airflow", "1a"])
    def test_name_that_is_refused(self, running, name):
        """A name that would have to be quoted is refused."""
        with pytest.raises(Problem, match="is not a name for a database"):
            running.fresh_database(name)

    def test_text_of_any_language(self, running):
        """Characters beyond the basic plane are kept."""
        with connect(running.fresh_database("wake_text")) as connection:
            connection.execute(text("CREATE TABLE t (x varchar(10))"))
            connection.execute(text("INSERT INTO t VALUES (:x)"), {"x": "é日🛫"})
            assert "é日🛫" == connection.scalar(text("SELECT x FROM t"))

    def test_version(self, running):
        """The server is a PostgreSQL, or a MySQL of at least 8 that shows its locks."""
        with connect(running.url()) as connection:
            version = connection.scalar(text("SELECT version()"))
            if running.backend == "postgresql":
                assert version.startswith("PostgreSQL")
            else:
                assert int(version.partition(".")[0]) >= 8
                assert "MariaDB" not in version
                connection.scalar(text("SELECT count(*) FROM performance_schema.data_locks"))

    def test_other_settings_are_refused(self, running):
        """A running server is not taken for a durable one."""
        with pytest.raises(Problem, match="runs with other settings"):
            running.start(durable=True)

    def test_started_by_hand_stays(self, running):
        """A server that runs already is left running."""
        before = pid(running)
        with running.using():
            pass
        assert before == pid(running)


# Tests follow each other such that a server is started as seldom as can be.
class TestStop:
    def test_killed(self, running):
        """A server that was killed does not count as running, and starts again."""
        before = pid(running)
        os.kill(before, signal.SIGKILL)
        assert running._gone(before)
        assert running.state() is None
        running.start()
        assert before != pid(running)
        with connect(running.url()) as connection:
            assert 1 == connection.scalar(text("SELECT 1"))

    def test_nothing_is_left(self, running):
        """After a stop there is no process, no port and no data."""
        state = running.state()
        assert state is not None
        assert running.stop()
        assert not Path("/proc", str(state["pid"])).exists()
        assert not running.home.exists()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", state["port"]), timeout=1)
        assert not running.stop()

    def test_pid_of_another_process(self, server):
        """A state from before the machine was restarted does not hit the process that has the pid now."""
        server.stop()
        server.home.mkdir(parents=True)
        with subprocess.Popen(["sleep", "60"]) as other:
            server.write_state(pid=other.pid, port=1, durable=False, keep=True)
            assert server.state() is None
            assert not server.stop()
            assert other.poll() is None
            other.kill()

    def test_failed_start_leaves_nothing(self, server, monkeypatch):
        """A server that ends at its start is a problem of one line, with what it said last."""
        server.stop()
        command = ["sh", "-c", "echo first; echo the reason"]
        monkeypatch.setattr(server, "initialize", lambda: None)
        monkeypatch.setattr(server, "command", lambda _port, _durable: command)
        monkeypatch.setattr(server, "ready", lambda _port: False)
        with pytest.raises(Problem) as caught:
            server.start()
        assert f"{server.backend} did not start: the reason" == str(caught.value)
        assert not server.home.exists()


class TestUsing:
    def test_last_user_stops(self, server):
        """A server that was started for its users goes with the last of them."""
        server.stop()
        with server.using():
            first = pid(server)
            with server.using():
                assert first == pid(server)
            assert first == pid(server)
        assert server.state() is None


@pytest.fixture(params=["postgresql", "mysql"])
def own(request, monkeypatch):
    """A kind of server, with a URL of the user's."""
    server = type(services.SERVERS[request.param])()
    url = f"{server.scheme}://me:secret@db.example/mine"
    monkeypatch.setenv(f"WAKE_{server.backend.upper()}_URL", url)
    monkeypatch.setattr(server, "install", lambda: pytest.fail("installs a server"))
    return server


def test_own_server(own):
    """A server of the user's is used as it is: nothing is installed or started."""
    own.start()
    with own.using():
        assert f"{own.scheme}://me:secret@db.example/mine" == own.url()
        assert f"{own.scheme}://me:secret@db.example/other" == own.url("other")


class TestMissing:
    @pytest.fixture
    def postgresql(self, monkeypatch):
        """PostgreSQL on a machine that does not have it; what apt would have installed is noted."""
        server = services.PostgreSQL()
        installed: list[str] = []
        monkeypatch.setattr(server, "programs", lambda: Path("/there") if installed else None)
        monkeypatch.setattr(services, "apt_install", lambda *packages: installed.extend(packages))
        monkeypatch.setattr(services, "can_apt", lambda: True)
        monkeypatch.setattr(server, "installed", installed, raising=False)
        return server

    def test_user_is_told(self, postgresql, monkeypatch):
        """On a user's machine nothing is installed for the whole system; the line says what to install."""
        monkeypatch.delenv("CI", raising=False)
        with pytest.raises(Problem, match="apt-get install postgresql"):
            postgresql.install()
        assert [] == postgresql.installed

    def test_ci_installs(self, postgresql, monkeypatch):
        """In CI it is installed."""
        monkeypatch.setenv("CI", "true")
        postgresql.install()
        assert ["postgresql"] == postgresql.installed

    def test_mysql_without_apt(self, tmp_path, monkeypatch):
        """Without Debian's tools the line names the way out."""
        server = services.MySQL()
        monkeypatch.setattr(server, "tree", tmp_path)
        monkeypatch.setattr(shutil, "which", lambda _name: None)
        with pytest.raises(Problem, match="WAKE_MYSQL_URL"):
            server.install()


class TestSQLite:
    def test_fresh_database(self, tmp_path, monkeypatch):
        """A database is a file, made anew."""
        monkeypatch.setattr(services, "CACHE", tmp_path)
        for _ in range(2):
            with connect(services.fresh_database("sqlite", "wake_x")) as connection:
                connection.execute(text("CREATE TABLE t (id integer)"))
                connection.commit()
        services.drop_database("sqlite", "wake_x")
        assert [] == list((tmp_path / "services" / "sqlite").iterdir())


class TestCommand:
    @pytest.fixture
    def run(self, tmp_path):
        """Run `scripts/services` in a tree of its own."""
        shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))

        def run(*arguments, **environ):
            command = [sys.executable, str(tmp_path / "scripts" / "services"), *arguments]
            names = [f"WAKE_{backend.upper()}_URL" for backend in services.SERVERS]
            clean = {key: value for key, value in os.environ.items() if key not in names}
            return subprocess.run(command, env=clean | environ, capture_output=True, text=True, check=False)

        return run

    def test_status_of_stopped_servers(self, run):
        """The exit code tells that not all runs."""
        done = run("status")
        assert (1, "postgresql: stopped\nmysql: stopped\n") == (done.returncode, done.stdout)

    def test_url_of_a_stopped_server(self, run):
        """There is no URL of a stopped server, and the line says how to get one."""
        done = run("url", "mysql")
        expected = "error: mysql does not run: scripts/services start mysql\n"
        assert (1, "", expected) == (done.returncode, done.stdout, done.stderr)

    def test_own_server(self, run):
        """The user's server counts as running."""
        done = run("status", "mysql", WAKE_MYSQL_URL="mysql+mysqldb://me@db.example/mine")
        assert (0, "mysql: your own server\n") == (done.returncode, done.stdout)

    def test_unknown_server(self, run):
        """A wrong name is an error of usage."""
        done = run("start", "oracle")
        assert 2 == done.returncode
        assert "unknown server 'oracle' (there are: postgresql, mysql)" in done.stderr
