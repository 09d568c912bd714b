"""A process that has imported what many runs of pytest need, and forks for each run: importing takes most of a short one.

    python -m _lib.prefork MODULE...

It reads a line of JSON for each run from standard input (`arguments` of pytest, `log`, `timeout` and `fresh`, a module
that the run has to import anew), and answers with one: `code`, or `problem`. It ends at the end of its input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any


def serve(modules: list[str]) -> None:
    """Answer requests; standard output is for the answers alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if request["fresh"] in sys.modules:
            answer: dict[str, Any] = {"problem": f"{request['fresh']} is imported already"}
        else:
            answer = run(request["arguments"], request["log"], request["timeout"])
        print(json.dumps(answer), file=answers, flush=True)


def run(arguments: list[str], log: str, timeout: float) -> dict[str, Any]:
    """Run pytest in a child, and end all that it has left running."""
    pid = os.fork()
    if not pid:
        child(arguments, log)
    deadline = time.monotonic() + timeout
    status = None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return {"problem": f"pytest did not end within {timeout:.0f} s"}
    return {"code": status}


def child(arguments: list[str], log: str) -> None:
    code = 70
    try:
        os.setsid()
        with open(log, "w") as output, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        import pytest

        code = int(pytest.main(arguments))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
