import socket
from unittest.mock import Mock

import pytest

from rankzero.jobs.options import JobRequest
from rankzero.jobs.record import Record, read_record
from rankzero.jobs.schedulers import job_state
from rankzero.jobs.submission import resubmit, stop, submit
from running import refusal_of, wait_until

RECORD = Record("x", "slurm", "srun", "123")
SLURM = JobRequest("slurm", "x", "srun")
PBS = JobRequest("pbs", "x", "pbsdsh")
LOCAL = JobRequest("local", "x")
NO_ANSWER = "squeue: error: no controller"
UNKNOWN = f"123 (slurm) is UNKNOWN ({NO_ANSWER})"
QSTAT = "printf 'Job Id: 15.pbs1\\n    job_state = %s\\n'"


@pytest.fixture
def folder(tmp_path):
    """The folder of the job, apart from the stand-in programs."""
    folder = tmp_path / "my project"
    folder.mkdir()
    return folder


def content(folder):
    """Returns the files and folders in a folder: path -> text, or None for a folder."""
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def submitted(programs, folder):
    """Returns a function that submits a job to a scheduler whose programs answer, and returns its record."""

    def submit_job(job=SLURM, text="text", **scripts):
        programs(**{"sbatch": "echo 123", "squeue": "true", "qsub": "echo 15.pbs1", "qstat": f"{QSTAT} F", **scripts})
        return submit(job, text, folder)

    return submit_job


def test_an_accepted_job_has_a_script_and_a_record(programs, calls, folder):
    programs(sbatch="echo 123; pwd >>$0.calls", qsub="echo '15[].pbs1'")
    record = submit(SLURM, "#!/bin/bash\n", folder)
    assert record == Record("x", "slurm", "srun", "123", None, socket.gethostname(), "")
    root = folder / "runs"
    assert read_record(root, "x") == record
    assert calls("sbatch") == [f"--parsable {root}/x.job.sh", str(root)]
    assert sorted(path.name for path in root.iterdir()) == ["x.job.json", "x.job.sh"]
    assert (root / "x.job.sh").read_text() == "#!/bin/bash\n"
    array = submit(JobRequest("pbs", "y", "pbsdsh", array="0-3"), "text", folder)
    assert (array.id, array.array) == ("15[].pbs1", "0-3")


def test_bsub_gets_the_script_on_its_input_and_each_scheduler_its_own_command_to_stop(programs, calls, folder):
    programs(
        bsub='cat >"$0.script"; echo "Job <7> is submitted to queue <normal>."',
        flux="case $1 in batch) echo ƒ7 ;; esac",
        kubectl="echo trainjob.trainer.kubeflow.org/x replaced",
        bkill="true",
    )
    root = folder / "runs"
    record = submit(JobRequest("lsf", "x", "mpirun"), "#!/bin/bash\n", folder)
    assert record.id == "7" and calls("bsub") == [""]
    assert (folder.parent / "programs" / "bsub.script").read_text() == "#!/bin/bash\n"
    stop(root, record)
    stop(root, submit(JobRequest("flux", "y"), "text", folder))
    stop(root, submit(JobRequest("kubernetes", "z", image="i"), "text", folder))
    assert calls("bkill") == ["7"] and calls("flux") == [f"batch {root}/y.job.sh", "cancel ƒ7"]
    replace, delete = calls("kubectl")
    assert replace == f"replace --force --cascade=foreground -f {root}/z.job.yaml"
    assert delete == "delete --wait=false --cascade=foreground trainjob x"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'sbatch: error: invalid partition: gpu' >&2; exit 1", "sbatch: error: invalid partition: gpu"),
        ("echo 'no such account'; exit 1", "no such account"),
        ("exit 3", "exit code 3"),
        ("echo 'not an id'", "not an id"),
        ("echo 123; echo 'rejected later' >&2; exit 1", "rejected later"),
    ],
)
def test_a_rejected_job_shows_the_schedulers_words_and_leaves_no_file(programs, folder, script, words):
    programs(sbatch=script)
    error = refusal_of(submit, JobRequest("slurm", "x", "srun", root="a/b c/runs"), "text", folder)
    assert error.asked == "to submit run x with sbatch" and error.found == words
    assert content(folder) == {}


