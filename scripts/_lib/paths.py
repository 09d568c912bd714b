"""Where things are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
SCRIPTS = ROOT / "scripts"
CORE = ROOT / "airflow-core"
CORE_SOURCE = CORE / "src"
CORE_TESTS = CORE / "tests"
COMMON_SOURCE = ROOT / "devel-common" / "src"
CONSTRAINTS = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"
