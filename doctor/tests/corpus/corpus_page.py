"""Writes the results of the corpus into docs/corpus.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from public_programs import Program

PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"
BEGIN, END = "<!-- corpus -->\n", "<!-- end of corpus -->\n"
Rows = Sequence[tuple[Program, dict[str, Any]]]


def write_table(rows: Rows) -> None:
    """Writes the table between the marks of the page, if there are results."""
    if not rows or not PAGE.exists():
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("".join([before, BEGIN, "\n".join(_lines(rows)), "\n", END, after]))


def _lines(rows: Rows) -> list[str]:
    # A fault that ends the run is a verdict.
    ended = [result for _, result in rows if (result["exit"] in {0, 1} and not result["error"]) or result["faults"]]
    compared = [result for result in ended if result["compared"]]
    false = [program.name for program, result in rows if set(result["faults"]) - set(program.faults)]
    seconds = [result["seconds"] for result in ended]
    lines = ["", f"Programs: {len(rows)}. Examined to the end: {len(ended)}."]
    lines += [f"Compared with one process: {len(compared)}.", f"Programs with a false fault: {len(false)}."]
    if seconds:
        lines.append(f"Seconds per program: median {statistics.median(seconds):.0f}, most {max(seconds):.0f}.")
    lines += ["", "| program | command | needed | verdict | compared with one process | s | MiB | doctor |"]
    lines += ["|---|---|---|---|---|---:|---:|---|", *(_row(program, result) for program, result in rows)]
    judged = [_judgement(program, result) for program, result in rows]
    return [*lines, "", *(line for part in judged for line in part)]


def _row(program: Program, result: dict[str, Any]) -> str:
    address = f"https://github.com/{program.repository}/tree/{program.commit}/{program.folder}".rstrip("/")
    is_compared = result["compared"] and not result["error"]
    compared = result["method"] or "yes" if is_compared else f"no: {_why(program, result)}"
    cells = [f"[{program.name}]({address}) `{program.commit[:7]}`", f"`{program.command}`", program.needs or "nothing"]
    cells += [_verdict(program, result), compared, f"{result['seconds']:.0f}", str(result["mib"])]
    cells.append(f"`{result['doctor']}`" if result.get("doctor") else "")
    return f"| {' | '.join(cell.replace('|', ',') for cell in cells)} |"


def _verdict(program: Program, result: dict[str, Any]) -> str:
    if result["error"]:
        return "not examined"
    if result["hang"] and not result["faults"]:
        return "hung"
    words = [f"{code} {'fault' if code in program.faults else '**false fault**'}" for code in result["faults"]]
    words += [other for other in result["others"] if other.endswith(("devices", "unclear", "note"))]
    return ", ".join(words) or "no fault"


def _why(program: Program, result: dict[str, Any]) -> str:
    last = result["error"].strip().rpartition("\n")[2]
    return last or program.not_compared or result["why_not_compared"]


def _judgement(program: Program, result: dict[str, Any]) -> list[str]:
    codes = [code for code in result["faults"] if code in program.judgement]
    return [f"- **{program.name}, {code}**: {program.judgement[code]}" for code in codes]
