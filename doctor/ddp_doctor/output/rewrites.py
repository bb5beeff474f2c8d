"""How the fix of a check changes the user's lines. A fix that needs a guess is none. Imports no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NamedTuple


class Source(NamedTuple):
    """A file: its lines, its tree, and the line of the finding, from 0."""

    lines: list[str]
    tree: ast.Module
    at: int


class Change(NamedTuple):
    """New lines in place of some others, from a line on, from 0."""

    at: int
    removed: int
    added: list[str]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _insert(source: Source, at: int, *texts: str, like: int | None = None) -> Change:
    """Inserts lines before another one, with its indentation or that of a third line."""
    indent = _indent(source.lines[at if like is None else like])
    return Change(at, 0, [indent + text for text in texts])


def _replace(source: Source, at: int, text: str) -> Change | None:
    return Change(at, 1, [text]) if text != source.lines[at] else None


def _only_call(source: Source, *names: str, lacks: str) -> ast.Call | None:
    """Returns the only call of one of these functions without a keyword, if it is in one line."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            keywords = {keyword.arg for keyword in node.keywords}
            if lacks not in keywords and None not in keywords:
                found.append(node)
    return found[0] if len(found) == 1 and found[0].lineno == found[0].end_lineno else None


def _with_argument(source: Source, call: ast.Call, text: str) -> Change | None:
    line, end = source.lines[call.lineno - 1], (call.end_col_offset or 0) - 1
    # Columns are counted in bytes.
    if not line.isascii() or line[end : end + 1] != ")":
        return None
    before = line[:end].rstrip().removesuffix(",")
    return _replace(source, call.lineno - 1, f"{before}, {text}{line[end:]}")


def _set_epoch(source: Source) -> Change | None:
    """Calls set_epoch before the loop over the batches, in the loop over the epochs."""
    loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For)]
    inner = next((node for node in loops if node.lineno == source.at + 1), None)
    outer = [node for node in loops if inner is not None and node is not inner and inner in ast.walk(node)]
    epoch = outer[-1].target if outer else None
    if inner is None or not isinstance(epoch, ast.Name):
        return None
    samplers = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id.endswith("sampler")}
    loaders = {node.id for node in ast.walk(inner.iter) if isinstance(node, ast.Name)}
    loaders -= {"enumerate", "tqdm", "zip", "range", "iter", "DataLoader"}
    if len(samplers) == 1:
        return _insert(source, source.at, f"{samplers.pop()}.set_epoch({epoch.id})")
    if len(loaders) != 1:
        return None
    return _insert(source, source.at, f"{loaders.pop()}.sampler.set_epoch({epoch.id})")


def _distributed_sampler(source: Source) -> Change | None:
    """Gives the only loader that shuffles a DistributedSampler in place of its shuffling."""
    call = _only_call(source, "DataLoader", lacks="sampler")
    shuffles = call and any(keyword.arg == "shuffle" for keyword in call.keywords)
    if call is None or not shuffles or not call.args:
        return None
    line = source.lines[call.lineno - 1]
    sampler = f"sampler=DistributedSampler({ast.unparse(call.args[0])})"
    return _replace(source, call.lineno - 1, re.sub(r"\bshuffle\s*=\s*True\b", sampler, line))


def _seeded_split(source: Source) -> Change | None:
    """Gives the split a generator with the same seed on every rank."""
    call = _only_call(source, "random_split", lacks="generator")
    return _with_argument(source, call, "generator=torch.Generator().manual_seed(0)") if call else None


def _through_wrapper(source: Source) -> Change | None:
    """Calls the wrapper instead of the module in it."""
    return _replace(source, source.at, re.sub(r"\b(\w+)\.module\(", r"\1(", source.lines[source.at]))


def _synchronized(source: Source) -> Change | None:
    """Converts batch norm before the only wrap of a module that has a name, or by the option of Lightning's Trainer."""
    call = _only_call(source, "DistributedDataParallel", "DDP", lacks="-")
    if call and call.args and isinstance(call.args[0], ast.Name):
        name = call.args[0].id
        return _insert(source, call.lineno - 1, f"{name} = nn.SyncBatchNorm.convert_sync_batchnorm({name})")
    trainer = _only_call(source, "Trainer", lacks="sync_batchnorm")
    return _with_argument(source, trainer, "sync_batchnorm=True") if trainer else None


def _unscale(source: Source) -> Change | None:
    """Unscales the gradients before they are clipped."""
    for line in source.lines[source.at + 1 : source.at + 8]:
        if found := re.fullmatch(r"\s*(\w+)\.step\((\w+)\)\s*(?:#.*)?", line):
            return _insert(source, source.at, f"{found[1]}.unscale_({found[2]})")
    return None


def _zero_grad(source: Source) -> Change | None:
    """Clears the gradients after the step."""
    found = re.fullmatch(r"\s*(\w+(?:\.\w+)*)\.step\((\w*)\)\s*(?:#.*)?", source.lines[source.at])
    if found is None:
        return None
    # A scaler steps with the optimizer as its argument.
    text = f"{found[2] or found[1]}.zero_grad()"
    return Change(source.at + 1, 0, [_indent(source.lines[source.at]) + text])


def _dropout(source: Source) -> Change | None:
    """Tells the function the mode of the module."""
    call = _only_call(source, "dropout", lacks="training")
    return _with_argument(source, call, "training=self.training") if call else None


def _strict(source: Source) -> Change | None:
    """Loads strictly, so that missing keys are an error."""
    return _replace(source, source.at, re.sub(r",\s*strict\s*=\s*False", "", source.lines[source.at]))


# None: the fix cannot be written.
REWRITES: dict[str, Callable[[Source], Change | None]] = {
    "LD001": _set_epoch,
    "LD002": _distributed_sampler,
    "LD005": _seeded_split,
    "LD009": _through_wrapper,
    "LD012": _synchronized,
    "LD018": _unscale,
    "LD020": _zero_grad,
    "LD022": _dropout,
    "LD026": _strict,
}
