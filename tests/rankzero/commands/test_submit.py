import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rankzero.commands import submit
from rankzero.commands.submit import ACTIONS, main
from rankzero.distributed.timers import TIMERS
from rankzero.jobs import submission
from rankzero.jobs.options import help_text
from rankzero.jobs.record import Record, read_record, write_record
from rankzero.jobs.validation import BEFORE_DASHES, SET_BY_SCRIPT
from rankzero.messages import set_spelling
from running import REPOSITORY, SOURCES, command_of, run, run_without_importing, script, wait_until, write_program

LOCAL = ("--scheduler", "local", "--name", "my-run")
SLURM = ("--scheduler", "slurm", "--name", "my-run")


@pytest.fixture
def launch(cwd, monkeypatch, capsys):
    """Returns a function that runs `launch/submit.py` in this process: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", [script("submit")])

    def run_main(*arguments):
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield run_main
    set_spelling(None)


@pytest.fixture
def record(cwd):
    """Records a job of the run `my-run`."""
    write_record(cwd / "runs", Record("my-run", "slurm", "srun", "123"))


def write_summary(cwd, status):
    (cwd / "runs" / "my-run").mkdir(exist_ok=True)
    (cwd / "runs" / "my-run" / "summary.json").write_text(f'{{"status": "{status}"}}')


def last_command(text):
    """Returns the words of the command that a script ends with."""
    return shlex.split(text.replace("\\\n", "")[text.replace("\\\n", "").rindex("exec ") :])


def refused(printed):
    """Checks that nothing was written, and returns the rows of the message."""
    assert list(Path.cwd().iterdir()) == []
    return message_of(printed)


def message_of(printed):
    """Returns the rows of the message of a command that was refused."""
    code, out, err = printed
    assert (code, out) == (2, "")
    first, *rows = err.splitlines()
    assert first == "rankzero: cannot start"
    return {row[2:8].strip(): row[9:] for row in rows if row[2:8].strip()}


def test_a_dry_run_prints_the_script_and_writes_nothing(launch, cwd):
    code, out, err = launch(*LOCAL, "--dry_run", "--devices=2", "--", "--model", "MLP", "--epochs", "3")
    assert (code, err) == (0, "") and list(cwd.iterdir()) == []
    assert out.startswith("#!/bin/bash\n") and f"cd -- {cwd} || exit 2\n" in out
    assert last_command(out) == [
        *("exec", sys.executable, script("fit"), "--name=my-run", f"--root={cwd}/runs", "--nodes=1", "--devices=2"),
        *("--model", "MLP", "--epochs", "3"),
    ]
    out = launch(*SLURM, "--array", "1-3", "--dry_run", "--", "--epochs", "{array_index}")[1]
    assert '--epochs "$array_index"' in out  # is checked with the first index


def test_a_job_is_submitted_without_importing_torch_or_the_users_model(cwd):
    arguments = [*LOCAL, "--", "--model", "mine.Net", "--data", "Toy"]
    start = "rankzero.jobs.schedulers.background.start = lambda script, log: ('7', '1')"
    code = f"import rankzero.commands.submit as s; import rankzero; {start}; assert s.main({arguments}) == 0"
    result = run_without_importing("torch", "lightning", "jsonargparse", "mine", code=code, folder=cwd)
    assert result.out.startswith("rankzero: submitted run my-run as job 7 (local)\n") and result.err == ""


def test_the_script_in_launch_submits_fit_beside_it_and_python_m_rankzero_the_installed_fit(cwd):
    words = last_command(run("python", script("submit"), *LOCAL, "--dry_run", folder=cwd).out)
    assert words[1].endswith("/python") and words[2] == str(REPOSITORY / "launch" / "fit.py")
    module, environment = ("python", "-m", "rankzero", "submit"), {"PYTHONPATH": SOURCES}
    words = last_command(run(*module, *LOCAL, "--dry_run", folder=cwd, environment=environment).out)
    assert words[1].endswith("/python") and words[2:6] == ["-m", "rankzero", "fit", "--name=my-run"]
    error = run(*module, "stop", folder=cwd, environment=environment, code=2).err
    assert "rankzero submit stop NAME" in error and "launch/" not in error


def test_the_console_command_a_copy_without_fit_beside_it_and_an_image_run_the_installed_fit(launch, monkeypatch, cwd):
    code, out, _ = launch(*SLURM, "--image", "image.sif", "--dry_run")
    assert code == 0 and "-- image.sif \\\n    python -m rankzero fit \\\n" in out
    assert sys.executable not in out and script("fit") not in out and "--accelerator" not in out
    for command in ([str(cwd / "bin/rankzero"), "submit"], [str(cwd / "submit.py")]):
        monkeypatch.setattr(sys, "argv", command)
        assert last_command(launch(*LOCAL, "--dry_run")[1])[1:5] == [sys.executable, "-m", "rankzero", "fit"]


def test_a_request_for_gpus_reaches_fit(launch):
    assert " --accelerator=gpu" in launch(*SLURM, "--dry_run", "--gpus_per_device", "1")[1]
    text = launch(*SLURM, "--dry_run", "--gpus_per_device", "1", "--", "--accelerator", "cuda")[1]
    assert "--accelerator=gpu" not in text and "--accelerator" not in launch(*SLURM, "--dry_run")[1]


def test_a_virtual_environment_gives_its_python(launch, cwd):
    python = cwd / "my venv" / "bin" / "python"
    expected = {"asked": "--venv my venv", "found": f"{python} does not exist", "type": "--venv .venv"}
    assert refused(launch(*LOCAL, "--venv", "my venv")) == expected
    python.parent.mkdir(parents=True)
    python.touch()
    assert message_of(launch(*LOCAL, "--venv", "my venv"))["found"] == f"{python} is not executable"
    python.chmod(0o755)
    for folder in ("my venv", str(cwd / "my venv")):
        assert last_command(launch(*LOCAL, "--venv", folder, "--dry_run")[1])[1] == str(python)


@pytest.mark.parametrize(
    ("arguments", "asked", "found", "instead"),
    [
        ("--modle MLP", "--modle MLP", "there is no flag of that name", "--model MLP"),
        ("--epochs many", "--epochs many", "'many' is not a whole number", "--epochs "),
        ("--model RezNet", "--model RezNet", "there is no model of that name", "--model ResNet"),
        ("trian", "trian", "unexpected argument", ""),
        ("--config missing.yaml", "--config missing.yaml", "there is no such file", ""),
        ("--seed {array_index}", "-- --seed '{array_index}'", "{array_index} needs", "--array 0-3, before --"),
        *((word, f"-- {word}", "a job runs fit.py", "leave") for word in ("test", "validate", "predict")),
        *(
            (arguments, f"-- {arguments}", "these arguments train nothing", "leave")
            for arguments in ("--print_config", "--help_all", "--explain", "--model.help MLP")
        ),
    ],
)
def test_a_mistake_in_the_arguments_of_fit_exits_before_anything_is_written(launch, arguments, asked, found, instead):
    rows = refused(launch(*LOCAL, "--", *arguments.split()))
    assert rows["asked"] == asked and rows["found"].startswith(found) and rows["type"].startswith(instead)


@pytest.mark.parametrize("flag", (*BEFORE_DASHES, *SET_BY_SCRIPT))
def test_flags_of_submit_and_flags_that_the_script_sets_are_refused_after_the_dashes(launch, flag):
    assert flag in BEFORE_DASHES or flag in {flag.name for flag in command_of("fit").flags}
    found = "a flag of submit.py comes before --" if flag in BEFORE_DASHES else "the script sets this flag of fit.py"
    for arguments in ([f"--{flag}=2"], [f"--{flag}", "2"], ["--model", "MLP", f"--{flag}=2"]):
        rows = refused(launch(*LOCAL, "--", *arguments))
        assert rows["asked"].startswith(f"-- --{flag}") and rows["found"] == found
        assert flag in rows["type"]


def test_an_unexpected_argument_or_a_wrong_flag_is_refused(launch):
    rows = refused(launch(*LOCAL, "ResNet"))
    assert rows["asked"] == "ResNet" and rows["type"].startswith("leave ResNet out")
    assert all(action in rows["found"] for action in ACTIONS)
    for words, instead in {
        "cancel x": "python launch/submit.py stop x",
        "ststus x": "python launch/submit.py status x",
        "--root runs status x": "python launch/submit.py status x",
        "slurm --name x": "--scheduler slurm",
        "--scheduler slurm --name x --time 2 hours": "leave hours out, or quote a value that contains spaces",
        "--scheduler local --name x --ndoes 2": "--nodes 2",
    }.items():
        assert refused(launch(*words.split()))["type"] == instead
    assert refused(launch())["asked"] == "a job without --scheduler"


def test_a_syntax_error_in_setup_is_refused_and_an_interrupt_exits_with_130(launch, monkeypatch):
    rows = refused(launch(*SLURM, "--dry_run", "--setup", 'module load "x'))
    assert rows["asked"] == "--setup and --extra" and "unexpected EOF" in rows["found"]
    monkeypatch.setattr(submit, "parse", Mock(side_effect=KeyboardInterrupt))
    assert launch(*LOCAL) == (130, "", "")


def test_the_help_lists_flags_and_actions(launch, cwd):
    for arguments in (["--help"], ["-h"], ["status", "--help"], ["status", "-h"]):
        assert launch(*arguments) == (0, help_text() + "\n", "")
    assert list(cwd.iterdir()) == []


def test_a_submitted_job_is_reported_with_the_commands_to_type(launch, programs, cwd):
    programs(sbatch="echo 123")
    code, out, err = launch(*SLURM, "--nodes", "2", "--", "--model", "MLP")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "rankzero: submitted run my-run as job 123 (slurm, srun)",
        f"  script  {cwd}/runs/my-run.job.sh",
        f"  log     {cwd}/runs/my-run.job.log",
        f"  watch   python {script('submit')} log my-run --follow",
        f"  state   python {script('submit')} status my-run",
        f"  stop    python {script('submit')} stop my-run",
        f"  resume  python {script('submit')} resume my-run",
        "  no GPU is requested; --gpus_per_device 1 requests one for each process",
    ]
    dry_run = launch(*SLURM, "--nodes=2", "--dry_run", "--", "--model", "MLP")[1]
    assert (cwd / "runs" / "my-run.job.sh").read_text() == dry_run
    assert read_record(cwd / "runs", "my-run").id == "123"


def test_the_printed_commands_name_another_root(launch, programs, cwd):
    programs(sbatch="echo 123")
    _, out, _ = launch(*SLURM, "--root", "my runs", "--array", "0-3", "--gpus_per_device", "1")
    assert f"  stop    python {script('submit')} stop my-run --root '{cwd}/my runs'\n" in out
    assert f"  log     '{cwd}/my runs/my-run.job-INDEX.log'\n" in out
    assert "no GPU is requested" not in out


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_on_an_unknown_run_lists_the_known_runs(launch, cwd, action):
    rows = refused(launch(action, "x", "--root", "elsewhere"))
    assert rows["found"].endswith(f"from {cwd}/elsewhere; submitted runs: none")
    assert rows["type"] == "--root DIR, where DIR contains submitted runs"
    for number, name in enumerate(("one", "two")):
        write_record(cwd / "runs", Record(name, "slurm", "srun", str(number)))
    write_record(cwd / "runs", Record("sweep", "slurm", "srun", "12", "0-3"))
    rows = message_of(launch(action, "two_"))
    assert rows["asked"] == f"{action} two_"
    assert rows["found"].endswith(f"submitted from {cwd}/runs; submitted runs: one, sweep, two")
    assert rows["type"] == f"python {script('submit')} {action} two"
    assert message_of(launch(action, "zzz"))["type"] == "--root DIR, where DIR contains submitted runs"
    assert message_of(launch(action, "sweep-2"))["found"] == "member 2 of the job array sweep, which is job 12"


@pytest.mark.parametrize("action", ["status", "stop"])
def test_an_action_takes_one_run_and_no_options_of_a_job(launch, action):
    for arguments in ("", "a b", "a --name b", "a --nodes 2", "a --dry_run", "a -- --epochs 3", "a --follow"):
        rows = refused(launch(action, *arguments.split()))
        assert rows["found"] == "expected the name of one run, and at most --root, --site"
        assert rows["type"] == f"python launch/submit.py {action} {'a' if arguments else 'NAME'}"
    assert rows["asked"] == f"{action} a --follow"  # only log and resume accept it
    assert "submitted from" in refused(launch("resume", "x", "--follow"))["found"]
    assert "submit the run again" in refused(launch("resume", "x", "--time", "4h"))["found"]


def test_resume_submits_the_script_again_unless_the_run_is_finished(launch, programs, cwd):
    programs(sbatch="echo 123", squeue="true")
    launch(*SLURM)
    text = (cwd / "runs" / "my-run.job.sh").read_text()
    programs(sbatch="echo 124")
    code, out, _ = launch("resume", "my-run")
    assert code == 0 and out.startswith("rankzero: submitted run my-run as job 124 (slurm, srun)\n")
    assert (cwd / "runs" / "my-run.job.sh").read_text() == text
    programs(squeue="echo 'RUNNING|None|0:01|1:00|n1'")
    assert launch("resume", "my-run")[0] == 2
    programs(squeue="true")
    write_summary(cwd, "finished")
    assert message_of(launch("resume", "my-run"))["found"] == "the run is finished"
    assert "the run is finished; this job trains only if" in launch(*SLURM)[1]


def test_status_prints_the_schedulers_word_and_the_result_of_ended_runs_or_exits_with_1(launch, programs, record, cwd):
    programs(squeue="exit 1")
    assert launch("status", "my-run")[0] == 1
    programs(squeue="echo 'PENDING|Resources|0:00|1:00|'")
    expected = (0, "my-run: job 123 (slurm): PENDING (Resources)\n", "")
    assert launch("status", "my-run") == launch("status", "--name", "my-run", "--root", "runs") == expected
    (cwd / "runs" / "my-run").mkdir()
    programs(squeue="true")
    for status in (None, "finished", "stopped", "failed"):
        if status:
            write_summary(cwd, status)
        expected = f"my-run: job 123 (slurm): ENDED (Slurm no longer knows the job); run {status or 'failed'}\n"
        assert launch("status", "my-run") == (0, expected, "")


@pytest.mark.usefixtures("record")
def test_log_prints_the_output_of_all_jobs_also_from_the_root_of_a_site_file(launch, cwd):
    assert launch("log", "my-run") == (0, "my-run: job 123 has no output yet\n", "")
    (cwd / "runs" / "my-run.job.log").write_text("first\nsecond")
    assert launch("log", "my-run") == (0, "first\nsecond", "")
    write_record(cwd / "elsewhere", Record("x", "slurm", "srun", "1"))
    (cwd / "site.yaml").write_text("root: elsewhere\n")
    assert launch("log", "x", "--site", "site.yaml")[0] == 0


@pytest.mark.usefixtures("record")
def test_stop_ends_an_active_job_only(launch, programs, calls):
    programs(squeue="echo 'RUNNING|None|0:01|1:00|n1'", scancel="true")
    code, out, _ = launch("stop", "my-run")
    assert code == 0 and out == "my-run: SIGTERM sent to job 123; a run that has begun saves a checkpoint and stops\n"
    programs(squeue="echo 'COMPLETED|None|0:01|1:00|n1'")
    expected = "my-run: job 123 (slurm): COMPLETED on n1, 0:01 of 1:00; nothing to stop\n"
    assert launch("stop", "my-run")[:2] == (0, expected)
    assert calls("scancel") == ["123"]


def test_a_followed_local_job_prints_its_log_and_returns_the_exit_code_of_the_run(launch, cwd, monkeypatch):
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0.02)
    (cwd / "venv" / "bin").mkdir(parents=True)
    summary = 'mkdir runs/my-run; echo \'{"status": "stopped"}\' >runs/my-run/summary.json'
    write_program(cwd / "venv" / "bin" / "python", f'echo "$2"; {summary}; echo two')
    write_record = submission.write_record  # of a job that ends before its record is written

    def write_late(*arguments):
        wait_until((cwd / "runs/my-run/summary.json").exists)
        write_record(*arguments)

    monkeypatch.setattr(submission, "write_record", write_late)
    code, out, _ = launch(*LOCAL, "--venv", "venv", "--follow")
    lines = out.splitlines()
    assert code == 75 and lines.index("--name=my-run") < lines.index("two") and lines[-1].endswith(": ENDED")


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "refused_argument"),
    [("--model ResNet --model.depht 3", "depht"), ("--model mine.Net", "mine"), ("--model MLP", None)],
)
def test_validate_lets_fit_check_its_arguments_before_the_job_is_submitted(cwd, arguments, refused_argument):
    command = ("python", script("submit"), *LOCAL, "--validate", "--follow", "--", *arguments.split())
    result = run(*command, "--trainer.fast_dev_run", "1", folder=cwd, code=2 if refused_argument else 0)
    if refused_argument:
        assert "fit.py refuses:" in result.err and refused_argument in result.err
        assert list(cwd.iterdir()) == []


def test_check_prints_the_findings_in_a_script_of_the_user(launch, cwd):
    (cwd / "my job.sh").write_text("#SBATCH --nodes=1\npython train.py\n")
    found = "my job.sh:1: sbatch refuses a script that does not begin with #!\n  write  #!/bin/bash\n"
    assert launch("--check", "my job.sh") == (1, found, "")
    (cwd / "my job.sh").write_text("python train.py\n")
    assert launch("--check=my job.sh") == (0, "my job.sh: nothing wrong was found\n", "")


def test_check_accepts_no_other_argument(launch):
    for arguments in (
        *("--check=job.sh --dry_run", "--dry_run --check=job.sh", "--check job.sh --name x"),
        *("--check job.sh -- --epochs 3", "--check job.sh other.sh", "status --check=job.sh"),
    ):
        rows = refused(launch(*arguments.split()))
        assert rows["found"] == "--check accepts no other argument" and rows["type"].endswith("--check job.sh")
