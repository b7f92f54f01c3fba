import pytest

from job_scripts import pbs, verify

PBSDSH = 'pbsdsh -- /env/bin/python "$PBS_O_WORKDIR/train.py"'
TRAP = "trap : TERM"
CORRECT = pbs(TRAP, PBSDSH)
AT_HOME = pbs("python train.py", select="1:ncpus=4").replace('cd "$PBS_O_WORKDIR"\n', "")
SCATTER = "#PBS -l place=scatter"
TORCHRUN = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$P train.py"

CASES = {
    "correct job scripts": [CORRECT, pbs("python train.py", select="1:ncpus=4")],
    "several chunks may be on one machine": [
        *(
            (
                CORRECT.replace(f"{SCATTER}\n", place),
                *(2, "risky", "PBS may put several chunks on one machine", SCATTER),
            )
            for place in ("", "#PBS -l place=pack\n")
        ),
        CORRECT.replace("place=scatter", "place=scatter:excl"),
        CORRECT.replace(f"select=2:ncpus=8:mpiprocs=2\n{SCATTER}", "nodes=2:ppn=2"),
        pbs("python train.py", select="ncpus=4"),  # a select without a number
    ],
    "no walltime, or no wait for the tasks of pbsdsh": [
        (CORRECT.replace("#PBS -l walltime=1:00:00\n", ""), 2, "risky", "without a walltime"),
        (pbs(PBSDSH), 6, "risky", "at SIGTERM, pbsdsh ends before its tasks"),
    ],
    "variables that do not exist": [
        (pbs(TRAP, f'echo "${{{name}}}"', PBSDSH), 7, level, f"${name} {found}")
        for name, level, found in (
            ("PBS_NODEID", "wrong", "does not exist: the text is empty"),
            ("PBS_NUM_NODES", "risky", "exists under Torque only"),
            ("PBS_NP", "risky", "exists under Torque only"),
        )
    ],
    "the job starts in the home folder": [
        (AT_HOME, 5, "wrong", "the job starts in the home folder, where train.py", 'cd "$PBS_O_WORKDIR"'),
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
    "one process starts on the first machine": [
        (
            pbs("python train.py"),
            *(6, "wrong", "one process starts, on the first machine, in a job of 2 chunks"),
            'mpirun --hostfile "$PBS_NODEFILE" python train.py',
        ),
        (
            pbs(TORCHRUN),
            *(6, "wrong", "torchrun starts on the first machine only"),
            'pbsdsh -- /path/to/torchrun "$PBS_O_WORKDIR/SCRIPT", with mpiprocs=1 and --rdzv-backend=c10d'
            " --rdzv-id=JOB_ID --rdzv-endpoint=FIRST_MACHINE:PORT, without --node-rank",
        ),
    ],
    "a program of pbsdsh without a path": [
        *(
            (
                pbs(TRAP, f"pbsdsh{options} python /x/python/train.py"),
                *(7, "wrong", "have PATH=/bin:/usr/bin, where python is not found, or is another"),
                f"pbsdsh{options} /path/to/python /x/python/train.py",
            )
            for options in ("", " --", " -n 1 --", " -v")
        ),
        pbs(TRAP, "pbsdsh -- sh /x/train.sh"),  # the shell is on this PATH
    ],
    "tasks of pbsdsh do not get variables and start in the home folder": [
        (
            pbs(TRAP, "export NCCL_DEBUG=INFO", PBSDSH),
            *(7, "wrong", "the tasks of pbsdsh do not get NCCL_DEBUG"),
        ),
        (pbs(TRAP, "module load cuda", PBSDSH), 7, "risky", "do not get what this line sets"),
        (
            pbs(TRAP, "pbsdsh -- /env/bin/python train.py"),
            *(7, "wrong", "tasks of pbsdsh start in the home folder, where train.py is not found"),
            '"$PBS_O_WORKDIR/train.py"',
        ),
        pbs(TRAP, "export A=1", PBSDSH.replace("/env", "/usr/bin/env A=$A /env")),
        pbs(TRAP, PBSDSH, "export A=1", "exit $?"),
        pbs(TRAP, "module load torch", "pbsdsh -- /bin/bash -lc 'module load torch; python /x/train.py'"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])
