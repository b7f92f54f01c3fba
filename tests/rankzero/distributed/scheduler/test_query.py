import os

import pytest

from rankzero.distributed.scheduler.query import Answer, find_program, run_program, without_job_variables
from rankzero.distributed.timers import TIMERS
from recorded import ENV, HYDRA, OPEN_MPI, PBS_TASK, STEP, TORCHRUN


def test_the_answer_is_the_programs_output_or_the_reason_of_a_failure(programs):
    outputs = {"echo 1:00:00": "1:00:00", "printf '  a\\n b \\n\\n'": "a\n b", "true": "", "cat; echo end": "end"}
    outputs |= {"echo warning >&2; echo answer": "answer", "printf 'a\\377'": "a\ufffd"}
    reasons = {"echo out; echo ' Invalid job id ' >&2; exit 1": "Invalid job id", "echo out; exit 153": "out"}
    reasons |= {"exit 2": "exited with code 2", "kill -9 $$": "exited with code -9"}
    for script, text in (outputs | reasons).items():
        programs(squeue=script)
        assert run_program("squeue") == Answer(script in outputs, text), script


def test_arguments_are_passed_unchanged(programs):
    programs(qstat='for word in "$@"; do echo "[$word]"; done')
    arguments = ["-f", "15[3].pbs1", "", "a b", "$HOME;", "*"]
    assert run_program("qstat", *arguments).text.splitlines() == [f"[{argument}]" for argument in arguments]
    assert run_program("qstat", "a\0b") == Answer(False, "embedded null byte")


def test_a_missing_or_non_executable_program_gives_a_failed_answer(programs, tmp_path):
    assert run_program("squeue") == Answer(False, "not found on PATH")
    (tmp_path / "programs" / "squeue").touch(0o644)
    assert run_program("squeue") == Answer(False, "not found on PATH")


def test_a_program_that_does_not_exit_is_killed(programs, monkeypatch, tmp_path):
    monkeypatch.setattr(TIMERS, "scheduler", 0.2)
    programs(squeue=f"echo $$ > {tmp_path}/pid; echo early; exec sleep 60")
    assert run_program("squeue") == Answer(False, "no answer within 0.2 s")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_programs_run_in_utc_and_without_the_users_squeue_settings(programs, monkeypatch):
    for name, value in {"TZ": "America/New_York", "SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "PD", "KEPT": "1"}.items():
        monkeypatch.setenv(name, value)
    programs(squeue='echo "$TZ,$SQUEUE_FORMAT,$SQUEUE_STATES,$KEPT,$(date +%Z)"')
    assert run_program("squeue").text == "UTC0,,,1,UTC"
    assert os.environ["TZ"] == "America/New_York" and os.environ["SQUEUE_FORMAT"] == "%i"


def test_a_program_of_lsf_is_found_outside_path(tmp_path, monkeypatch):
    (tmp_path / "bjobs").touch(0o755)
    assert find_program("bjobs") is None
    monkeypatch.setenv("LSF_BINDIR", str(tmp_path))
    assert find_program("bjobs") == str(tmp_path / "bjobs")


def test_a_program_of_pbs_is_found_outside_path(tmp_path, monkeypatch):
    folder = tmp_path / "pbs" / "bin"
    folder.mkdir(parents=True)
    (folder / "qstat").write_text("#!/bin/sh\necho answer\n")
    (folder / "qstat").chmod(0o755)
    (tmp_path / "pbs.conf").write_text(f"PBS_EXEC={tmp_path / 'pbs'}\n")
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    assert find_program("qstat") == str(folder / "qstat") and find_program("qrerun") is None
    assert run_program("qstat") == Answer(True, "answer")


@pytest.mark.parametrize("variables", [ENV, HYDRA, OPEN_MPI, PBS_TASK, STEP, TORCHRUN])
def test_the_variables_of_launchers_and_jobs_are_removed(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not variables.keys() & without_job_variables().keys()


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": "12", "PBS_JOBID": "0.pbs1"}])
def test_settings_of_the_user_are_kept_and_variables_of_a_scheduler_outside_its_jobs(monkeypatch, job):
    settings = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_DEFAULT", "OMPI_MCA_btl", "MPI_HOME", "SBATCH_PARTITION", "PATH")
    for name in (*settings, "SLURM_CLUSTERS", *job):
        monkeypatch.setenv(name, job.get(name, "value"))
    assert dict.fromkeys(settings, "value").items() <= without_job_variables().items()
    assert ("SLURM_CLUSTERS" in without_job_variables()) == (not job)
