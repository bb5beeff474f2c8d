"""Builds the documentation as `make docs` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from filelock import FileLock


def build_site(folder: Path, source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Builds the documentation of a checkout into a folder. A warning fails it."""
    # With --quiet mkdocs would not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def shared_site(factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the documentation, which the first process of a test run that asks for it builds."""
    # A worker of pytest-xdist has a folder of its own within the folder of the run.
    base = factory.getbasetemp()
    place = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    site = place / "site"
    with FileLock(place / "site.lock"):
        if not site.exists():
            done = build_site(place / "built")
            assert done.returncode == 0, done.stderr
            assert "WARNING" not in done.stdout + done.stderr
            (place / "built").rename(site)
    return site
