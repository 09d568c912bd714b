"""Released wheels: fetching one, checking its files, packing a changed one."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wheel.wheelfile import WheelFile

from _lib.edits import BuildError

# Of every file in a wheel that we pack, unless SOURCE_DATE_EPOCH says otherwise: zip's earliest.
TIMESTAMP = 315532800
MODE = stat.S_IFREG | 0o644


class Wheel:
    """A released wheel, whose files are as its RECORD has them."""

    def __init__(self, path: Path):
        self.path = path
        self.distribution, self.version, self.tag = path.name.removesuffix(".whl").split("-", 2)
        self.info = f"{self.distribution}-{self.version}.dist-info"
        try:
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if not name.endswith("/")]
                self._files = {name: archive.read(name) for name in names}
            record = self._files.pop(f"{self.info}/RECORD").decode()
        except (zipfile.BadZipFile, KeyError) as error:
            raise BuildError(f"{path}: not a whole wheel ({error}); remove it to fetch it again") from None
        self._hashes = {row[0]: row[1] for row in csv.reader(io.StringIO(record)) if row}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def read(self, name: str) -> bytes:
        """A file's content; an error where it is not what RECORD says."""
        content = self._files[name]
        algorithm, _, expected = self._hashes.get(name, "").partition("=")
        if algorithm not in ("sha256", "sha384", "sha512"):
            raise BuildError(f"{name}: expected a hash in the wheel's RECORD, found {algorithm or 'none'}")
        digest = hashlib.new(algorithm, content).digest()
        found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if found != expected:
            raise BuildError(f"{name}: expected the {algorithm} of RECORD, {expected}, found {found}")
        return content


def fetch(package: str, version: str, cache: Path) -> Path:
    """The path of a released wheel, downloaded unless the cache has it."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if found := sorted(cache.glob(pattern)):
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    # An environment made by uv has no pip; the interpreter that it was made from does.
    base = getattr(sys, "_base_executable", sys.executable)
    python = sys.executable if importlib.util.find_spec("pip") else base
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, f"{package}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob(pattern))
        if done.returncode or not wheels:
            said = done.stderr.strip().splitlines() or ["pip says nothing"]
            raise BuildError(f"cannot download {package}=={version}: {said[-1]}")
        return Path(shutil.move(wheels[0], cache / wheels[0].name))


def pack(wheel: Wheel, version: str, changes: Mapping[str, bytes], out: Path) -> Path:
    """Write a wheel with another version and changed files to a folder: the whole wheel, or nothing."""
    info = f"{wheel.distribution}-{version}.dist-info"
    files = {name: changes[name] if name in changes else wheel.read(name) for name in {*wheel, *changes}}
    files[f"{wheel.info}/METADATA"] = _with_version(files[f"{wheel.info}/METADATA"], wheel.version, version)
    renamed = {name.replace(f"{wheel.info}/", f"{info}/", 1): content for name, content in files.items()}
    target = out / f"{wheel.distribution}-{version}-{wheel.tag}.whl"
    partial = out / f".{target.name}.{os.getpid()}.part"
    out.mkdir(parents=True, exist_ok=True)
    # The library insists on a wheel's file name, so it writes elsewhere: `out` never has half a wheel, even
    # after SIGKILL.
    with tempfile.TemporaryDirectory(prefix="wake-build-") as folder:
        packed = Path(folder, target.name)
        with _ReproducibleWheel(packed, "w") as archive:
            for name in sorted(renamed):
                archive.writestr(name, renamed[name])
        try:
            shutil.copyfile(packed, partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return target


class _ReproducibleWheel(WheelFile):
    """Writes each entry, RECORD included, with one date and the same permissions."""

    def writestr(self, zinfo_or_arcname: Any, data: Any, compress_type: int | None = None) -> None:
        date = int(os.environ.get("SOURCE_DATE_EPOCH", TIMESTAMP))
        entry = zipfile.ZipInfo(zinfo_or_arcname, time.gmtime(max(date, TIMESTAMP))[:6])
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = MODE << 16
        super().writestr(entry, data)


def _with_version(metadata: bytes, old: str, new: str) -> bytes:
    before, line, after = metadata.partition(f"\nVersion: {old}\n".encode())
    if not line:
        raise BuildError(f"METADATA: expected a line 'Version: {old}', found none")
    return before + f"\nVersion: {new}\n".encode() + after
