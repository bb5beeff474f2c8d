"""LD031: the graph of each step is kept."""

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import loss_place
from ddp_doctor.evidence.order import epoch_of
from ddp_doctor.evidence.requirements import need, optimizer_steps, training_loader
from ddp_doctor.findings import Finding, cannot_tell, fault
from ddp_doctor.records.run import RankRecord
from ddp_doctor.source.file import Likely, SourceFile

TITLE = "The graph of each step is kept"
CAUSE = """\
`total += loss` keeps the graph of every step, with all activations, until the sum is deleted. The process is killed
hours later or at a larger batch, and short tests pass.
"""
WRONG = """\
total += loss    # keeps the graph of each step
"""
FIX = """\
Detach what outlives the step:
    total += loss.detach()    # or loss.item()
"""
THREADS = ("ray-project/ray#40940", "IBM/mi-prometheus#111")
# As many steps show whether the growth continues.
_LONGER = 3


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a sum over steps of the very tensor that `backward()` is called on."""
    backwards = file.called("backward")
    if not backwards:
        return
    for node in (node for node in file.nodes if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)):
        value = node.value
        while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            value = value.left
        loops = file.loops(node)
        own = [one for one in backwards if loops and file.loops(one)[:1] == loops[:1]]
        of_value = [one for one in own if isinstance(value, ast.Name) and _is_in(value.id, one)]
        if not of_value or _is_in(ast.unparse(node.target), *own) or file.without_gradients(node):
            continue
        lines = sorted((node.lineno, of_value[0].lineno))
        changed = any(lines[0] < one.lineno <= lines[1] for one, _ in file.assigned(value))
        resets = any(file.contains(loops[0], one) and one is not node for one, _ in file.assigned(node.target))
        if not changed and not resets and not file.called("detach_", within=loops[0]):
            yield Likely(node, f"`{ast.unparse(node)}` keeps the graph of each step.")


def _is_in(name: str, *calls: ast.Call) -> bool:
    return any(ast.unparse(one) == name for call in calls for one in ast.walk(call) if isinstance(one, ast.expr))


def check(evidence: Evidence) -> list[Finding]:
    """Finds graphs of earlier steps that live tensors keep, in growing number."""
    for record in (record for record in evidence.trained if _grows(_nodes(record))):
        longer = evidence.run("graphs of longer epochs", steps=_LONGER * evidence.spec.steps)
        if not longer.worked:
            return [cannot_tell(f"The graphs grow, but the run of longer epochs failed: {longer.short_reason}")]
        counts = _nodes(longer.ranks[record.rank])
        if _grows(counts):
            nodes = ", ".join(map(str, counts[0][:6]))
            message = f"Rank {record.rank} keeps the graphs of earlier steps, which begin with {nodes} ... graph nodes."
            place = next((event["place"] for event in record.training_epochs if event["place"]), "")
            return [fault(message, 1, place=place or loss_place(evidence))]
    return []


def _nodes(record: RankRecord) -> list[list[int]]:
    """Returns the number of graph nodes at the first batch of each step, by training epoch."""
    trained = set(map(epoch_of, record.training_epochs))
    steps: dict[tuple[int, int], dict[int, int]] = {}
    for event in record.of_kind("batch"):
        if epoch_of(event) in trained and "graph_nodes" in event:
            steps.setdefault(epoch_of(event), {}).setdefault(event["step"], event["graph_nodes"])
    longest = max(map(len, steps.values()), default=0)
    # Epochs after the examined ones have one step.
    return [list(counts.values()) for counts in steps.values() if len(counts) == longest > 2]


def _grows(epochs: Sequence[Sequence[int]]) -> bool:
    return bool(epochs) and all(before < after for nodes in epochs for before, after in pairwise(nodes[1:]))


_REASON = cannot_tell("Fewer than three steps of an epoch were seen at their start.")
NEEDS = (need(lambda evidence: any(map(_nodes, evidence.trained)), _REASON, optimizer_steps, training_loader),)
