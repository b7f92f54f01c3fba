import pytest

from job_scripts import findings, only, slurm
from rankzero.commands.jobs.check.checker import check

OPTIONS = "--cpus-per-task=4 --kill-on-bad-exit=1"
SRUN = f"srun {OPTIONS} python train.py"


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("time", "without a time limit, the default of the partition applies"),
        ("signal", "no signal precedes the time limit"),
        ("requeue", "whether the job is requeued after the loss of a node depends on the site"),
        ("open_mode", "a requeued job overwrites the output of its earlier attempt"),
    ],
)
def test_what_a_run_needs_to_survive_a_time_limit(option, found):
    name = f"#SBATCH --{option.replace('_', '-')}"
    assert only(slurm(SRUN, **{option: None}), 2, "risky", found).startswith(name)


def test_a_job_that_is_not_requeued_needs_no_appended_log():
    assert findings(slurm(SRUN, requeue=None, open_mode=None, no_requeue="")) == []


def test_a_script_that_trains_nothing_needs_no_options():
    assert findings("#!/bin/bash\n#SBATCH --nodes=1\ncp -r data /scratch\n") == []


def test_a_task_has_one_core_by_default():
    only(slurm("srun -K python train.py", cpus_per_task=None), 2, "risky", "each task gets one core, unless")
    assert findings(slurm("srun -K python train.py", cpus_per_task=None, exclusive="")) == []
    assert findings(slurm("srun -K -c 8 python train.py", cpus_per_task=None)) == []


def test_tasks_without_a_number_per_node():
    found = "Slurm may put the 8 tasks unevenly on the nodes"
    srun = f"{SRUN} --epochs 3"
    assert only(slurm(srun, ntasks_per_node=None, ntasks=8), 8, "risky", found) == "#SBATCH --ntasks-per-node=4"
    instead = only(slurm(srun, nodes=None, ntasks_per_node=None, ntasks=8), 7, "risky", found)
    assert instead == "#SBATCH --nodes=N, and #SBATCH --ntasks-per-node=N"
    for nodes, tasks in ((1, 4), (4, 4)):
        assert findings(slurm(srun, nodes=nodes, ntasks_per_node=None, ntasks=tasks)) == []


def test_slurm_does_not_create_the_folder_of_the_output(cwd):
    text = slurm(SRUN, output="logs/%j.out")
    assert only(text, 9, "risky", "the folder logs does not exist here") == "mkdir -p logs, before sbatch"
    (cwd / "logs").mkdir()
    assert findings(text) == []
    for output in ("%j.out", "x.out", "%x/%j.out", "/tmp/x.out"):
        assert findings(slurm(SRUN, output=output)) == []


def test_a_signal_that_the_trap_of_the_script_does_not_get():
    trap = "trap 'kill -USR1 $!' USR1"
    found = "Slurm sends USR1 to the processes of srun only: the trap in line 9 never runs"
    assert only(slurm(trap, SRUN), 6, "wrong", found) == "#SBATCH --signal=B:USR1@120"
    found = "bash runs the trap of line 9 only after this command has ended"
    assert only(slurm(trap, SRUN, signal="B:USR1@120"), 10, "wrong", found) == f"{SRUN} &, then wait"
    assert findings(slurm(trap, f"{SRUN} &", "wait $!", "wait $!", signal="B:USR1@120")) == []
    assert findings(slurm("trap 'rm -r tmp' EXIT", f"{SRUN} || exit 1")) == []


def test_without_srun_a_signal_needs_a_trap():
    assert only(slurm("python train.py", nodes=1, signal=None), 2, "risky", "no signal").endswith("passes it on")


def test_a_signal_for_the_script_needs_a_trap():
    text = slurm(SRUN, signal="B:USR1@120")
    assert only(text, 6, "wrong", "no trap handles USR1") == "#SBATCH --signal=USR1@120, or a trap"
    assert findings(slurm(f"exec {SRUN}", signal="B:USR1@120")) == []


@pytest.mark.parametrize("name", ["output", "error"])
def test_a_variable_in_a_directive_is_wrong(name):
    (found,) = check(slurm(SRUN, **{name: "$HOME/%j.out"}))
    assert (found.line, found.level) == (9, "wrong") and "does not expand $HOME" in found.found


def test_members_of_an_array_need_files_of_their_own():
    only(slurm(SRUN, array="0-3", output="sweep.out"), 10, "risky", "all members of the job array write to this file")
    assert findings(slurm(SRUN, array="0-3", output="%A_%4a.out")) == []
    only(slurm(SRUN, array="0-3", output="%x-%A.out"), 10, "risky", "all members of the job array")


@pytest.mark.parametrize("name", ["mem", "mem_per_gpu"])
def test_memory_without_a_unit_is_in_megabytes(name):
    option = name.replace("_", "-")
    assert only(slurm(SRUN, **{name: "64"}), 9, "risky", "megabytes: 64 MB") == f"#SBATCH --{option}=64G"
    assert findings(slurm(SRUN, **{name: "64G"})) == findings(slurm(SRUN, **{name: "64000"})) == []
    assert findings(slurm(SRUN, **{name: "0"})) == []
