from job_scripts import one_finding, pbs

PBSDSH = 'pbsdsh -- /env/bin/python "$PBS_O_WORKDIR/train.py"'
TRAP = "trap : TERM"
CORRECT = pbs(TRAP, PBSDSH)
AT_HOME = pbs("python train.py", select="1:ncpus=4").replace('cd "$PBS_O_WORKDIR"\n', "")
SCATTER = "#PBS -l place=scatter"
TORCHRUN = "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$P train.py"
ON_EACH = 'pbsdsh -- /path/to/torchrun "$PBS_O_WORKDIR/SCRIPT", with mpiprocs=1 and --rdzv-backend=c10d'
ON_EACH += " --rdzv-id=JOB_ID --rdzv-endpoint=FIRST_MACHINE:PORT, without --node-rank"

CASES = {
    "$PBS_NODEID does not exist: the text is empty": [(7, pbs(TRAP, 'echo "${PBS_NODEID}"', PBSDSH))],
    "the job starts in the home folder, where train.py": [
        (5, AT_HOME, 'cd "$PBS_O_WORKDIR"'),
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
    "one process starts, on the first machine, in a job of 2 chunks": [
        (6, pbs("python train.py"), 'mpirun --hostfile "$PBS_NODEFILE" python train.py'),
        pbs("python train.py", select="1:ncpus=4"),
    ],
    "torchrun starts on the first machine only": [(6, pbs(TORCHRUN), ON_EACH)],
    "have PATH=/bin:/usr/bin, where python is not found, or is another": [
        *(
            (7, pbs(TRAP, f"pbsdsh{options} python /x/python/a.py"), f"pbsdsh{options} /path/to/python /x/python/a.py")
            for options in ("", " --", " -n 1 --", " -v")
        ),
        pbs(TRAP, "pbsdsh -- sh /x/train.sh"),  # the shell is on this PATH
    ],
    "the tasks of pbsdsh do not get NCCL_DEBUG": [
        (7, pbs(TRAP, "export NCCL_DEBUG=INFO", PBSDSH)),
        pbs(TRAP, "export A=1", PBSDSH.replace("/env", "/usr/bin/env A=$A /env")),
        pbs(TRAP, PBSDSH, "export A=1", "exit $?"),
    ],
    "tasks of pbsdsh start in the home folder, where train.py is not found": [
        (7, pbs(TRAP, "pbsdsh -- /env/bin/python train.py"), '"$PBS_O_WORKDIR/train.py"')
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)
