import pytest
from job_scripts import findings, only, pbs

PBSDSH = 'pbsdsh -- /env/bin/python "$PBS_O_WORKDIR/train.py"'
TRAP = "trap : TERM"


def test_a_correct_job_script_has_no_findings():
    assert findings(pbs(TRAP, PBSDSH)) == []
    assert findings(pbs("python train.py", select="1:ncpus=4")) == []


@pytest.mark.parametrize("place", ["", "#PBS -l place=pack\n"])
def test_several_chunks_may_be_on_one_machine(place):
    text = pbs(TRAP, PBSDSH).replace("#PBS -l place=scatter\n", place)
    assert only(text, 2, "risky", "PBS may put several chunks on one machine") == "#PBS -l place=scatter"


def test_scattered_chunks_have_no_finding():
    text = pbs(TRAP, PBSDSH)
    for line in ("#PBS -l place=scatter:excl", "#PBS -l nodes=2:ppn=2"):
        other = text.replace("#PBS -l place=scatter", line)
        assert findings(other if "place" in line else other.replace("#PBS -l select=2:ncpus=8:mpiprocs=2\n", "")) == []


def test_a_job_without_a_walltime():
    only(pbs(TRAP, PBSDSH).replace("#PBS -l walltime=1:00:00\n", ""), 2, "risky", "without a walltime")


@pytest.mark.parametrize(
    ("name", "level", "found"),
    [
        ("PBS_NODEID", "wrong", "does not exist: the text is empty"),
        ("PBS_NUM_NODES", "risky", "exists under Torque only"),
        ("PBS_NP", "risky", "exists under Torque only"),
    ],
)
def test_variables_that_do_not_exist(name, level, found):
    only(pbs(TRAP, f'echo "${{{name}}}"', PBSDSH), 7, level, f"${name} {found}")


def test_the_job_starts_in_the_home_folder():
    text = pbs("python train.py", select="1:ncpus=4").replace('cd "$PBS_O_WORKDIR"\n', "")
    assert only(text, 5, "wrong", "the job starts in the home folder, where train.py") == 'cd "$PBS_O_WORKDIR"'
    for other in (
        "python /x/train.py",
        "python $HOME/train.py",
        "python -m rankzero fit",
        "cd ~/x; python train.py",
        "ssh n1 'cd x; python train.py'",
    ):
        assert findings(text.replace("python train.py", other)) == []


def test_a_job_can_start_in_the_folder_of_its_submission():
    text = pbs("python train.py", select="1:ncpus=4").replace('cd "$PBS_O_WORKDIR"\n', "")
    assert findings(text.replace("#PBS -l place", "#PBS -l wd\n#PBS -l place")) == []


def test_one_process_starts_on_the_first_machine():
    instead = only(pbs("python train.py"), 6, "wrong", "one process starts, on the first machine, in a job of 2 chunks")
    assert instead == 'mpirun --hostfile "$PBS_NODEFILE" python train.py'
    torchrun = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$P train.py"
    instead = only(pbs(torchrun), 6, "wrong", "torchrun starts on the first machine only")
    assert instead.startswith('pbsdsh -- /path/to/torchrun "$PBS_O_WORKDIR/SCRIPT", with mpiprocs=1 and --rdzv-backend')


@pytest.mark.parametrize("options", ["", "--", "-n 1 --", "-v"])
def test_a_program_of_pbsdsh_without_a_path_is_wrong(options):
    command = f"pbsdsh {options} python /x/train.py".replace("  ", " ")
    instead = only(pbs(TRAP, command), 7, "wrong", "have PATH=/bin:/usr/bin, where python is not found, or is another")
    assert instead == command.replace("python", "/path/to/python")


def test_tasks_of_pbsdsh_do_not_get_variables():
    only(pbs(TRAP, "export NCCL_DEBUG=INFO", PBSDSH), 7, "wrong", "the tasks of pbsdsh do not get NCCL_DEBUG")
    only(pbs(TRAP, "module load cuda", PBSDSH), 7, "risky", "do not get what this line sets")
    passed = PBSDSH.replace("/env", "/usr/bin/env A=$A /env")
    assert findings(pbs(TRAP, "export A=1", passed)) == []
    assert findings(pbs(TRAP, PBSDSH, "export A=1", "exit $?")) == []


def test_a_script_waits_for_the_tasks_of_pbsdsh():
    only(pbs(PBSDSH), 6, "risky", "at SIGTERM, pbsdsh ends before its tasks")


def test_tasks_of_pbsdsh_start_in_the_home_folder():
    found = "tasks of pbsdsh start in the home folder, where train.py is not found"
    instead = only(pbs(TRAP, "pbsdsh -- /env/bin/python train.py"), 7, "wrong", found)
    assert instead == '"$PBS_O_WORKDIR/train.py"'
    assert findings(pbs(TRAP, "pbsdsh -- /bin/bash -lc 'cd /x && /env/bin/python train.py'")) == []


@pytest.mark.parametrize("select", ["ncpus=4", "1:ncpus=4"])
def test_a_select_without_a_number_is_one_chunk(select):
    assert findings(pbs("python train.py", select=select)) == []


def test_the_shell_is_on_the_path_of_pbsdsh():
    trap = "trap : TERM"
    assert findings(pbs(trap, "pbsdsh -- sh /x/train.sh")) == []
    instead = only(pbs(trap, "pbsdsh -- python /x/python/train.py"), 7, "wrong", "where python is not found")
    assert instead == "pbsdsh -- /path/to/python /x/python/train.py"


def test_a_module_that_the_tasks_load_has_no_finding():
    lines = ("trap : TERM", "module load torch", "pbsdsh -- /bin/bash -lc 'module load torch; python /x/train.py'")
    assert findings(pbs(*lines)) == []
