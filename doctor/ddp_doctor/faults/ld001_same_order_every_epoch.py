"""LD001: every epoch has the same order."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, samples_of
from ddp_doctor.evidence.requirements import need, training_loader
from ddp_doctor.findings import Finding, cannot_tell, fault, not_reached
from ddp_doctor.records.run import RankRecord
from ddp_doctor.source.file import Likely, SourceFile, keyword

TITLE = "Every epoch has the same order"
CAUSE = """\
A `DistributedSampler` shuffles with its seed plus its epoch number, which stays 0 without `set_epoch`. The loss falls
anyway, and one epoch alone looks well shuffled.
"""
WRONG = """\
for epoch in range(epochs):
    for batch in loader:    # the same order in each epoch
"""
FIX = """\
Call `set_epoch` at the start of every epoch, before iterating over the loader:
    loader.sampler.set_epoch(epoch)
"""
THREADS = ("pytorch/pytorch#31771", "kan-bayashi/ParallelWaveGAN#177", "huggingface/transformers#4398")
_FEWEST = 4
_EVALUATION = re.compile(r"val|test|eval|dev|infer|predict", re.IGNORECASE)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a shuffling DistributedSampler in a program that trains for epochs and never calls `set_epoch`."""
    if "DistributedSampler" not in file.text or not file.program.distributed or file.program.mentions("set_epoch"):
        return
    loops = (one for near in file.program.files for one in near.nodes if isinstance(one, ast.For))
    epochs = any("epoch" in ast.unparse(one.target) + ast.unparse(one.iter) for one in loops)
    trains = file.program.mentions("backward(")
    for call in file.called("DistributedSampler") if epochs and trains else ():
        shuffle = keyword(call, "shuffle") or (call.args[3] if len(call.args) > 3 else None)
        statement = next(one for one in file.above(call) if isinstance(one, ast.stmt))
        if not file.name(call.func).startswith("torch.utils.data") or _EVALUATION.search(ast.unparse(statement)):
            continue
        if shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True):
            yield Likely(call, "nothing in the program calls `set_epoch` of the sampler, so all epochs have one order.")


def check(evidence: Evidence) -> list[Finding]:
    """Compares the order of two epochs; `set_epoch` must change it."""
    for rank in evidence.ranks:
        event = _same_order(rank)
        if event is None:
            continue
        owner = event["set_epoch"][0]
        run = evidence.run("set_epoch", interventions={"set_epoch": True})
        if not run.worked:
            return [cannot_tell(f"Two epochs have one order, but the run with set_epoch failed: {run.short_reason}")]
        if _same_order(run.ranks[rank.rank]) is not None:
            return []
        called = bool(rank.of_kind("set_epoch"))
        what = f"set_epoch of the {owner} gets the same number" if called else f"nothing calls set_epoch of the {owner}"
        message = f"Epoch {event['epoch']} of rank {rank.rank} has the order of the epoch before: {what}."
        proof = f"with {owner}.set_epoch(epoch) before each epoch, the orders differ"
        if called and not evidence.spec.whole_epochs:
            # The code calls set_epoch, perhaps where its own epochs end, and these were shortened.
            whole = evidence.run("whole epochs", whole_epochs=True)
            if not whole.worked:
                return [cannot_tell(f"Two epochs have one order, but whole epochs failed: {whole.short_reason}")]
            if _same_order(whole.ranks[rank.rank]) is None:
                return []
        return [fault(message, event["step"], place=event["place"], proof=proof)]
    return []


def _same_order(rank: RankRecord) -> Event | None:
    """Returns the later of two successive epochs of the same data, if they have the same order."""
    for first, second in pairwise(rank.training_epochs):
        same_data = all(first[key] == second[key] for key in ("base", "sampler", "dataset", "iterable"))
        if not same_data or not second["set_epoch"]:
            continue
        if second["iterable"]:
            orders = [samples_of(rank, event) for event in (first, second)]
        else:
            orders = [event["indices"] if event["drained"] else [] for event in (first, second)]
        ascending = not second["iterable"] and orders[0] == sorted(orders[0])
        if orders[0] == orders[1] and len(set(orders[0])) >= _FEWEST and not ascending:
            return second
    return None


def _has_second_epoch(evidence: Evidence) -> bool:
    pairs = [pair for rank in evidence.ranks for pair in pairwise(rank.training_epochs)]
    return any(first["base"] == second["base"] and second["set_epoch"] for first, second in pairs)


_REASON = not_reached("No sampler and no data set with set_epoch is trained on for a second epoch.")
NEEDS = (need(_has_second_epoch, _REASON, training_loader),)
