import pytest

from rankzero.jobs.options import JobRequest
from rankzero.jobs.validation import check_syntax, check_with_fit
from running import refusal_of, write_program

REFUSAL = "echo 'rankzero: cannot start\n  asked  --modle\n  found  no such flag\n  type   --model' >&2; exit 2"
REQUEST = JobRequest("slurm", "x", "srun", arguments=("--modle", "MLP"))


@pytest.fixture
def python(tmp_path):
    """Returns a function that writes a program in place of Python, and returns its path."""
    return lambda text: str(write_program(tmp_path / "python", text))


def test_a_refusal_of_fit_is_shown_and_an_error_of_python_and_a_python_that_cannot_be_run_are_refused(python, tmp_path):
    error = refusal_of(check_with_fit, REQUEST, [python(REFUSAL)])
    assert error.asked == "-- --modle MLP"
    assert error.found == "fit.py refuses:\nasked  --modle\nfound  no such flag\ntype   --model"
    error = refusal_of(check_with_fit, REQUEST, [python("echo 'Traceback:\nModuleNotFoundError: no yaml' >&2; exit 1")])
    assert error.found == "fit.py refuses:\nModuleNotFoundError: no yaml"
    path = tmp_path / "python"
    path.chmod(0o600)
    error = refusal_of(check_with_fit, JobRequest("slurm", "x", "srun", venv="v"), [str(path)])
    assert (error.asked, error.found) == ("--venv v", f"{path}: Permission denied")


def test_only_scripts_that_bash_cannot_parse_are_refused():
    check_syntax("echo 'a'\n# \udcff\n")
    assert refusal_of(check_syntax, "echo 'a\n").found.startswith("a syntax error: line ")
