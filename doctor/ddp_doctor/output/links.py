"""The page of each check on the documentation site, whose address `[project.urls]` of `pyproject.toml` gives."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from ddp_doctor.faults import describe

_DISTRIBUTION, _LABEL = "ddp-doctor", "documentation"


@cache
def site_address() -> str:
    """Returns the address of the documentation site, or an empty text if the installed package names none."""
    try:
        found = metadata.metadata(_DISTRIBUTION).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    for entry in found:
        label, _, address = entry.partition(",")
        if label.strip().lower() == _LABEL:
            return address.strip().rstrip("/")
    return ""


def page_address(code: str) -> str:
    """Returns the address of the page of a check, or an empty text if the site or the check is not known."""
    site = site_address()
    return f"{site}/checks/{code}.html" if site and code in describe() else ""
