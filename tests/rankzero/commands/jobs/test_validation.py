import pytest

from rankzero.commands.jobs.request.job_request import JobRequest
from rankzero.commands.jobs.validation import check_syntax, check_with_fit
from rankzero.messages import RequestError

REFUSAL = "echo 'rankzero: cannot start\n  asked  --modle\n  found  no such flag\n  type   --model' >&2; exit 2"
REQUEST = JobRequest("slurm", "x", "srun", arguments=("--modle", "MLP"))


@pytest.fixture
def python(tmp_path):
    """Returns a function that writes a program in place of Python, and returns its path."""

    def write(text, mode=0o755):
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(mode)
        return str(file)

    return write


def test_a_refusal_of_fit_is_shown_with_even_indentation(python):
    with pytest.raises(RequestError) as error:
        check_with_fit(REQUEST, [python(REFUSAL)])
    assert error.value.asked == "-- --modle MLP"
    assert error.value.found == "fit.py refuses:\nasked  --modle\nfound  no such flag\ntype   --model"


@pytest.mark.parametrize("request_", [{"modules": ("cuda",)}, {"setup": ("export PYTHONPATH=src",)}])
def test_a_refusal_without_the_set_up_of_the_job_is_a_warning(python, capsys, request_):
    check_with_fit(JobRequest("slurm", "x", "srun", arguments=("--modle", "MLP"), **request_), [python(REFUSAL)])
    printed = capsys.readouterr().err
    assert printed.startswith("rankzero: warning: without the modules and set-up commands of the job, fit.py refuses:")
    assert "asked  --modle" in printed


def test_an_error_of_python_is_a_warning(python, capsys):
    check_with_fit(REQUEST, [python("echo 'Traceback:\nModuleNotFoundError: no yaml' >&2; exit 1")])
    assert capsys.readouterr().err.endswith("cannot check the arguments of fit.py: ModuleNotFoundError: no yaml\n")


def test_a_python_that_cannot_be_run_is_refused(python):
    path = python("", mode=0o600)
    with pytest.raises(RequestError) as error:
        check_with_fit(JobRequest("slurm", "x", "srun", venv="v"), [path])
    assert (error.value.asked, error.value.found) == ("--venv v", f"{path}: Permission denied")


def test_only_scripts_that_bash_cannot_parse_are_refused():
    check_syntax("echo 'a'\n# \udcff\n")
    with pytest.raises(RequestError) as error:
        check_syntax("echo 'a\n")
    assert error.value.found.startswith("a syntax error: line ")
