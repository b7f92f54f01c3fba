import pytest

from job_scripts import findings, only, pbs, slurm

FILE = '--hostfile "$PBS_NODEFILE" --bind-to none'


def test_a_correct_mpirun_has_no_findings():
    assert findings(pbs(f"mpirun -np 4 {FILE} python train.py")) == []
    assert findings(pbs(f"mpirun -np 2 {FILE} --map-by ppr:1:node python train.py", select="2:ncpus=8")) == []
    assert findings("mpirun -np 4 --bind-to none python train.py\n") == []
    assert findings("mpirun -np 4 --map-by slot:PE=4 python train.py\n") == []


def test_mpirun_without_a_hostfile_is_risky_under_pbs():
    found = "an mpirun that was built without support for PBS starts all processes on the first machine"
    instead = only(pbs("mpirun -np 4 --bind-to none python train.py"), 6, "risky", found)
    assert instead == 'mpirun --hostfile "$PBS_NODEFILE" ...'


def test_more_processes_than_the_node_file_has_lines():
    found = "the node file has 2 lines, one per chunk and mpiprocs: Open MPI refuses 8 processes"
    assert (
        only(pbs(f"mpirun -np 8 {FILE} python train.py", select="2:ncpus=8"), 6, "risky", found)
        == ":mpiprocs=4 in line 2"
    )


def test_both_processes_on_the_first_machine():
    found = "Open MPI may fill the cores of the first machine first"
    instead = only(pbs(f"mpirun -np 2 {FILE} python train.py", select="2:ncpus=8"), 6, "risky", found)
    assert instead == "mpirun --map-by ppr:1:node ..."


def test_processes_are_bound_to_cores():
    instead = only("mpirun -np 2 python train.py\n", 1, "risky", "Open MPI binds each process to one core")
    assert instead == "mpirun --bind-to none ..."


@pytest.mark.parametrize("hosts", ["-H n1:2,n2:2", "--host n1,n2", "--hostfile hosts"])
def test_what_mpirun_does_not_pass_to_other_machines(hosts):
    text = f"export A=1\nmpirun -np 4 {hosts} --bind-to none {{}} python train.py\n"
    only(text.format("-x PATH"), 1, "risky", "Open MPI does not pass A to processes on other machines")
    found = "on other machines, python is the one on the PATH of an ssh login"
    assert " /path/to/python train.py" in only(text.format("-x A"), 2, "risky", found)
    assert findings(text.format("-x A -x PATH")) == []
    assert findings(text.format("-genvall")) == []


@pytest.mark.parametrize("command", ["mpiexec -n 8 --ppn 4", "mpiexec.hydra -n 8", "mpirun -genvall -n 8"])
def test_mpich_needs_none_of_these_options(command):
    assert findings(pbs("export A=1", f"{command} --hostfile $PBS_NODEFILE python train.py", select="2:ncpus=8")) == []


def test_more_processes_than_tasks_of_slurm():
    command = "mpirun -np {} --bind-to none python train.py"
    only(slurm(command.format(8)), 9, "risky", "the job has 2 tasks: Open MPI refuses 8 processes")
    assert findings(slurm(command.format(8), ntasks_per_node=4)) == []


def test_options_of_the_script_do_not_name_the_mpi():
    only("mpirun -np 2 python train.py --depth 50 --env X\n", 1, "risky", "Open MPI binds each process to one core")


def test_the_old_form_of_a_pbs_request_is_read():
    text = "#!/bin/bash\n#PBS -l nodes=2:ppn=4\n#PBS -l walltime=1:00:00,place=scatter\n"
    command = 'mpirun --bind-to none --hostfile "$PBS_NODEFILE" -np 16 python /x/train.py\n'
    assert only(text + command, 4, "risky", "the node file has 8 lines") == ":ppn=8 in line 2"


def test_a_select_of_no_chunk_is_no_error():
    findings(pbs("mpirun -np 4 --hostfile $PBS_NODEFILE python /x/train.py", select="0:ncpus=4:mpiprocs=2"))
