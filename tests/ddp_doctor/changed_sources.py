"""The faults of the mutation corpus, each as a change of the syntax tree of a program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RANKS = "torch.distributed.get_world_size()"
# Replaces a statement or an expression, or returns None to leave it.
Change = Callable[[ast.AST], "ast.AST | list[ast.stmt] | None"]


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: What is changed.
        codes: The codes of which one should report it.
        change: Returns what replaces a node, or None.
        needs: A name without which the fault has no effect in a program.
        without: A name with which the changed program would not run, or be no fault.
    """

    name: str
    codes: tuple[str, ...]
    change: Change
    needs: str = ""
    without: tuple[str, ...] = ()

    def applies(self, text: str) -> bool:
        """Returns whether the source of what a program reaches may have the fault."""
        return self.needs in text and not any(word in text for word in self.without)

    def apply(self, nodes: Sequence[ast.stmt]) -> bool:
        """Changes these statements; returns whether one was changed."""
        changer = _Changer(self.change)
        for node in nodes:
            changer.visit(node)
        return changer.count > 0


class _Changer(ast.NodeTransformer):
    """Applies a change wherever it applies."""

    def __init__(self, change: Change) -> None:
        self.change, self.count = change, 0

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:  # type: ignore[override]
        """Replaces a node, otherwise visits its parts."""
        found = self.change(node)
        if found is None:
            return super().generic_visit(node)
        self.count += 1
        return found


def _called(node: ast.AST, name: str) -> ast.Call | None:
    """Returns the call of a method or function of this name, if the statement or expression is one."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return None
    function = call.func
    own = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return call if own == name else None


def _removed(name: str) -> Change:
    """Removes statements that call a method."""
    return lambda node: ast.Pass() if isinstance(node, ast.Expr) and _called(node, name) else None


def _unsampled(node: ast.AST) -> ast.AST | None:
    """Replaces a DistributedSampler by one that each rank draws from alone."""
    if isinstance(node, ast.Expr) and _called(node, "set_epoch"):
        return ast.Pass()
    if not isinstance(node, ast.Expr) and (call := _called(node, "DistributedSampler")):
        return ast.parse(f"torch.utils.data.RandomSampler({ast.unparse(call.args[0])})", mode="eval").body
    return None


def _scaled(factor: str) -> Change:
    """Scales what is differentiated."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Expr) and (call := _called(node, "backward")) and isinstance(call.func, ast.Attribute):
            return ast.parse(f"(({ast.unparse(call.func.value)}) {factor}).backward()").body[0]
        return None

    return change


def _unwrapped(node: ast.AST) -> ast.AST | None:
    """Leaves out the wrapper."""
    if isinstance(node, ast.Expr):
        return None
    call = _called(node, "DDP") or _called(node, "DistributedDataParallel")
    return call.args[0] if call else None


def _on_rank_0(text: str) -> list[ast.stmt]:
    return ast.parse(f"if torch.distributed.get_rank() == 0:\n    {text}").body


def _clipped(node: ast.AST) -> list[ast.stmt] | None:
    """Clips on rank 0 before the optimizer steps."""
    if isinstance(node, ast.Expr) and (call := _called(node, "step")) and isinstance(call.func, ast.Attribute):
        owner = ast.unparse(call.func.value)
        if "optimizer" in owner:
            values = f"[value for group in {owner}.param_groups for value in group['params']]"
            return [*_on_rank_0(f"torch.nn.utils.clip_grad_norm_({values}, 1e-3)"), node]
    return None


def _often(node: ast.AST) -> list[ast.stmt] | None:
    """Steps a schedule once per process."""
    call = _called(node, "step") if isinstance(node, ast.Expr) else None
    if call and isinstance(call.func, ast.Attribute) and "schedule" in ast.unparse(call.func.value):
        return ast.parse(f"for _ in range({_RANKS}):\n    {ast.unparse(node)}").body
    return None


def _barrier(node: ast.AST) -> list[ast.stmt] | None:
    """Lets only rank 0 wait."""
    return _on_rank_0(ast.unparse(node)) if isinstance(node, ast.Expr) and _called(node, "barrier") else None


def _saved_by_all(node: ast.AST) -> list[ast.stmt] | None:
    """Removes the test of the rank before a checkpoint is written."""
    if isinstance(node, ast.If) and "rank" in ast.unparse(node.test) and "torch.save(" in ast.unparse(node):
        return node.body
    return None


_OTHER_WRAPPERS = (".module", "no_sync", "comm_hook", "broadcast_buffers", "static_graph")
MUTATIONS = (
    Mutation("set_epoch removed", ("LD001",), _removed("set_epoch"), "set_epoch", ("shuffle=False",)),
    Mutation("DistributedSampler removed", ("LD002",), _unsampled, "DistributedSampler("),
    Mutation(
        "wrapper removed", ("LD009",), _unwrapped, "DDP(", (".module", "no_sync", "comm_hook", "broadcast_buffers")
    ),
    Mutation("rank 0 clips", ("LD011",), _clipped, "optimizer.step()", ("averager", "average")),
    Mutation("loss divided by the ranks", ("LD014",), _scaled(f"/ {_RANKS}"), "backward()"),
    Mutation("loss times the ranks", ("LD014",), _scaled(f"* {_RANKS}"), "backward()"),
    Mutation("schedule steps per process", ("LD017",), _often, "schedule"),
    Mutation("zero_grad removed", ("LD020",), _removed("zero_grad"), "zero_grad"),
    Mutation("reduction of the metric removed", ("LD024",), _removed("all_reduce"), "print("),
    Mutation("barrier of rank 0", ("LD027", "LD034"), _barrier, "barrier()"),
    Mutation("all ranks save", ("LD032",), _saved_by_all, "torch.save("),
)
