"""Renders Jinja2 templates to self-contained HTML pages, without scripts and without network access.

Each package has its templates in a folder `templates`. They extend `base.html.jinja` of this package, and share its
macros and `style.css`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import ChainableUndefined, ChoiceLoader, Environment, PackageLoader
from markupsafe import Markup
from PIL import Image

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.distributed.terminal import escape_control
from lit_mnist.report import formats
from lit_mnist.report.formats import MISSING


def write_page(path: Path, package: str, template: str, **context: Any) -> None:
    """Renders a template to a file, which is written atomically.

    Args:
        path: The file to write; its folder must exist.
        package: The package of the template.
        template: The template's file name.
        **context: The template's variables.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(path, _environment(package).get_template(template).render(**context))


@cache
def _environment(package: str) -> Environment:
    loader = ChoiceLoader([PackageLoader(package), PackageLoader("lit_mnist.report")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        # The result of a run that did not train or test lacks the section.
        undefined=ChainableUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(SPACE=formats.SPACE, MISSING=MISSING)
    for name in ("number", "count", "percent", "duration", "size", "plural", "short"):
        environment.filters[name] = getattr(formats, name)
    environment.filters["yaml_sections"] = yaml_sections
    return environment


def _printable(value: object) -> object:
    """Returns text without control characters, and a dash for a missing value."""
    if isinstance(value, Markup):
        return value
    return MISSING if value is None or isinstance(value, ChainableUndefined) else escape_control(str(value))


def yaml_sections(config: Mapping[str, Any] | None) -> list[str]:
    """Returns each section of a configuration as YAML."""
    # Plain values only, as in the result file.
    plain = json.loads(json.dumps(config or {}, default=str))
    return [
        yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000) for name, value in plain.items()
    ]


def data_url(image: Image.Image, kind: str, **options: Any) -> str:
    """Returns an image as a data URL; `kind` is `PNG` or `JPEG`, and `options` are those of Pillow's `save`."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
