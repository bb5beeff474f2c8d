"""LD029: parameters are not used by the loss."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import wrapped
from ddp_doctor.findings import Finding, fault, listed
from ddp_doctor.records.run import RankRecord

TITLE = "Parameters are not used by the loss"
CAUSE = """\
DDP waits for the gradient of every parameter: one that does not influence the loss ends the next step with an error
without its name. With `find_unused_parameters=True`, what was forgotten by mistake never trains.
"""
WRONG = """\
class Net(nn.Module):
    def forward(self, x):
        return self.head(self.body(x))    # self.auxiliary_head is not used
"""
FIX = """\
Remove or freeze the parameters before wrapping, or set `find_unused_parameters=True` if only some steps use them:
    model.auxiliary_head.requires_grad_(False)
"""
THREADS = ("Lightning-AI/pytorch-lightning#17212", "Lightning-AI/pytorch-lightning#21794")
NEEDS = (wrapped,)
_WORDS = ("find_unused_parameters", "parameters that were not used in producing")


def check(evidence: Evidence) -> list[Finding]:
    """Names the parameters about which DistributedDataParallel complains."""
    found = [rank for rank in evidence.ranks if rank.error and any(words in rank.error["message"] for words in _WORDS)]
    if not found:
        return []
    failed, step = found[0], max(len(found[0].of_kind("step")) - 1, 0)
    run = evidence.run("unused parameters found", interventions={"find_unused": True})
    unused = [_without_gradient(record) for record in run.ranks] if run.worked else []
    names = sorted(set().union(*unused))
    places = [event["place"] for kind in ("forward", "log", "ddp") for event in failed.of_kind(kind) if event["place"]]
    message = f"The loss of step {step} does not use {listed(names) or 'all parameters'}, and DDP waits for them."
    if any(part != unused[0] for part in unused):
        message += " Not all ranks use the same parameters."
    proof = "With find_unused_parameters=True, the ranks train." if names else ""
    return [fault(message, step, next(iter(names), ""), place=next(iter(places), ""), proof=proof)]


def _without_gradient(record: RankRecord) -> set[str]:
    """Returns the parameters that get no gradient on this rank in the first step."""
    return {
        name
        for event in record.of_kind("step")[:1]
        for key, name in event["names"].items()
        if name not in event["frozen"] and f"local/{event['step']}/{key}" not in record.tensors
    }
