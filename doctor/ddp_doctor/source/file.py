"""A file of source code, and what the patterns of the faults ask of it. Imports no torch."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

Scope: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
Loop = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_RANK = re.compile(
    r"rank|gpu|device|(?<![a-z])main|master|primary|chief|leader|is_root|writer|coordinator"
    r"|(is|process|global|world|local)_?zero|proc(ess)?_?(id|index)"
)


@dataclass(frozen=True)
class Likely:
    """A place in the source that looks like a fault, and what is read there, in one sentence."""

    node: ast.expr | ast.stmt
    message: str


class Program:
    """All files of the programs that a file belongs to: what imports it, and what these import."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.files = files
        self._mentioned: dict[str, bool] = {}

    def mentions(self, *words: str) -> bool:
        """Returns whether a file contains one of these words."""
        for word in words:
            if word not in self._mentioned:
                self._mentioned[word] = any(word in file.text for file in self.files)
        return any(map(self._mentioned.__getitem__, words))

    @cached_property
    def distributed(self) -> bool:
        """Whether the program communicates by means of torch itself, and no framework owns the loop."""
        communicates = any(_COMMUNICATES.search(file.text) for file in self.files)
        return communicates and not any(_FRAMEWORK.search(file.text) for file in self.files)

    @cached_property
    def definitions(self) -> dict[str, list[ast.AST]]:
        """The functions and methods by name."""
        found: dict[str, list[ast.AST]] = defaultdict(list)
        for node in (node for file in self.files for node in ast.walk(file.tree)):
            if isinstance(node, _FUNCTIONS):
                found[node.name].append(node)
        return found


@dataclass(eq=False)
class SourceFile:
    """A file with its source, and the programs that it belongs to."""

    path: Path
    text: str
    program: Program = field(default_factory=lambda: Program(()))

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree, which most files of a project are never asked for; empty if it cannot be parsed."""
        try:
            with warnings.catch_warnings(action="ignore"):
                return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError):
            return ast.Module([], [])

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What the imported names mean, such as `torch.nn.functional` for `F`."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for name in node.names:
                    found |= {name.asname: name.name} if name.asname else {}
            elif isinstance(node, ast.ImportFrom):
                package = "." * node.level + (node.module or "")
                found |= {name.asname or name.name: f"{package}.{name.name}" for name in node.names}
        return found

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @property
    def nodes(self) -> Iterable[ast.AST]:
        """All nodes below the module."""
        return self._parents.keys()

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        found = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                found[last(node.func)].append(node)
        return found

    @cached_property
    def _values(self) -> dict[tuple[ast.AST, str], list[tuple[ast.stmt, ast.expr]]]:
        """The statements that assign a name in a scope, or an attribute in a class, with the values."""
        found: dict[tuple[ast.AST, str], list[tuple[ast.stmt, ast.expr]]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name, value in _pairs(target, node.value):
                        owner = self.class_of(node) if name.startswith("self.") else self.scope(node)
                        found[owner or self.tree, name].append((node, value))
        return found

    def called(self, *names: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Returns the calls of functions whose last names are these, in the order of the text."""
        found = [call for name in names if f"{name}(" in self.text for call in self._calls.get(name, ())]
        inside = (call for call in found if within is None or self.contains(within, call))
        return sorted(inside, key=lambda call: (call.lineno, call.col_offset))

    def name(self, node: ast.AST) -> str:
        """Returns the full name of an expression, with aliases resolved: `torch.nn.functional.dropout`."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        return f"{self.name(node.func)}()" if isinstance(node, ast.Call) else "?"

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields what contains a node, the innermost first."""
        while node := self._parents.get(node):  # type: ignore[assignment]
            yield node

    def contains(self, outer: ast.AST, node: ast.AST) -> bool:
        """Returns whether a node is another one or within it."""
        return outer is node or any(outer is one for one in self.above(node))

    def scope(self, node: ast.AST) -> Scope:
        """Returns the function that a node is in, or the module."""
        return next((one for one in self.above(node) if isinstance(one, _FUNCTIONS)), self.tree)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Returns the class that a node is in."""
        return next((one for one in self.above(node) if isinstance(one, ast.ClassDef)), None)

    def loops(self, node: ast.AST) -> list[ast.AST]:
        """Returns the loops of its own function that contain a node, the innermost first."""
        inside = takewhile(lambda one: not isinstance(one, _FUNCTIONS), self.above(node))
        return [one for one in inside if isinstance(one, Loop)]

    def assigned(self, node: ast.expr) -> list[tuple[ast.stmt, ast.expr]]:
        """Returns the statements that assign a variable or `self.name` where it is used, and the values."""
        text = ast.unparse(node)
        places = [self.class_of(node)] if text.startswith("self.") else [self.scope(node), self.tree]
        return next((found for place in places if place and (found := self._values.get((place, text)))), [])

    def reached(self, node: ast.AST) -> list[ast.AST]:
        """Returns a node, and the functions of its programs that it may call, recognized by their names."""
        found, names = [node], set[str]()
        for one in found:
            for call in (call for call in ast.walk(one) if isinstance(call, ast.Call)):
                for name in {last(call.func), "__call__"} - names:
                    names.add(name)
                    found += self.program.definitions.get(name, ())
        return found

    def excluded(self, one: ast.AST, other: ast.AST) -> bool:
        """Returns whether two nodes are in different branches of a condition."""
        blocks = [block for block in self.above(one) if isinstance(block, ast.If) and self.contains(block, other)]
        inside = ([any(self.contains(part, n) for part in block.body) for n in (one, other)] for block in blocks)
        return any(first != second for first, second in inside)

    def without_gradients(self, node: ast.AST) -> bool:
        """Returns whether a node is under `torch.no_grad()` or the like."""
        parts = list[ast.expr]()
        for one in self.above(node):
            parts += getattr(one, "decorator_list", ())
            parts += [item.context_expr for item in one.items] if isinstance(one, ast.With) else []
        return any(_NO_GRAD.search(ast.unparse(part)) for part in parts)


_NO_GRAD = re.compile(r"no_grad|inference_mode|set_grad_enabled")
_COMMUNICATES = re.compile(r"\b(DistributedDataParallel|DDP|init_process_group)\s*\(")
# Those whose loops are not the user's.
FRAMEWORK = re.compile(
    "lightning|pytorch_lightning|lightning_fabric|accelerate|mmengine|mmcv|composer|deepspeed|ignite|fastai|catalyst"
    "|colossalai|horovod|fairscale|fairseq|megatron|skorch|detectron2"
)
_FRAMEWORK = re.compile(
    rf"^[ \t]*(from|import)\s+({FRAMEWORK.pattern}|ray\.train)\b"
    r"|^[ \t]*from\s+transformers\b[^\n]*\bTrainer\b|\bTrainingArguments\(",
    re.MULTILINE,
)


def last(function: ast.AST) -> str:
    """Returns the last part of the name of a function."""
    return getattr(function, "attr", getattr(function, "id", ""))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Returns the value of an argument that a call names; `**` may have any name."""
    return next((one.value for one in call.keywords if one.arg in {name, None}), None)


def names_rank(node: ast.expr) -> bool:
    """Returns whether an expression asks for the rank, as `rank == 0 and ...` does."""
    return bool(_RANK.search(ast.unparse(node).lower()))


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns all names and attributes within nodes."""
    return {
        one.id if isinstance(one, ast.Name) else one.attr
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
    }


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names that an assignment sets, with their values."""
    if isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        for number, one in enumerate(target.elts):
            yield from _pairs(one, values[number] if len(values) == len(target.elts) else value)
    else:
        yield ast.unparse(target), value
