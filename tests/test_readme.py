"""Runs every command of the README and of docs/ as written, in the order of the text."""

import os
import re
import shlex
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from running import REPOSITORY, require, run
from system.browser import tensorboard
from system.forks import fit_on_ranks

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SHORT_RUNS = {
    "launch/fit.py": ("--epochs=1", "--trainer.limit_train_batches=5", "--trainer.limit_val_batches=2"),
    "launch/evaluate.py": ("--trainer.limit_val_batches=2", "--trainer.limit_test_batches=2"),
    "launch/predict.py": ("--trainer.limit_predict_batches=2",),
    "benchmarks/features.py": ("--pairs=1", "--steps=5"),
}
"""Arguments that shorten the runs: each command has to work, and not to learn well."""

pytest_plugins = ["system.conftest"]


def sections() -> list[Any]:
    """Returns a test case for each section with commands; sections do not depend on each other."""
    cases = []
    for page in PAGES:
        for text in re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE):
            if commands(text):
                marks = [pytest.mark.xdist_group("slurm")] if "\nsrun" in text else []
                title = f"{page.name}: {text.splitlines()[0].strip('# ')}"
                cases.append(pytest.param(page, text, id=title, marks=marks))
    return cases


def blocks(text: str, language: str) -> list[str]:
    """Returns the code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Returns the commands of a text, without comments."""
    lines = [line.partition(" #")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.timeout(900)  # a section starts up to a dozen runs one after another
@pytest.mark.parametrize(("page", "section"), sections())
def test_every_documented_command_runs(page, section, tmp_path, request):
    for folder in ("launch", "benchmarks"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    for language in ("python", "yaml"):
        for block in blocks(page.read_text(), language):
            name, _, content = block.partition("\n")
            (tmp_path / name.removeprefix("# ")).write_text(content)
    for name, content in re.findall(r"^`(\S+)`:\n\n```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content)
    if "FashionMNIST" in section:
        require("fashion-mnist")
    for command in commands(section):
        tokens = shlex.split(command)
        variables = [*takewhile(lambda token: re.match(r"[A-Z_]+=", token), tokens)]
        environment, tokens = dict(text.split("=", 1) for text in variables), tokens[len(variables) :]
        if tokens[0] == "make":
            # A dry run, because a real run would start these tests or an installation.
            printed = run("make", "--dry-run", "--always-make", tokens[1], folder=REPOSITORY).out
            assert {"fit": "launch/fit.py", "test": "-m pytest"}[tokens[1]] in printed
        elif tokens[0] == "tensorboard":
            runs = {f"{path.parent.name}/tensorboard" for path in (tmp_path / "runs").glob("*/tensorboard")}
            with tensorboard(*tokens[1:], runs=runs, folder=tmp_path):
                assert runs
        else:
            if tokens[0] == "srun":
                environment = request.getfixturevalue("slurm")
                tokens = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=4", *tokens]
            if tokens[0] == "mpirun":
                require("openmpi")
                environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            script = next((token for token in tokens if token in SHORT_RUNS), None)
            limits = SHORT_RUNS[script] if script and "help" not in command else ()
            if tokens[0] == "python" and tokens[1] == script and "launch/" in script and not environment:
                # A fork runs the script as tests/launch does, but imports nothing again.
                fit_on_ranks(*tokens[2:], *limits, folder=tmp_path, script=Path(script).stem)
            else:
                code = 1 if "--check" in tokens else 0  # the documented script has findings
                run(*tokens, *limits, folder=tmp_path, environment=environment, seconds=200, code=code)


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", REPOSITORY / "docs/trainer.md"], ids=lambda page: page.name)
def test_documented_scripts_resume(page, tmp_path):
    for block in blocks(page.read_text(), "python"):
        name, _, content = block.partition("\n")
        (tmp_path / name.removeprefix("# ")).write_text(content)
    script = tmp_path / "train.py"
    run("python", "train.py", folder=tmp_path)
    script.write_text(re.sub(r"max_epochs=(\d+)", lambda match: f"max_epochs={int(match[1]) + 1}", script.read_text()))
    assert "resuming from step-" in run("python", "train.py", folder=tmp_path).out


def test_relative_links_point_to_existing_files_and_headings():
    for page in [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            file = page.parent / (target or page.name)
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
            anchors = ["", *(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)]
            assert file.exists() and anchor in anchors, f"{page.name}: {target}#{anchor}"


def test_every_documented_make_target_exists():
    text = "".join(page.read_text() for page in [*PAGES, REPOSITORY / "CONTRIBUTING.md"])
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= set(targets)
    assert os.access(REPOSITORY / ".ci/run", os.X_OK)
