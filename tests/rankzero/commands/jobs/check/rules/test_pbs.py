import pytest

from job_scripts import findings, only, pbs

PBSDSH = 'pbsdsh -- /env/bin/python "$PBS_O_WORKDIR/train.py"'
TRAP = "trap : TERM"
AT_HOME = pbs("python train.py", select="1:ncpus=4").replace('cd "$PBS_O_WORKDIR"\n', "")


@pytest.mark.parametrize("place", ["", "#PBS -l place=pack\n"])
def test_several_chunks_may_be_on_one_machine(place):
    text = pbs(TRAP, PBSDSH).replace("#PBS -l place=scatter\n", place)
    assert only(text, 2, "risky", "PBS may put several chunks on one machine") == "#PBS -l place=scatter"


def test_a_job_without_a_walltime_or_without_a_wait_for_the_tasks_of_pbsdsh():
    only(pbs(TRAP, PBSDSH).replace("#PBS -l walltime=1:00:00\n", ""), 2, "risky", "without a walltime")
    only(pbs(PBSDSH), 6, "risky", "at SIGTERM, pbsdsh ends before its tasks")


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
    found = "the job starts in the home folder, where train.py"
    only(AT_HOME, 5, "wrong", found, 'cd "$PBS_O_WORKDIR"')


def test_one_process_starts_on_the_first_machine():
    instead = only(pbs("python train.py"), 6, "wrong", "one process starts, on the first machine, in a job of 2 chunks")
    assert instead == 'mpirun --hostfile "$PBS_NODEFILE" python train.py'
    torchrun = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$P train.py"
    instead = only(pbs(torchrun), 6, "wrong", "torchrun starts on the first machine only")
    assert instead.startswith('pbsdsh -- /path/to/torchrun "$PBS_O_WORKDIR/SCRIPT", with mpiprocs=1 and --rdzv-backend')


@pytest.mark.parametrize("options", ["", " --", " -n 1 --", " -v"])
def test_a_program_of_pbsdsh_without_a_path_is_wrong(options):
    found = "have PATH=/bin:/usr/bin, where python is not found, or is another"
    instead = f"pbsdsh{options} /path/to/python /x/python/train.py"
    only(pbs(TRAP, f"pbsdsh{options} python /x/python/train.py"), 7, "wrong", found, instead)


def test_tasks_of_pbsdsh_do_not_get_variables_and_start_in_the_home_folder():
    only(pbs(TRAP, "export NCCL_DEBUG=INFO", PBSDSH), 7, "wrong", "the tasks of pbsdsh do not get NCCL_DEBUG")
    only(pbs(TRAP, "module load cuda", PBSDSH), 7, "risky", "do not get what this line sets")
    found = "tasks of pbsdsh start in the home folder, where train.py is not found"
    only(pbs(TRAP, "pbsdsh -- /env/bin/python train.py"), 7, "wrong", found, '"$PBS_O_WORKDIR/train.py"')


CORRECT = {
    "correct job scripts": [pbs(TRAP, PBSDSH), pbs("python train.py", select="1:ncpus=4")],
    "a select without a number": [pbs("python train.py", select="ncpus=4")],
    "scattered chunks": [
        pbs(TRAP, PBSDSH).replace("place=scatter", "place=scatter:excl"),
        pbs(TRAP, PBSDSH).replace("select=2:ncpus=8:mpiprocs=2\n#PBS -l place=scatter", "nodes=2:ppn=2"),
    ],
    "a job that needs no folder, or changes to it": [
        *(
            AT_HOME.replace("python train.py", command)
            for command in (
                *("python /x/train.py", "python $HOME/train.py", "python -m rankzero fit"),
                *("cd ~/x; python train.py", "ssh n1 'cd x; python train.py'"),
            )
        ),
        AT_HOME.replace("#PBS -l place", "#PBS -l wd\n#PBS -l place"),
        pbs(TRAP, "pbsdsh -- /bin/bash -lc 'cd /x && /env/bin/python train.py'"),
    ],
    "variables that the tasks get, or that are set later": [
        pbs(TRAP, "export A=1", PBSDSH.replace("/env", "/usr/bin/env A=$A /env")),
        pbs(TRAP, PBSDSH, "export A=1", "exit $?"),
        pbs(TRAP, "module load torch", "pbsdsh -- /bin/bash -lc 'module load torch; python /x/train.py'"),
    ],
    "the shell, which is on the PATH of pbsdsh": [pbs(TRAP, "pbsdsh -- sh /x/train.sh")],
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_finding(name):
    assert [findings(text) for text in CORRECT[name]] == [[]] * len(CORRECT[name])
