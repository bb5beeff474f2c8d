"""LD026: a checkpoint loads nothing."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, fault, listed, not_reached

TITLE = "A checkpoint loads nothing"
CAUSE = """\
The state of a DDP wrapper has the prefix `module.` in its keys: loaded into the bare module with `strict=False`, no key
matches. The module silently keeps its random weights.
"""
WRONG = """\
torch.save(ddp.state_dict(), path)    # all names begin with 'module.'
model.load_state_dict(torch.load(path), strict=False)    # none of them is found
"""
FIX = """\
Save the bare module, and load strictly:
    torch.save(ddp.module.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
"""
THREADS = ("pytorch/examples#1029", "NVIDIA/apex#647")


def check(evidence: Evidence) -> list[Finding]:
    """Finds `load_state_dict(strict=False)` whose keys match no key of the module."""
    if not any(record.of_kind("load_state_dict") for record in evidence.ranks):
        return [not_reached("No state is loaded.")]
    for record in evidence.ranks:
        events = record.of_kind("load_state_dict")
        # Another attempt may load it.
        loaded = {event["module"] for event in events if event["matched"]}
        tried = [event for event in events if event["missing"] and event["unexpected"] and not event["strict"]]
        for event in (event for event in tried if event["module"] not in loaded):
            message = (
                f"load_state_dict(strict=False) of {event['module']} matches no key: the module wants "
                f"{listed(event['missing'])}, but the state has {listed(event['unexpected'])}."
            )
            return [fault(message, event["step"], event["missing"][0], place=event["place"])]
    return []
