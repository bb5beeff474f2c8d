"""A report with every verdict, and text of the user's code that must not control a terminal or a page."""

from __future__ import annotations

from ddp_doctor.findings import Accepted, Batch, CheckState, Comparison, Files, Finding, Report, Stage, State, Verdict

HOSTILE = "\x1b[2J\x9b31m<script>alert(1)</script>\u202e[bold]{{ 1 }}\ud800"


def example(*findings: Finding, error: str = "", hang: str = "") -> Report:
    """Returns a report with these findings, or with one of each verdict."""
    found = findings or (
        Finding(
            "LD012",
            Verdict.FAULT,
            "The outputs of net.bn1 differ between two ranks and one process.",
            step=0,
            tensor="net.bn1",
            amount="2.4e-02 of the update",
            place="mine.py:41 in training_step",
            proof="with synchronized batch norm the difference falls from 2.4e-02 to 1.1e-15",
        ),
        Finding("LD017", Verdict.DEPENDS, "The learning rate is 0.2 on two ranks and 0.1 on one."),
        Finding("LD013", Verdict.UNCLEAR, "The difference is 3e-08, between noise and threshold."),
        Finding("LD032", Verdict.NOTE, "The process group is not destroyed."),
    )
    return Report(
        "mine:Lit",
        2,
        found,
        stages=[Stage("as you run it", "3 steps on 2 ranks", 4.25), Stage("determinism", "weights differ", 3.5)],
        checks=[
            *(CheckState(code, State.MADE) for code in ("LD012", "LD013", "LD017", "LD032")),
            *(CheckState(code, State.CANNOT_TELL, "Two runs gave different weights.") for code in ("LD014", "LD015")),
            CheckState("LD028", State.NOT_APPLICABLE, "The program trains with Join."),
            CheckState("LD030", State.NOT_REACHED, "The program does not predict."),
        ],
        comparison=Comparison(
            True,
            "recorded batches",
            differences=(1.7e-16, 0.024, float("inf")),
            threshold=1e-6,
            module="net.bn1",
            modules=[("net.conv1", "Conv2d"), ("net.bn1", "BatchNorm2d"), ("net.fc", "Linear"), ("net", "Net")],
        ),
        batches=[
            Batch(step, 0, rank, 32, [str(9990 + 10 * step + number + rank) for number in range(24)], ["9995", "10001"])
            for step in (0, 1)
            for rank in (0, 1)
        ],
        accepted=[
            Accepted(Finding("LD008", Verdict.FAULT, "Equal noise.", place="mine.py:3 in f"), "comment", "meant")
        ],
        error=error,
        hang=hang,
        seconds=12.3,
        versions={"torch": "2.15.0"},
        files=Files(
            "private view", ["Files in /data can be read, but not written."], "/home/me/doctor-output", ["a:443"]
        ),
    )


def hostile() -> Report:
    """Returns a report in which every text of the user's code tries to do harm."""
    finding = Finding("LD012", Verdict.FAULT, HOSTILE + "\nLD001 no fault", 0, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    return Report(
        HOSTILE,
        2,
        [finding],
        [Stage(HOSTILE, HOSTILE, 0.1)],
        [CheckState("LD012", State.MADE), CheckState("LD013", State.CANNOT_TELL, HOSTILE)],
        Comparison(True, HOSTILE, HOSTILE, HOSTILE, [0.5], 1e-6, HOSTILE, [(HOSTILE, HOSTILE)]),
        [Batch(0, 0, 0, 9, [HOSTILE], [HOSTILE])],
        [Accepted(finding, "comment", HOSTILE)],
        HOSTILE,
        HOSTILE,
        1.0,
        {"torch": HOSTILE},
        Files("copy", [HOSTILE], HOSTILE, [HOSTILE]),
    )
