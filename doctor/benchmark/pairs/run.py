"""Tries the doctor on bugs that projects had, before and after their fix, and writes the table of pairs.md."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PAGE = HERE.parent / "pairs.md"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->\n"
# Seconds for the code of one commit.
LIMIT = 300


def main() -> int:
    """Runs the command, and returns 1 if the doctor misjudged a pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the repositories, as OWNER+NAME or OWNER/NAME")
    parser.add_argument("names", nargs="*", help="pairs; those that are not held, if there is none")
    request = parser.parse_args()
    content = yaml.safe_load((HERE / "pairs.yaml").read_text())
    wrong = 0
    for pair in content["pairs"]:
        if pair["name"] in request.names or not (request.names or pair["held"]):
            result = examine(pair, request.folder)
            print(pair["name"], pair["expected"], json.dumps(result, indent=1), flush=True)
            wrong += not all(judge(pair, result))
            write(content, rows_of_page() | {pair["name"]: row(pair, result)})
    return int(wrong > 0)


def examine(pair: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns what the doctor says of both commits of a pair, and the seconds that it took for both."""
    begun = time.monotonic()
    found = {}
    for commit in ("parent", "fix"):
        with tempfile.TemporaryDirectory() as root:
            lay_out(git_directory(folder, pair["repository"]), pair[commit], pair["files"], root)
            if pair["how"] == "read":
                arguments = ["-m", "ddp_doctor", "--read", *pair["files"], "--format", "json"]
            else:
                arguments = [os.fspath(HERE / "run.py"), "--recipe", pair["name"]]
            found[commit] = in_process(arguments, root)
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def git_directory(folder: Path, repository: str) -> Path:
    """Returns the git directory of a repository: a clone, a bare one, or either in a folder of the name."""
    for base in (folder / repository, folder / repository.replace("/", "+")):
        for path in (base, base / ".git", base / "repo", base / "repo" / ".git"):
            if (path / "objects").is_dir():
                return path
    raise SystemExit(f"There is no git directory of {repository} in {folder}.")


def lay_out(git: Path, commit: str, files: list[str], root: str) -> None:
    """Writes files of a commit into a folder."""
    archive = subprocess.run(["git", "--git-dir", git, "archive", commit, *files], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", root], check=True, input=archive.stdout)


def in_process(arguments: list[str], root: str) -> dict[str, str]:
    """Returns the codes that a command of Python reports, each with its first sentence, or `error` with a text."""
    try:
        command = [sys.executable, *arguments]
        run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT, check=False)
        report = json.loads(run.stdout.splitlines()[-1] if arguments[0] != "-m" else run.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LIMIT} seconds"}
    except (ValueError, IndexError):
        return {"error": run.stderr.strip()[-600:]}
    if "findings" in report:
        # Later findings of a code say the same of another line; a fault comes first.
        return {one["code"]: f"{one['verdict']}: {one['message']}" for one in reversed(report["findings"])}
    return report


def recipe(name: str) -> None:
    """Calls the fixture on what a recipe makes from the files in this folder, and prints the codes as JSON."""
    # The command itself starts faster without torch.
    import recipes

    from ddp_doctor.testing import assert_same_on_ranks

    sys.path.insert(0, ".")
    try:
        assert_same_on_ranks(**getattr(recipes, name.replace("-", "_"))())
        found = {}
    except AssertionError as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.startswith("LD")]
        found = {line[:5]: f"fault: {line[6:]}" for line in lines} or {"error": f"AssertionError: {failure}"}
    print(json.dumps(found))


def judge(pair: dict[str, Any], result: dict[str, Any]) -> tuple[bool, bool]:
    """Says whether an expected code is a fault in the parent, and whether the fix is silent: none of these codes."""
    parent, fix, codes = result["parent"], result["fix"], pair["expected"].split(" or ")
    # What else reading finds in a file is another matter; a call has one subject.
    heard = set(fix) if pair["how"] == "call" else set(fix) & {*codes, "error"}
    return any(parent.get(code, "").startswith("fault") for code in codes), not heard


def rows_of_page() -> dict[str, str]:
    """Returns the row of each pair that the page lists, by its name."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    return {line.split()[1]: line for line in lines if line.startswith("| ") and line[-3].isdigit()}


def row(pair: dict[str, Any], result: dict[str, Any]) -> str:
    """Returns the row of a pair."""
    cells = [pair["name"] + " (held)" * pair["held"], *map(pair.get, ("thread", "family", "how", "expected"))]
    for well, said in zip(judge(pair, result), (result["parent"], result["fix"]), strict=True):
        others = [code if code == "error" else f"{code} {text.partition(':')[0]}" for code, text in said.items()]
        cells.append("yes" if well else ", ".join(["**no**", *others]))
    return f"| {' | '.join(cells)} | {result['seconds']} | {time.strftime('%Y-%m-%d')} |"


def write(content: dict[str, Any], rows: dict[str, str]) -> None:
    """Writes these rows into the page."""
    heads = ["pair", "thread", "family", "tried", "expected", "found in the parent", "silent in the fix", "seconds"]
    pairs = [pair for pair in content["pairs"] if pair["name"] in rows]
    right = [pair for pair in pairs if rows[pair["name"]].count(" | yes") == 2]
    held, projects = [pair for pair in pairs if pair["held"]], {pair["repository"] for pair in pairs}
    lines = [f"| {' | '.join([*heads, 'seen'])} |", "|" + " --- |" * 9, *(rows[pair["name"]] for pair in pairs)]
    lines += [
        f"\nRight: {len(right)} of {len(pairs)} pairs of {len(projects)} repositories; of the held ones, at first "
        f"sight, {sum(pair['held'] for pair in right)} of {len(held)}. With torch {version('torch')}.\n"
    ]
    reasons: dict[str, list[str]] = {}
    for one in content["cannot_run_here"]:
        reasons.setdefault(one["reason"], []).append(one["thread"])
    lines += ["Cannot run here:\n", *(f"- {reason}: {', '.join(threads)}" for reason, threads in reasons.items())]
    text = PAGE.read_text()
    PAGE.write_text(text.partition(BEGIN)[0] + BEGIN + "\n".join(lines) + "\n" + END + text.partition(END)[2])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--recipe"]:
        recipe(sys.argv[2])
    else:
        sys.exit(main())
