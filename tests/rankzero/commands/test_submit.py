import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rankzero.commands import submit
from rankzero.commands.jobs.record import Record, read_record, write_record
from rankzero.commands.jobs.request.options import SUBMIT_FLAGS
from rankzero.commands.jobs.validation import BEFORE_DASHES, SET_BY_SCRIPT
from rankzero.commands.submit import ACTIONS, main
from rankzero.messages import set_spelling
from running import REPOSITORY, SOURCES, command_of, run, run_without_importing, script

LOCAL = ("--scheduler", "local", "--name", "my-run")
SLURM = ("--scheduler", "slurm", "--name", "my-run")


@pytest.fixture
def launch(cwd, monkeypatch, capsys):
    """Returns a function that runs `launch/submit.py` in this process: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", [script("submit")])
    monkeypatch.setattr("rankzero.commands.submit.check_with_fit", lambda request, command: None)  # imports torch

    def run_main(*arguments):
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield run_main
    set_spelling(None)


@pytest.fixture
def record(cwd):
    """Records a job of a run, and returns a function that writes the summary of the run."""
    write_record(cwd / "runs", Record("my-run", "slurm", "srun", "123"))

    def write_status(status):
        (cwd / "runs" / "my-run").mkdir(exist_ok=True)
        (cwd / "runs" / "my-run" / "summary.json").write_text(f'{{"status": "{status}"}}')

    return write_status


@pytest.fixture
def programs(cwd, monkeypatch):
    """Returns a function that adds stand-ins for the programs of a scheduler to PATH."""
    folder = cwd / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def add(**scripts):
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return add


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


def test_a_dry_run_does_not_import_torch(cwd):
    arguments = [*SLURM, "--dry_run", "--", "--model", "MLP"]
    code = f"from rankzero.commands.submit import main; assert main({arguments}) == 0"
    result = run_without_importing("torch", "lightning", "jsonargparse", code=code, folder=cwd)
    assert result.out.startswith("#!/bin/bash\n#SBATCH --ntasks-per-node=1\n") and result.err == ""


def test_the_script_in_launch_submits_fit_beside_it(cwd):
    result = run("python", script("submit"), *LOCAL, "--dry_run", folder=cwd)
    words = last_command(result.out)
    assert words[1].endswith("/python") and words[2] == str(REPOSITORY / "launch" / "fit.py")


def test_python_m_rankzero_submits_the_installed_fit(cwd):
    environment = {"PYTHONPATH": SOURCES}
    result = run("python", "-m", "rankzero", "submit", *LOCAL, "--dry_run", folder=cwd, environment=environment)
    words = last_command(result.out)
    assert words[1].endswith("/python") and words[2:6] == ["-m", "rankzero", "fit", "--name=my-run"]
    error = run("python", "-m", "rankzero", "submit", "stop", folder=cwd, environment=environment, code=2).err
    assert "rankzero submit stop NAME" in error and "launch/" not in error


@pytest.mark.parametrize("command", [["bin/rankzero", "submit"], ["submit.py"]], ids=["console command", "copy"])
def test_the_console_command_and_a_copy_without_fit_beside_it_submit_the_installed_fit(
    launch, monkeypatch, cwd, command
):
    monkeypatch.setattr(sys, "argv", [str(cwd / command[0]), *command[1:]])
    assert last_command(launch(*LOCAL, "--dry_run")[1])[1:5] == [sys.executable, "-m", "rankzero", "fit"]


def test_an_image_runs_its_own_python(launch):
    code, out, _ = launch(*SLURM, "--image", "image.sif", "--dry_run")
    assert code == 0 and "-- image.sif \\\n    python -m rankzero fit \\\n" in out
    assert sys.executable not in out and script("fit") not in out


def test_a_virtual_environment_gives_its_python(launch, cwd):
    assert refused(launch(*LOCAL, "--venv", "my venv")) == {
        "asked": "--venv my venv",
        "found": f"{cwd}/my venv/bin/python does not exist",
        "type": "--venv .venv",
    }
    python = cwd / "my venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert message_of(launch(*LOCAL, "--venv", "my venv"))["found"] == f"{python} is not executable"
    python.chmod(0o755)
    for folder in ("my venv", str(cwd / "my venv")):
        assert last_command(launch(*LOCAL, "--venv", folder, "--dry_run")[1])[1] == str(python)


@pytest.mark.parametrize(
    ("arguments", "asked", "instead"),
    [
        (("--modle", "MLP"), "--modle MLP", "--model MLP"),
        (("--epochs", "many"), "--epochs many", "--epochs "),
        (("--model", "RezNet"), "--model RezNet", "--model ResNet"),
        (("trian",), "trian", ""),
        (("--config", "missing.yaml"), "--config missing.yaml", ""),
    ],
)
def test_a_typo_in_the_arguments_of_fit_exits_before_anything_is_written(launch, arguments, asked, instead):
    rows = refused(launch(*LOCAL, "--", *arguments))
    assert rows["asked"] == asked and rows["type"].startswith(instead)


@pytest.mark.parametrize("flag", (*BEFORE_DASHES, *SET_BY_SCRIPT))
def test_flags_of_submit_and_flags_that_the_script_sets_are_refused_after_the_dashes(launch, flag):
    found = "a flag of submit.py comes before --" if flag in BEFORE_DASHES else "the script sets this flag of fit.py"
    for arguments in ([f"--{flag}=2"], [f"--{flag}", "2"], ["--model", "MLP", f"--{flag}=2"]):
        rows = refused(launch(*LOCAL, "--", *arguments))
        assert rows["asked"].startswith(f"-- --{flag}") and rows["found"] == found
        assert flag in rows["type"]


def test_flags_that_the_script_sets_are_flags_of_fit():
    assert set(SET_BY_SCRIPT) <= {flag.name for flag in command_of("fit").flags}


@pytest.mark.parametrize("word", ["test", "validate", "predict"])
def test_a_subcommand_that_does_not_train_is_refused(launch, word):
    rows = refused(launch(*LOCAL, "--", word))
    assert rows["asked"] == f"-- {word}" and rows["found"] == "a job runs fit.py"


@pytest.mark.parametrize("arguments", [("--print_config",), ("--help_all",), ("--explain",), ("--model.help", "MLP")])
def test_arguments_that_only_print_are_refused(launch, arguments):
    rows = refused(launch(*LOCAL, "--", *arguments))
    assert rows["found"] == "these arguments train nothing" and rows["asked"] == f"-- {' '.join(arguments)}"


def test_arguments_are_checked_with_the_first_index_of_an_array(launch):
    code, out, _ = launch(*SLURM, "--array", "1-3", "--dry_run", "--", "--epochs", "{array_index}")
    assert code == 0 and '--epochs "$array_index"' in out


def test_an_unexpected_argument_is_refused(launch):
    rows = refused(launch(*LOCAL, "ResNet"))
    assert rows["asked"] == "ResNet" and rows["type"].startswith("leave ResNet out")
    assert all(action in rows["found"] for action in ACTIONS)
    assert refused(launch("cancel", "x"))["type"] == "python launch/submit.py stop x"
    assert refused(launch("ststus", "x"))["type"] == "python launch/submit.py status x"
    assert refused(launch("--root", "runs", "status", "x"))["type"] == "python launch/submit.py status x"
    assert refused(launch("slurm", "--name", "x"))["type"] == "--scheduler slurm"
    assert "quote a value" in refused(launch(*SLURM, "--time", "2", "hours"))["type"]


def test_a_syntax_error_in_setup_is_refused(launch):
    rows = refused(launch(*SLURM, "--dry_run", "--setup", 'module load "x'))
    assert rows["asked"] == "--setup and --extra" and "unexpected EOF" in rows["found"]


def test_an_index_without_an_array_is_refused(launch):
    assert refused(launch(*SLURM, "--", "--seed", "{array_index}"))["type"] == "--array 0-3, before --"


def test_a_request_for_gpus_reaches_fit(launch):
    assert " --accelerator=gpu" in launch(*SLURM, "--dry_run", "--gpus_per_device", "1")[1]
    text = launch(*SLURM, "--dry_run", "--gpus_per_device", "1", "--", "--accelerator", "cuda")[1]
    assert "--accelerator=gpu" not in text and "--accelerator" not in launch(*SLURM, "--dry_run")[1]


def test_a_wrong_flag_exits_with_2_and_one_message(launch):
    assert refused(launch(*LOCAL, "--ndoes", "2"))["type"] == "--nodes 2"
    assert refused(launch())["asked"] == "a job without --scheduler"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_lists_flags_and_actions(launch, flag, cwd):
    code, out, err = launch(flag)
    assert (code, err) == (0, "") and list(cwd.iterdir()) == []
    assert all(f"\n  --{option.name} {option.metavar} " in out for option in SUBMIT_FLAGS)
    assert all(f"\n  {action} NAME " in out for action in ACTIONS)
    assert launch("status", flag)[:2] == (0, out)


def test_a_submitted_job_is_reported_with_the_commands_to_type(launch, programs, cwd):
    programs(sbatch='[ "$1" = --version ] && echo slurm-wlm 22.05.8 || echo 123')
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
    assert (cwd / "runs" / "my-run.job.sh").read_text() == launch(
        *SLURM, "--nodes=2", "--dry_run", "--", "--model", "MLP"
    )[1]
    assert read_record(cwd / "runs", "my-run").id == "123"


def test_the_printed_commands_name_another_root(launch, programs, cwd):
    programs(sbatch="echo 123")
    _, out, _ = launch(*SLURM, "--root", "my runs", "--array", "0-3", "--gpus_per_device", "1")
    assert f"  stop    python {script('submit')} stop my-run --root '{cwd}/my runs'\n" in out
    assert f"  log     '{cwd}/my runs/my-run.job-INDEX.log'\n" in out
    assert "no GPU is requested" not in out


def test_slurm_25_11_expedites_the_requeue(launch, programs):
    programs(sbatch="echo slurm 25.11.0")
    assert "#SBATCH --requeue=expedite\n" in launch(*SLURM, "--dry_run")[1]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_on_an_unknown_run_lists_the_known_runs(launch, cwd, action):
    for number, name in enumerate(("one", "two")):
        write_record(cwd / "runs", Record(name, "slurm", "srun", str(number)))
    write_record(cwd / "runs", Record("sweep", "slurm", "srun", "12", "0-3"))
    rows = message_of(launch(action, "two_"))
    assert rows["asked"] == f"{action} two_"
    assert rows["found"].endswith(f"submitted from {cwd}/runs; submitted runs: one, sweep, two")
    assert rows["type"] == f"python {script('submit')} {action} two"
    assert message_of(launch(action, "zzz"))["type"] == "--root DIR"  # no similar name: never another run
    member = message_of(launch(action, "sweep-2"))
    assert member["found"] == "member 2 of the job array sweep, which is job 12"


def test_an_action_without_any_run_names_the_folder(launch, cwd):
    rows = refused(launch("status", "x", "--root", "elsewhere"))
    assert rows["found"].endswith(f"from {cwd}/elsewhere; submitted runs: none") and rows["type"] == "--root DIR"


@pytest.mark.parametrize("action", ["status", "stop"])
@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("a", "b"), ("a", "--name", "b"), ("a", "--nodes", "2")),
        *(("a", "--dry_run"), ("a", "--", "--epochs", "3")),
    ],
)
def test_an_action_takes_one_run_and_no_options_of_a_job(launch, action, arguments):
    rows = refused(launch(action, *arguments))
    assert rows["found"] == "expected the name of one run, and at most --root, --site"
    assert rows["type"] == f"python launch/submit.py {action} {'a' if arguments else 'NAME'}"


def test_only_log_and_resume_accept_follow(launch):
    for action in ("status", "stop"):
        assert refused(launch(action, "x", "--follow"))["asked"] == f"{action} x --follow"
    assert "submitted from" in refused(launch("resume", "x", "--follow"))["found"]
    assert "submit the run again" in refused(launch("resume", "x", "--time", "4h"))["found"]


def test_actions_use_the_root_of_a_site_file(launch, cwd):
    write_record(cwd / "elsewhere", Record("x", "slurm", "srun", "1"))
    (cwd / "site.yaml").write_text("root: elsewhere\n")
    assert launch("log", "x", "--site", "site.yaml")[0] == 0


@pytest.mark.parametrize(
    ("status", "result"), [("finished", "finished"), ("stopped", "stopped"), ("failed", "failed"), (None, "failed")]
)
def test_status_prints_the_result_of_an_ended_run(launch, programs, record, cwd, status, result):
    (cwd / "runs" / "my-run").mkdir()
    if status:
        record(status)
    programs(squeue="true")
    expected = f"my-run: job 123 (slurm): ENDED (Slurm no longer knows the job); run {result}\n"
    assert launch("status", "my-run") == (0, expected, "")


def test_a_finished_run_is_not_resumed(launch, programs, record):
    record("finished")
    assert message_of(launch("resume", "my-run"))["found"] == "the run is finished"
    programs(sbatch="echo 124", squeue="true")
    assert "the run is finished; this job trains only if" in launch(*SLURM)[1]


@pytest.mark.usefixtures("record")
def test_status_prints_the_schedulers_word_or_exits_with_1(launch, programs):
    programs(squeue="echo 'PENDING|Resources|0:00|1:00|'")
    expected = (0, "my-run: job 123 (slurm): PENDING (Resources)\n", "")
    assert launch("status", "my-run") == launch("status", "--name", "my-run", "--root", "runs") == expected
    programs(squeue="exit 1")
    assert launch("status", "my-run")[0] == 1


@pytest.mark.usefixtures("record")
def test_log_prints_the_output_of_all_jobs(launch, cwd):
    assert launch("log", "my-run") == (0, "my-run: job 123 has no output yet\n", "")
    (cwd / "runs" / "my-run.job.log").write_text("first\nsecond")
    assert launch("log", "my-run") == (0, "first\nsecond", "")


@pytest.mark.usefixtures("record")
def test_stop_ends_an_active_job_only(launch, programs, cwd):
    programs(squeue="echo 'RUNNING|None|0:01|1:00|n1'", scancel=f'echo "$*" >>{cwd}/cancelled')
    code, out, _ = launch("stop", "my-run")
    assert code == 0 and out == "my-run: SIGTERM sent to job 123; a run that has begun saves a checkpoint and stops\n"
    programs(squeue="echo 'COMPLETED|None|0:01|1:00|n1'")
    expected = "my-run: job 123 (slurm): COMPLETED on n1, 0:01 of 1:00; nothing to stop\n"
    assert launch("stop", "my-run")[:2] == (0, expected)
    assert (cwd / "cancelled").read_text() == "123\n"


def test_resume_submits_the_script_again(launch, programs, cwd):
    programs(sbatch="echo 123", squeue="true")
    launch(*SLURM)
    text = (cwd / "runs" / "my-run.job.sh").read_text()
    programs(sbatch="echo 124")
    code, out, _ = launch("resume", "my-run")
    assert code == 0 and out.startswith("rankzero: submitted run my-run as job 124 (slurm, srun)\n")
    assert (cwd / "runs" / "my-run.job.sh").read_text() == text
    programs(squeue="echo 'RUNNING|None|0:01|1:00|n1'")
    assert launch("resume", "my-run")[0] == 2


def test_a_followed_local_job_returns_the_exit_code_of_the_run(cwd):
    (cwd / "venv" / "bin").mkdir(parents=True)
    python = cwd / "venv" / "bin" / "python"
    python.write_text(
        '#!/bin/sh\nmkdir runs/my-run\necho \'{"status": "finished"}\' >runs/my-run/summary.json\necho "$2"\n'
    )
    python.chmod(0o755)
    result = run("python", script("submit"), *LOCAL, "--venv", "venv", "--follow", folder=cwd)
    lines = result.out.splitlines()
    assert "--name=my-run" in lines and lines[-1].endswith(": ENDED") and result.code == 0


def test_an_interrupt_exits_with_130(launch, monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "parse", interrupt)
    assert launch(*LOCAL) == (130, "", "")


def test_a_closed_output_gives_no_traceback(cwd):
    command = f"{shlex.quote(sys.executable)} {shlex.quote(script('submit'))} --help | true"
    result = subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "refused_argument"),
    [
        (("--model", "ResNet", "--model.depht", "3"), "depht"),
        (("--model", "mine.Net"), "mine"),
        (("--model", "MLP"), None),
    ],
)
def test_fit_checks_its_arguments_before_the_job_is_submitted(cwd, arguments, refused_argument):
    command = ("python", script("submit"), *LOCAL, "--follow", "--", *arguments, "--trainer.fast_dev_run", "1")
    result = run(*command, folder=cwd, code=2 if refused_argument else 0)
    if refused_argument:
        assert "fit.py refuses:" in result.err and refused_argument in result.err
        assert list(cwd.iterdir()) == []


def test_check_prints_the_findings_in_a_script_of_the_user(launch, cwd):
    (cwd / "my job.sh").write_text("mpirun -np 2 python train.py\n")
    code, out, err = launch("--check", "my job.sh")
    assert (code, err) == (1, "") and out.startswith("my job.sh:1: risky: Open MPI binds each process to one core")
    assert out.endswith("\n  write  mpirun --bind-to none ...\n0 wrong, 1 risky\n")
    (cwd / "my job.sh").write_text("python train.py\n")
    assert launch("--check=my job.sh") == (0, "my job.sh: nothing wrong or risky was found\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--check=job.sh", "--dry_run"),
        ("--dry_run", "--check=job.sh"),
        ("--check", "job.sh", "--name", "x"),
        ("--check", "job.sh", "--", "--epochs", "3"),
        ("--check", "job.sh", "other.sh"),
        ("status", "--check=job.sh"),
    ],
)
def test_check_accepts_no_other_argument(launch, arguments):
    rows = refused(launch(*arguments))
    assert rows["found"] == "--check accepts no other argument" and rows["type"].endswith("--check job.sh")