@pytest.mark.parametrize("job", [SLURM, PBS])
def test_a_rejected_job_leaves_a_folder_with_script_record_and_log_as_it_was(submitted, programs, folder, job):
    record = submitted(job)
    for name in ("x.job.log", "other"):
        (folder / "runs" / name).write_text("kept")
    before = content(folder)
    rejection = "echo 'too many jobs' >&2; exit 1"
    programs(sbatch=rejection, qsub=rejection)
    for call in ((submit, job, "new script", folder), (resubmit, folder / "runs", record)):
        assert refusal_of(*call).found == "too many jobs"
        assert content(folder) == before


def test_a_missing_program_is_refused_before_anything_is_written(programs, folder):
    for program, job in {
        "sbatch": SLURM,
        "qsub": PBS,
        "mpirun": JobRequest("mpirun", "x", "openmpi"),
        "mpiexec.hydra": JobRequest("mpirun", "x", "mpich"),
        "ssh": JobRequest("ssh", "x", hosts=("n1",)),
        "docker": JobRequest("docker", "x", image="i"),
        "apptainer": JobRequest("apptainer", "x", image="i"),
        "bash": LOCAL,
    }.items():
        error = refusal_of(submit, job, "text", folder)
        assert error.asked == f"--scheduler {job.scheduler}" and "--dry_run" in error.instead
        assert error.found == f"{program} is not on the PATH of {socket.gethostname()}"
        assert content(folder) == {}


@pytest.mark.parametrize(
    ("job", "scripts", "found", "instead"),
    [
        (SLURM, {"squeue": "echo 'PENDING|Resources|0:00|1:00|'"}, "123 (slurm) is PENDING (Resources)", "stop x, "),
        (PBS, {"qstat": f"{QSTAT} R"}, "15.pbs1 (pbs) is RUNNING", "stop x, "),
        (SLURM, {"squeue": f"echo '{NO_ANSWER}' >&2; exit 1"}, UNKNOWN, "my project/runs/x.job.json'"),
    ],
)
def test_a_run_with_an_active_or_unknown_job_is_not_resubmitted(submitted, calls, folder, job, scripts, found, instead):
    record = submitted(job, **scripts)
    before = content(folder)
    for verb, call in (("submit", (submit, job, "second", folder)), ("resume", (resubmit, folder / "runs", record))):
        error = refusal_of(*call)
        assert (error.asked, error.found) == (f"to {verb} run x", f"its job {found}")
        assert instead in error.instead
    assert content(folder) == before and len(calls("sbatch") + calls("qsub")) == 1


@pytest.mark.parametrize("squeue", ["true", "echo 'FAILED|x|0|0|n1'"])
def test_a_run_whose_job_has_ended_is_submitted_again(submitted, programs, calls, folder, squeue):
    submitted(text="first", squeue=squeue)
    programs(sbatch="echo 124")
    record = submit(SLURM, "second", folder)
    assert record.id == read_record(folder / "runs", "x").id == "124"
    programs(sbatch="echo 125")
    again = resubmit(folder / "runs", record)
    assert again.id == "125" and read_record(folder / "runs", "x") == again
    assert (folder / "runs" / "x.job.sh").read_text() == "second"
    assert calls("sbatch") == [f"--parsable {folder}/runs/x.job.sh"] * 3


def test_the_job_that_a_script_of_pbs_submitted_is_queried_and_stopped(submitted, calls, folder):
    submitted(PBS, qstat=f"{QSTAT} R", qdel="true")
    (folder / "runs" / ".x.job.next").write_text("16.pbs1\n")
    record = read_record(folder / "runs", "x")
    assert job_state(record).is_active is True
    stop(folder / "runs", record)
    assert calls("qstat") == ["-f 16.pbs1"] and calls("qdel") == ["16.pbs1"]
    assert (folder / "runs" / ".x.job.stop").exists()  # the script does not submit itself again
    assert "its job 16.pbs1 (pbs) is RUNNING" in refusal_of(submit, PBS, "text", folder).found


