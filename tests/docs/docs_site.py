"""Builds the documentation as `make docs` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def build_site(folder: Path, source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Builds the documentation of a checkout into a folder. A warning fails it."""
    # With --quiet mkdocs would not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
