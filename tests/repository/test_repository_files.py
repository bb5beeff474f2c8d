"""The files that GitHub, pre-commit, editors and readers use name commands, files and versions that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from lit_mnist import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def recipe(*targets: str) -> list[str]:
    """Returns the commands that make would run for targets, without running them."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *targets],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A target without a recipe, as of .PHONY or of a folder, has "nothing to be done".
    return [line for line in done.stdout.splitlines() if not line.startswith("make: ")]


def check_make(command: str) -> None:
    """Asserts that a command is make with targets of the Makefile."""
    name, *words = shlex.split(command, comments=True)
    assert name == "make"
    assert recipe(*words)


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# --- GitHub


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_the_makefile_within_a_time_limit(path: Path) -> None:
    for job in yaml_of(path)["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert job["env"]["PYTHON"].startswith("python")
        for step in job["steps"]:
            if "run" in step:
                check_make(step["run"])
            for file in step.get("with", {}).get("cache-dependency-path", "").split():
                assert (ROOT / file).is_file()


def test_the_workflow_tests_supported_versions_of_python() -> None:
    job = yaml_of(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]
    versions = job["strategy"]["matrix"]["python"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert oldest in versions
    assert {f"Programming Language :: Python :: {version}" for version in versions} <= set(PROJECT["classifiers"])
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make lint", "make test"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_can_be_shown(path: Path) -> None:
    """GitHub shows no form at all if one of these is wrong."""
    form = yaml_of(path)
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    for part in form["body"]:
        assert part["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert part["attributes"]["label"]
        assert set(part.get("validations", {})) <= {"required"}
        assert ("options" in part["attributes"]) == (part["type"] in {"dropdown", "checkboxes"})
    assert any(part.get("validations", {}).get("required") for part in form["body"])


# --- tools


def test_the_hooks_of_pre_commit_are_the_commands_of_make_lint() -> None:
    (repository,) = yaml_of(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    tools = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    linted = [line for line in recipe("lint") if re.match(r"\S*/(ruff|mypy|lint-imports|codespell)\b", line)]
    # pre-commit names the files itself.
    assert tools == [re.sub(r" --check\b| \.$|(?<=codespell) .*", "", line.removesuffix(" .")) for line in linted]


def test_the_development_container_has_a_supported_python_and_builds_its_environment() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    version = re.fullmatch(r"python:(\d+\.\d+)-\w+", settings["image"])
    assert version
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["classifiers"]
    check_make(settings["postCreateCommand"].partition("&&")[2])
    environment = settings["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert any(environment.partition("/")[2].removesuffix("python") in line for line in recipe("lint"))


# --- documents


def test_the_commands_of_the_guide_for_contributors_exist() -> None:
    text = CONTRIBUTING.read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            check_make(line)
        else:
            assert words[0].startswith((".venv/bin/", ".ci/"))
            paths = [word for word in words if word.startswith(("tests/", ".ci/"))]
            assert paths
            assert all((ROOT / path).exists() for path in paths)
    for command in re.findall(r"`(make [^`]+)`", text):
        check_make(command)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md", "README.md", ".github/pull_request_template.md"])
def test_the_links_and_files_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:docs|tests|lit_mnist|benchmarks|configs|\.devcontainer)/[\w./]*)`", text)
    missing = [path for path in [*links, *named] if path and not (ROOT / path).exists()]
    assert not missing


def test_the_import_direction_of_the_guide_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    order = [set(re.findall(r"lit_mnist\.(\w+)", layer)) for layer in reversed(layers)]
    text = re.search(r"From the\s+bottom: (.*?)\. `make lint`", CONTRIBUTING.read_text(), re.DOTALL)
    assert text
    told = re.findall(r"`(\w+)`", text[1])
    place = {name: number for number, names in enumerate(order) for name in names}
    assert set(told) == set(place)
    assert [place[name] for name in told] == sorted(place[name] for name in told)


def test_the_changelog_and_the_citation_have_the_version_of_the_package() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml_of(ROOT / "CITATION.cff")
    assert __version__ == citation["version"] == next(version for version in versions if version != "Unreleased")


def test_the_citation_has_what_its_format_requires() -> None:
    citation = yaml_of(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert all(citation["authors"])
    # The choice of a license is up to the owner.
    assert not set(citation) & {"license", "license-url"}
    assert not list(ROOT.glob("LICENSE*"))
