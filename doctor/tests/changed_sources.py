"""The faults of the mutation corpus, each as a change of the syntax tree of a program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Also in a program that starts no process group on one process.
_RANKS = "(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)"
_IS_RANK_0 = "not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0"
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
        note: Whether a note says what is wrong, as for equal dropout masks.
    """

    name: str
    codes: tuple[str, ...]
    change: Change
    needs: str = ""
    without: tuple[str, ...] = ()
    note: bool = False

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


def _owner(call: ast.Call) -> str:
    """Returns the source of the object whose method is called; empty for a function."""
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _removed(name: str, owner: str = "") -> Change:
    """Removes statements that call a method of an object whose source ends with a word."""

    def change(node: ast.AST) -> ast.AST | None:
        call = _called(node, name) if isinstance(node, ast.Expr) else None
        return ast.Pass() if call and _owner(call).endswith(owner) else None

    return change


def _unsampled(node: ast.AST) -> ast.AST | None:
    """Replaces a DistributedSampler by one that each rank draws from alone."""
    if isinstance(node, ast.Expr) and _called(node, "set_epoch"):
        return ast.Pass()
    if not isinstance(node, ast.Expr) and (call := _called(node, "DistributedSampler")):
        return ast.parse(f"torch.utils.data.RandomSampler({ast.unparse(call.args[0])})", mode="eval").body
    return None


def _scaled(factor: str) -> Change:
    """Scales what is differentiated, or what a training step returns."""

    def scaled(value: ast.expr) -> ast.expr:
        return ast.parse(f"({ast.unparse(value)}) {factor}", mode="eval").body

    def returned(node: ast.AST) -> ast.AST | None:
        return ast.Return(scaled(node.value)) if isinstance(node, ast.Return) and node.value else None

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.FunctionDef) and node.name == "training_step":
            changer = _Changer(returned)
            changer.generic_visit(node)
            # Without a value, it differentiates by manual_backward.
            return node if changer.count else None
        call = _called(node, "backward") or _called(node, "manual_backward") if isinstance(node, ast.Expr) else None
        if call is None or not isinstance(call.func, ast.Attribute):
            return None
        if call.args:
            # That of Accelerate, Fabric and Lightning.
            call.args[0] = scaled(call.args[0])
        else:
            call.func.value = scaled(call.func.value)
        return node

    return change


def _unwrapped(node: ast.AST) -> ast.AST | None:
    """Leaves out the wrapper."""
    if isinstance(node, ast.Expr):
        return None
    call = _called(node, "DDP") or _called(node, "DistributedDataParallel")
    return call.args[0] if call else None


def _on_rank_0(text: str) -> list[ast.stmt]:
    return ast.parse(f"if {_IS_RANK_0}:\n    {text}").body


def _clipped(node: ast.AST) -> list[ast.stmt] | None:
    """Clips on rank 0 before the optimizer steps."""
    if isinstance(node, ast.Expr) and (call := _called(node, "step")):
        owner = _owner(call)
        if "optimizer" in owner:
            values = f"[value for group in {owner}.param_groups for value in group['params']]"
            return [*_on_rank_0(f"torch.nn.utils.clip_grad_norm_({values}, 1e-3)"), node]
    return None


def _often(node: ast.AST) -> list[ast.stmt] | None:
    """Steps a schedule once per process."""
    call = _called(node, "step") if isinstance(node, ast.Expr) else None
    if call and "schedule" in _owner(call):
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


def _seeded_alike(node: ast.AST) -> ast.AST | None:
    """Seeds all ranks alike."""
    call = _called(node, "manual_seed") or _called(node, "seed") if isinstance(node, ast.Call) else None
    if call and call.args and "rank" in ast.unparse(call.args[0]):
        call.args[0] = ast.Constant(1000)
        return node
    return None


def _incomplete(node: ast.AST) -> ast.AST | None:
    """Gives an optimizer all parameters of a model but the first."""
    call = node if isinstance(node, ast.Call) and "optim." in ast.unparse(node.func) else None
    if call and call.args and _called(call.args[0], "parameters"):
        call.args[0] = ast.parse(f"list({ast.unparse(call.args[0])})[1:]", mode="eval").body
        return call
    return None


def _synchronized_early(node: ast.AST) -> ast.AST | None:
    """Averages the gradients of the first micro-batches instead of the last one."""
    if isinstance(node, ast.IfExp) and "no_sync" in ast.unparse(node):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.keyword) and node.arg == "enabled" and not isinstance(node.value, ast.Constant):
        return ast.keyword(node.arg, ast.UnaryOp(ast.Not(), node.value))
    return None


def _logged_alone(node: ast.AST) -> ast.AST | None:
    """Logs the value of one rank."""
    if isinstance(node, ast.keyword) and node.arg == "sync_dist":
        return ast.keyword(node.arg, ast.Constant(False))
    return None


MUTATIONS = (
    Mutation("set_epoch removed", ("LD001",), _removed("set_epoch"), "set_epoch", ("shuffle=False",)),
    Mutation("DistributedSampler removed", ("LD002",), _unsampled, "DistributedSampler("),
    Mutation("one seed for all ranks", ("LD008",), _seeded_alike, "rank", note=True),
    Mutation(
        "wrapper removed", ("LD009",), _unwrapped, "DDP(", (".module", "no_sync", "comm_hook", "broadcast_buffers")
    ),
    Mutation("rank 0 clips", ("LD011",), _clipped, "optimizer.step()", ("averager", "average")),
    Mutation("loss divided by the ranks", ("LD014",), _scaled(f"/ {_RANKS}")),
    Mutation("loss times the ranks", ("LD014",), _scaled(f"* {_RANKS}")),
    Mutation("no_sync of the last micro-batch", ("LD016",), _synchronized_early, "sync"),
    Mutation("schedule steps per process", ("LD017",), _often, "schedule"),
    Mutation("unscale_ removed", ("LD018",), _removed("unscale_"), "unscale_"),
    Mutation("optimizer without the first parameter", ("LD019",), _incomplete, "optim."),
    Mutation("zero_grad removed", ("LD020",), _removed("zero_grad"), "zero_grad"),
    Mutation("train() removed", ("LD021",), _removed("train", "model"), ".eval()"),
    Mutation("reduction of the metric removed", ("LD024",), _removed("all_reduce"), "print("),
    Mutation("sync_dist removed", ("LD024",), _logged_alone, "sync_dist", note=True),
    Mutation("barrier of rank 0", ("LD027", "LD034"), _barrier, "barrier()"),
    Mutation("all ranks save", ("LD032",), _saved_by_all, "torch.save("),
    Mutation("group not destroyed", ("LD032",), _removed("destroy_process_group"), "destroy_process_group", note=True),
)
