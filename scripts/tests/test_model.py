"""`scripts/model`: what it says, and when it fails. CI runs the whole of it beside the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from _lib.paths import ROOT, SCRIPTS

MODEL = ROOT / "model" / "wake.pml"

needs_spin = pytest.mark.skipif(not shutil.which("spin"), reason="apt-get install spin")


def model(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "model"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_spin
def test_losses_are_found():
    """Ways to break the protocol are found, one line each."""
    done = model("DELETE_UP_TO", "LOGS_FIRST", "LOCK_UNCHECKED")
    assert 0 == done.returncode, done.stderr
    assert [": a change is lost", ": a change is lost", ": a run fires twice"] == re.findall(
        r": a change is lost|: a run fires twice", done.stdout
    )


@needs_spin
def test_variant_that_breaks_nothing_fails_the_run(tmp_path):
    """A broken variant in which the checker finds no loss is a failure."""
    scripts = tmp_path / "scripts"
    shutil.copytree(SCRIPTS / "_lib", scripts / "_lib")
    shutil.copy(SCRIPTS / "model", scripts)
    (tmp_path / "model").mkdir()
    # Nothing to lose: no transaction changes anything.
    text = MODEL.read_text().replace("run writer(0, 2); run writer(2, 4);", "")
    (tmp_path / "model" / "wake.pml").write_text(text)
    command = [sys.executable, str(scripts / "model"), "REQUEST_FIRST"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 1 == done.returncode, done.stderr
    assert done.stdout.startswith("NOT AS IT SHOULD BE: commit the request before its change")


def test_every_variant_is_in_the_model():
    """The variants of the script are the macros of the model."""
    script = (SCRIPTS / "model").read_text()
    listed = set(re.findall(r'^    "([A-Z_]+)": "', script, re.MULTILINE))
    assert set(re.findall(r"^#if(?:n?def) ([A-Z_]+)", MODEL.read_text(), re.MULTILINE)) == listed


def test_unknown_variant():
    """An unknown variant is an error that names the known ones."""
    done = model("NONSENSE")
    assert 2 == done.returncode
    assert "unknown variant 'NONSENSE' (there are: DELETE_UP_TO" in done.stderr
