"""Pages from Jinja2 templates: one file that needs nothing else, neither a script nor a network.

The templates of a package are in its folder `templates`. All of them extend `base.html.jinja` and share `style.css`
and the macros, which are in the templates of this package.
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
    """Renders a template into a file; a reader sees the old file or the whole new one, never a part.

    Args:
        path: The file to write; its folder must exist.
        package: The package whose folder `templates` contains the template.
        template: The template's file name.
        **context: The template's variables.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(path, render(package, template, **context))


def render(package: str, template: str, **context: Any) -> str:
    """Returns a rendered template; see `write_page`."""
    return _environment(package).get_template(template).render(**context)


@cache
def _environment(package: str) -> Environment:
    loader = ChoiceLoader([PackageLoader(package), PackageLoader("lit_mnist.report")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        # A run that was not trained or not tested has no such section in its result.
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
    """Returns what a template prints: text without control characters, and a dash for what is missing."""
    if isinstance(value, Markup):
        return value
    return MISSING if value is None or isinstance(value, ChainableUndefined) else escape_control(str(value))


def yaml_sections(config: Mapping[str, Any] | None) -> list[str]:
    """Returns a configuration as YAML, one text for each section; together they are a configuration file."""
    # Plain values only, as the result file would give them back.
    plain = json.loads(json.dumps(config or {}, default=str))
    return [
        yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000) for name, value in plain.items()
    ]


def data_url(image: Image.Image, kind: str, **options: Any) -> str:
    """Returns an image as an address that contains it.

    Args:
        image: The image.
        kind: `PNG` or `JPEG`.
        **options: Options of Pillow's `save`.
    """
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
