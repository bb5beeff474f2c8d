"""LD019: the optimizer lacks parameters."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import two_steps
from ddp_doctor.findings import Finding, fault, listed, note

TITLE = "The optimizer lacks parameters"
CAUSE = """\
The optimizer holds the parameters that it was given: those of a model that was wrapped, extended or unfrozen later are
in no group and keep their initial values. The other parameters still reduce the loss.
"""
WRONG = """\
optimizer = AdamW(model.parameters())
model.encoder = load_encoder()    # its parameters are in no optimizer
"""
FIX = """\
Create the optimizer last, from the final model:
    model = prepare(model)
    optimizer = AdamW(p for p in model.parameters() if p.requires_grad)
"""
THREADS = ("huggingface/accelerate#2665", "huggingface/accelerate#3256")
NEEDS = (two_steps,)


def check(evidence: Evidence) -> list[Finding]:
    """Compares the parameters that get gradients with those of the optimizers."""
    record = next(rank for rank in evidence.trained if len(rank.of_kind("step")) > 1)
    steps = record.of_kind("step")
    # Those that belong to no optimizer at the end, and that nothing else changes.
    first = {name: value for event in reversed(steps) for name, value in event["unowned"].items()}
    forgotten = [name for name, value in steps[-1]["unowned"].items() if value == first[name]]
    created = [event["place"] for event in record.of_kind("optimizer") if event["place"]]
    place = created[0] if created else steps[0]["place"]
    lost = f"{listed(forgotten)} get gradients, but belong to no optimizer and do not change."
    if all(len(event["frozen"]) == len(event["names"]) for event in steps):
        message = f"All {len(steps[0]['names'])} parameters of the optimizer ({steps[0]['name']}) are frozen."
        return [fault(message, 0, next(iter(forgotten), ""), "no weight changes", place)]
    if not forgotten:
        return []
    # Parts with weights that were loaded may be fixed on purpose.
    if set(forgotten) <= {name for event in steps for name in event["loaded"]}:
        message = f"{lost} Freeze them with requires_grad_(False), if this is intended."
        return [note(message, 0, forgotten[0], place=place)]
    return [fault(lost, 0, forgotten[0], f"{len(forgotten)} parameters", place)]
