"""Examines distributed training for silent faults.

from ddp_doctor import examine

report = examine(MyLit, MyData, devices=2)
assert not report.faults
"""

from typing import TYPE_CHECKING, Any

from ddp_doctor.findings import Finding, Report, Verdict

if TYPE_CHECKING:
    from ddp_doctor.examination import examine

__all__ = ["Finding", "Report", "Verdict", "examine"]


def __getattr__(name: str) -> Any:
    if name == "examine":
        # Importing the package imports no torch.
        from ddp_doctor.examination import examine

        return examine
    raise AttributeError(f"module {__name__} has no attribute {name}")
