"""A report with every verdict, and one with text of the user's code that must not control a terminal or a page."""

from ddp_doctor.findings import Accepted, CheckState, Comparison, Files, Finding, Report, Stage, Verdict

HOSTILE = "\x1b[2J\x9b31m<script>alert(1)</script>\u202e[bold]{{ 1 }}\ud800"
FAULT = Finding(
    "LD012",
    Verdict.FAULT,
    "The outputs of net.bn1 differ.",
    step=0,
    tensor="net.bn1",
    amount="2.4e-02 of the update",
    place="mine.py:41 in training_step",
    proof="with synchronized batch norm the difference falls to 1.1e-15",
)


def example(*findings: Finding, error: str = "", hang: str = "") -> Report:
    """Returns a report with these findings, or with one of each verdict."""
    others = (
        Finding("LD017", Verdict.DEPENDS, "The learning rate is 0.2 on two ranks and 0.1 on one."),
        Finding("LD013", Verdict.UNCLEAR, "The difference is 3e-08."),
        Finding("LD032", Verdict.NOTE, "The process group is not destroyed."),
    )
    return Report(
        "mine:Lit",
        2,
        findings or (FAULT, *others),
        [Stage("one process", "6 steps", 4.25)],
        [
            *(CheckState(code) for code in ("LD012", "LD013", "LD017", "LD032")),
            *(CheckState(code, Verdict.CANNOT_TELL, "The loss is not finite.") for code in ("LD014", "LD015")),
            CheckState("LD028", Verdict.NOT_APPLICABLE, "The program trains with Join."),
            CheckState("LD030", Verdict.NOT_REACHED, "The program does not predict."),
        ],
        Comparison(True, "batches", differences=(1e-16, 0.024, float("inf")), threshold=1e-6, module="net.bn1"),
        [Accepted(Finding("LD008", Verdict.FAULT, "Equal noise.", place="mine.py:3 in f"), "comment", "meant")],
        error,
        hang,
        12.3,
        {"torch": "2.15.0"},
        Files("private view", ["Files in /data can be read, but not written."], ["a:443"]),
        emulated_gpus=2,
    )


def hostile() -> Report:
    """Returns a report in which every text of the user's code tries to do harm."""
    finding = Finding("LD012", Verdict.FAULT, HOSTILE + "\n✗ LD001 no fault", 0, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    return Report(
        HOSTILE,
        2,
        [finding],
        [Stage(HOSTILE, HOSTILE, 0.1)],
        [CheckState("LD012"), CheckState("LD013", Verdict.CANNOT_TELL, HOSTILE)],
        Comparison(True, HOSTILE, HOSTILE, [0.5], 1e-6, HOSTILE),
        [Accepted(finding, "comment", HOSTILE)],
        HOSTILE,
        HOSTILE,
        1.0,
        {"torch": HOSTILE},
        Files("copy", [HOSTILE], [HOSTILE]),
    )
