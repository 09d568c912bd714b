"""Forks the processes of a round from one that has imported Airflow already, so that a restart takes no seconds of CPU.

Reads commands from standard input, a JSON object a line: ``name``, ``log``, ``run`` (``module:function``) and ``arguments``. Writes
what happens to standard output: ``started`` and ``ended`` with name, pid and status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import sys
import traceback
from pathlib import Path
from typing import Any

TICK = 0.05


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def become(name: str, log: str, run: str, arguments: dict[str, Any]) -> None:
    """Turn this process, a fork, into what it is to be; does not return."""
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for new, old in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(new, old)
        random.seed()
        from airflow import settings

        # Made before the fork; it has no connection yet.
        assert settings.engine is not None
        settings.engine.dispose(close=False)
        module, _, function = run.partition(":")
        arguments["folder"] = Path(arguments["folder"])
        getattr(importlib.import_module(module), function)(**arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


IMPORTED_BEFORE = (
    "_lib.chaos.check",
    "_lib.chaos.hands",
    "_lib.chaos.scheduler",
    "_lib.chaos.writer",
    "airflow.cli.commands.scheduler_command",
    "airflow.utils.db",
    "airflow.utils.serve_logs",
)


def prepare() -> None:
    """Do once what every fork would do at its start."""
    for module in IMPORTED_BEFORE:
        importlib.import_module(module)
    from sqlalchemy.orm import configure_mappers

    from airflow.cli.cli_parser import get_parser

    configure_mappers()
    get_parser()
    gc.collect()
    gc.freeze()


def main() -> None:
    prepare()
    children: dict[int, str] = {}
    say(event="ready")
    buffer = b""
    while True:
        readable, _, _ = select.select([0], [], [], TICK)
        if readable:
            read = os.read(0, 65536)
            if not read:
                return
            buffer += read
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            command = json.loads(line)
            pid = os.fork()
            if not pid:
                become(**command)
            children[pid] = command["name"]
            say(event="started", name=command["name"], pid=pid)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if name := children.pop(pid, None):
                say(event="ended", name=name, pid=pid, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
