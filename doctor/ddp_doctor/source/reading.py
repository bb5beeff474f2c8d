"""Reads the files of programs, and what they import from the same project, for the patterns of the faults."""

import ast
import gc
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ddp_doctor.accepted import accept_comments, place_of
from ddp_doctor.errors import InputError
from ddp_doctor.faults import load_checks
from ddp_doctor.findings import CheckState, Finding, Report, Stage, Verdict
from ddp_doctor.source.file import FRAMEWORK, Program, SourceFile

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#(]+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
_ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")
_FOREIGN = {"site-packages", "node_modules", "__pycache__", "build", "dist", "venv", "env"}


def read(paths: Sequence[str]) -> Report:
    """Reads files, the Python files of folders, and what they import from the same project; nothing is run.

    Args:
        paths: Files and folders.

    Returns:
        The report. What is found is a likely fault.

    Raises:
        InputError: There is no such path, or a file that is named cannot be parsed.
    """
    begun = time.monotonic()
    readers = {code: check.read for code, check in load_checks().items() if hasattr(check, "read")}
    # Its searches take longer than to parse the files.
    gc.disable()
    try:
        files = _load(paths)
        findings = [
            Finding(code, Verdict.FAULT, f"Likely: {likely.message}", place=_place(file, likely.node))
            for file in files
            for code, reader in readers.items()
            for likely in reader(file)
        ]
    finally:
        gc.enable()
    findings.sort(key=lambda finding: place_of(finding) or ())
    seconds = time.monotonic() - begun
    stages = [Stage("reading", f"{len(files)} {'file' if len(files) == 1 else 'files'} read", seconds)]
    report = Report(" ".join(paths), 0, findings, stages, [*map(CheckState, readers)], seconds=seconds)
    return accept_comments(report)


def _place(file: SourceFile, node: ast.expr | ast.stmt) -> str:
    scope = file.scope(node)
    path = os.path.relpath(file.path)
    where = f"{file.path if path.startswith('..') else path}:{node.lineno}"
    return where if isinstance(scope, ast.Module) else f"{where} in {scope.name}"


def _load(paths: Sequence[str]) -> list[SourceFile]:
    """Returns the files of paths, and those that they import from the same project."""
    # Texts, which are compared faster than paths.
    todo = [str(path.resolve()) for name in paths for path in _python_files(Path(name))]
    named = {str(Path(name).resolve()) for name in paths}
    files: dict[str, SourceFile] = {}
    imports: dict[str, list[str]] = {}
    for path in todo:
        if path not in imports:
            imports[path] = []
            if file := _opened(Path(path), named=path in named):
                files[path] = file
                imports[path] = [*_imports(file)]
                todo += imports[path]
    importers: dict[str, list[str]] = {path: [] for path in files}
    for path, others in imports.items():
        for other in others:
            importers.get(other, []).append(path)
    programs: dict[frozenset[str], Program] = {}
    for path, file in files.items():
        paths_near = frozenset(_closure(_closure([path], importers), imports))
        if paths_near not in programs:
            programs[paths_near] = Program([files[one] for one in sorted(paths_near) if one in files])
        file.program = programs[paths_near]
    return list(files.values())


def _python_files(path: Path) -> Iterable[Path]:
    if path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if name not in _FOREIGN and not name.startswith("."))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    elif path.is_file():
        yield path
    else:
        raise InputError(f"There is no file or folder {path}.")


def _opened(path: Path, *, named: bool) -> SourceFile | None:
    try:
        file = SourceFile(path, path.read_text(encoding="utf-8"))
        if named:
            ast.parse(file.text)
        return file
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        if named:
            raise InputError(f"{path} cannot be read: {error}") from error
        return None


def _imports(file: SourceFile) -> Iterator[str]:
    """Yields the files of the project that a file imports, which its text shows before it is parsed."""
    folders = _folders(file.path.parent)
    for dots, module, names, modules in _IMPORT.findall(file.text):
        for name in modules.split(",") if modules else ():
            parts = name.split()[:1]
            if parts and not FRAMEWORK.fullmatch(parts[0].partition(".")[0]):
                yield from _module(folders, parts[0].split("."))
        # The source of a framework may be part of its project.
        if names and not (not dots and FRAMEWORK.fullmatch(module.partition(".")[0])):
            parts = module.split(".") if module else []
            where = [str(file.path.parents[len(dots) - 1])] if 0 < len(dots) <= len(file.path.parents) else folders
            yield from _module(where, parts) if parts else ()
            for name in re.findall(r"(?:^|[,(\n])\s*(\w+)", names):
                yield from _module(where, [*parts, name])


@cache
def _folders(folder: Path) -> tuple[str, ...]:
    """Returns where absolute imports of a folder may lead: itself, and the folders above up to the project's root."""
    above = [folder, *folder.parents]
    root = next((n for n, one in enumerate(above) if any((one / mark).exists() for mark in _ROOT_MARKS)), 0)
    return tuple(map(str, (*above[: root + 1], above[root] / "src")))


def _module(folders: Iterable[str], parts: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        base = "/".join((folder, *parts))
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if _is_file(path):
                yield path
                return


_is_file = cache(os.path.isfile)


def _closure(paths: Iterable[str], edges: dict[str, list[str]]) -> list[str]:
    found = dict.fromkeys(paths)
    todo = list(found)
    for path in todo:
        new = [other for other in edges.get(path, ()) if other not in found]
        found |= dict.fromkeys(new)
        todo += new
    return list(found)
