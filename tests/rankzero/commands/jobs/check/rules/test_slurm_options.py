import pytest

from job_scripts import findings, only, slurm, verify

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"
USR1 = "#SBATCH --signal=USR1@120, if the program saves and stops at SIGUSR1, as fit.py does"
PASSED_ON = "; without srun, B:USR1@120 and a trap that passes it on"
TRAP = "trap 'kill -USR1 $!' USR1"
UNEVEN = "Slurm may put the 8 tasks unevenly on the nodes"
TASKS = {"ntasks_per_node": None, "ntasks": 8}
ONE_FILE = "all members of the job array write to this file"

CASES = {
    "what a run needs to survive a time limit": [
        (slurm(SRUN, **{option: None}), 2, "risky", found, instead)
        for option, found, instead in (
            ("time", "without a time limit, the default of the partition applies", "#SBATCH --time=HH:MM:SS"),
            ("signal", "no signal precedes the time limit", USR1),
            (
                *("requeue", "whether the job is requeued after the loss of a node depends on the site"),
                "#SBATCH --requeue",
            ),
            ("open_mode", "a requeued job overwrites the output of its earlier attempt", "#SBATCH --open-mode=append"),
        )
    ],
    "a job that is not requeued, or trains nothing": [
        slurm(SRUN, requeue=None, open_mode=None, no_requeue=""),
        "#!/bin/bash\n#SBATCH --nodes=1\ncp -r data /scratch\n",
    ],
    "a task has one core by default": [
        (slurm("srun -K python train.py", cpus_per_task=None), 2, "risky", "each task gets one core, unless"),
        slurm("srun -K python train.py", cpus_per_task=None, exclusive=""),
        slurm("srun -K -c 8 python train.py", cpus_per_task=None),
    ],
    "tasks without a number per node": [
        (slurm(f"{SRUN} --epochs 3", **TASKS), 8, "risky", UNEVEN, "#SBATCH --ntasks-per-node=4"),
        (
            slurm(f"{SRUN} --epochs 3", nodes=None, **TASKS),
            *(7, "risky", UNEVEN, "#SBATCH --nodes=N, and #SBATCH --ntasks-per-node=N"),
        ),
        *(slurm(f"{SRUN} --epochs 3", **TASKS | {"nodes": nodes, "ntasks": 4}) for nodes in (1, 4)),
    ],
    "the folder of the output": [
        slurm(SRUN, output=output) for output in ("%j.out", "x.out", "%x/%j.out", "/tmp/x.out")
    ],
    "a signal that the trap of the script does not get": [
        (
            slurm(TRAP, SRUN),
            *(6, "wrong", "Slurm sends USR1 to the processes of srun only: the trap in line 9 never runs"),
            "#SBATCH --signal=B:USR1@120",
        ),
        (
            slurm(TRAP, SRUN, signal="B:USR1@120"),
            *(10, "wrong", "bash runs the trap of line 9 only after this command has ended", f"{SRUN} &, then wait"),
        ),
        slurm(TRAP, f"{SRUN} &", "wait $!", "wait $!", signal="B:USR1@120"),
        slurm("trap 'rm -r tmp' EXIT", f"{SRUN} || exit 1"),
    ],
    "a signal for the script needs a trap": [
        (slurm("python train.py", nodes=1, signal=None), 2, "risky", "no signal", USR1 + PASSED_ON),
        (
            slurm(SRUN, signal="B:USR1@120"),
            *(6, "wrong", "no trap handles USR1", "#SBATCH --signal=USR1@120, or a trap"),
        ),
        slurm(f"exec {SRUN}", signal="B:USR1@120"),
    ],
    "a variable in a directive": [
        (slurm(SRUN, **{name: "$HOME/%j.out"}), 9, "wrong", "does not expand $HOME") for name in ("output", "error")
    ],
    "members of an array need files of their own": [
        (slurm(SRUN, array="0-3", output="sweep.out"), 10, "risky", ONE_FILE),
        (slurm(SRUN, array="0-3", output="%x-%A.out"), 10, "risky", ONE_FILE),
        slurm(SRUN, array="0-3", output="%A_%4a.out"),
    ],
    "memory without a unit is in megabytes": [
        case
        for name in ("mem", "mem_per_gpu")
        for case in (
            (
                slurm(SRUN, **{name: "64"}),
                *(9, "risky", "megabytes: 64 MB", f"#SBATCH --{name.replace('_', '-')}=64G"),
            ),
            *(slurm(SRUN, **{name: value}) for value in ("64G", "64000", "0")),
        )
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])


def test_slurm_does_not_create_the_folder_of_the_output(cwd):
    text = slurm(SRUN, output="logs/%j.out")
    only(text, 9, "risky", "the folder logs does not exist here", "mkdir -p logs, before sbatch")
    (cwd / "logs").mkdir()
    assert findings(text) == []