def test_a_submission_replaces_the_job_that_a_script_of_pbs_submitted_and_keeps_its_log(submitted, programs, folder):
    log, record = folder / "runs" / "x.job.log", submitted(PBS)
    log.write_text("output of 15")
    programs(qsub="echo 17.pbs1")
    resubmit(folder / "runs", record)
    assert not log.exists() and log.with_name("x.job.log.15.pbs1").read_text() == "output of 15"
    (folder / "runs" / ".x.job.next").write_text("18.pbs1\n")
    log.write_text("output of 18")
    submitted(PBS, qsub="echo 19.pbs1")
    assert read_record(folder / "runs", "x").id == "19.pbs1"
    assert log.with_name("x.job.log.18.pbs1").read_text() == "output of 18"


def test_stop_cancels_the_job_or_shows_the_schedulers_words(programs, calls, folder):
    programs(scancel="true")
    stop(folder, RECORD)
    assert calls("scancel") == ["123"]
    programs(scancel="echo 'Access/permission denied' >&2; exit 1", qdel="exit 1")
    error = refusal_of(stop, folder, RECORD)
    assert (error.asked, error.found, error.instead) == ("to stop job 123", "Access/permission denied", "scancel 123")
    refusal_of(stop, folder, Record("x", "pbs", "pbsdsh", "15.pbs1"))
    assert not (folder / ".x.job.stop").exists()  # the job may submit itself again


def test_a_local_job_starts_at_once_and_can_be_repeated_when_it_has_ended(folder):
    log = folder / "runs" / "x.job.log"
    record = submit(LOCAL, "trap 'echo stopped; exit 75' TERM; echo \"$0\"; while :; do sleep 0.02; done\n", folder)
    assert record.started and record.host == socket.gethostname()
    found = f"its job {record.id} (local) is RUNNING as process {record.id}"
    assert refusal_of(submit, LOCAL, "text", folder).found == found
    wait_until(lambda: log.read_text() == f"{folder}/runs/x.job.sh\n")
    stop(folder / "runs", record)
    wait_until(lambda: not job_state(record).is_active)
    again = resubmit(folder / "runs", record)
    wait_until(lambda: log.read_text() == f"{folder}/runs/x.job.sh\nstopped\n{folder}/runs/x.job.sh\n")
    assert again.id != record.id and read_record(folder / "runs", "x") == again
    stop(folder / "runs", again)
    wait_until(lambda: not job_state(again).is_active)


def test_a_missing_script_or_a_program_that_is_missing_later_is_named(programs, folder):
    programs(squeue="true")
    error = refusal_of(resubmit, folder, RECORD)
    assert (error.asked, error.found) == ("to resume run x", f"{folder / 'x.job.sh'} is missing")
    (folder / "x.job.sh").write_text("text")
    for call, program in ((resubmit, "sbatch"), (stop, "scancel")):
        assert refusal_of(call, folder, RECORD).found == f"{program} is not on the PATH of {socket.gethostname()}"


def test_a_submission_gets_the_users_variables_without_those_of_a_job(submitted, tmp_path, monkeypatch):
    for name, value in (("SLURM_JOB_ID", "12"), ("SLURM_MEM_PER_CPU", "1000"), ("SLURM_CONF", "/etc/slurm.conf")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SBATCH_RESERVATION", "maintenance")
    submitted(sbatch='echo 123; echo "${SLURM_MEM_PER_CPU-unset} $SLURM_CONF $SBATCH_RESERVATION" >$0.variable')
    assert (tmp_path / "programs" / "sbatch.variable").read_text() == "unset /etc/slurm.conf maintenance\n"


def test_an_unwritable_folder_is_refused_and_an_interrupted_submission_leaves_no_file(programs, folder, monkeypatch):
    programs(sbatch="echo 123")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rankzero.jobs.submission._run", Mock(side_effect=KeyboardInterrupt))
        submit(SLURM, "text", folder)
    assert content(folder) == {}
    error = refusal_of(submit, JobRequest("slurm", "x", "srun", root="/proc/runs"), "text", folder)
    assert (error.asked, error.instead) == ("--root /proc/runs", "--root DIR")
    assert error.found.startswith("cannot write to it: ")
    (folder / "runs" / "x.job.sh").mkdir(parents=True)
    assert "Is a directory" in refusal_of(submit, SLURM, "text", folder).found
    assert sorted(content(folder)) == ["runs", "runs/x.job.sh"]
