"""A report with every verdict, and text of the user's code that must not control a terminal or a page."""

from __future__ import annotations

from ddp_doctor.findings import Files, Finding, Report, Stage, Verdict

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
        Finding("LD014", Verdict.CANNOT_TELL, "Two runs gave different weights."),
        Finding("LD015", Verdict.CANNOT_TELL, "Two runs gave different weights."),
        Finding("LD030", Verdict.NOT_REACHED, "The code does not predict."),
    )
    return Report(
        "mine:Lit",
        2,
        found,
        stages=[Stage("as you run it", "3 steps on 2 ranks", 4.25), Stage("determinism", "weights differ", 3.5)],
        checks=["LD012", "LD013", "LD014"],
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
    told = Finding("LD013", Verdict.CANNOT_TELL, HOSTILE)
    return Report(
        HOSTILE,
        2,
        [finding, told],
        [Stage(HOSTILE, HOSTILE, 0.1)],
        ["LD012"],
        HOSTILE,
        HOSTILE,
        1.0,
        {"torch": HOSTILE},
        Files("redirected writes", [HOSTILE], HOSTILE, [HOSTILE]),
    )
