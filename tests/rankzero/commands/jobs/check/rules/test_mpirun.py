import pytest

from job_scripts import findings, pbs, slurm, verify

FILE = '--hostfile "$PBS_NODEFILE" --bind-to none'
BOUND = "Open MPI binds each process to one core"
ON_SLURM = "mpirun -np 8 --bind-to none python train.py"
OTHER_MACHINES = [
    f"export A=1\nmpirun -np 4 {hosts} --bind-to none {{}} python train.py\n"
    for hosts in ("-H n1:2,n2:2", "--host n1,n2", "--hostfile hosts")
]
TWO_CHUNKS = "2:ncpus=8"
OLD_REQUEST = "#!/bin/bash\n#PBS -l nodes=2:ppn=4\n#PBS -l walltime=1:00:00,place=scatter\n"

CASES = {
    "a correct mpirun": [
        pbs(f"mpirun -np 4 {FILE} python train.py"),
        pbs(f"mpirun -np 2 {FILE} --map-by ppr:1:node python train.py", select=TWO_CHUNKS),
        "mpirun -np 4 --bind-to none python train.py\n",
        "mpirun -np 4 --map-by slot:PE=4 python train.py\n",
    ],
    "no hostfile under PBS": [
        (
            pbs("mpirun -np 4 --bind-to none python train.py"),
            *(6, "risky", "an mpirun that was built without support for PBS starts all processes on the first machine"),
            'mpirun --hostfile "$PBS_NODEFILE" ...',
        )
    ],
    "more processes than the node file has lines": [
        (
            pbs(f"mpirun -np 8 {FILE} python train.py", select=TWO_CHUNKS),
            *(6, "risky", "the node file has 2 lines, one per chunk and mpiprocs: Open MPI refuses 8 processes"),
            ":mpiprocs=4 in line 2",
        ),
        (
            f'{OLD_REQUEST}mpirun --bind-to none --hostfile "$PBS_NODEFILE" -np 16 python /x/train.py\n',
            *(4, "risky", "the node file has 8 lines", ":ppn=8 in line 2"),
        ),
    ],
    "both processes on the first machine": [
        (
            pbs(f"mpirun -np 2 {FILE} python train.py", select=TWO_CHUNKS),
            *(6, "risky", "Open MPI may fill the cores of the first machine first", "mpirun --map-by ppr:1:node ..."),
        )
    ],
    "processes are bound to cores": [
        ("mpirun -np 2 python train.py\n", 1, "risky", BOUND, "mpirun --bind-to none ..."),
        ("mpirun -np 2 python train.py --depth 50 --env X\n", 1, "risky", BOUND),  # options of the script
    ],
    "what mpirun does not pass to other machines": [
        case
        for text in OTHER_MACHINES
        for case in (
            (text.format("-x PATH"), 1, "risky", "Open MPI does not pass A to processes on other machines"),
            (
                text.format("-x A"),
                *(2, "risky", "on other machines, python is the one on the PATH of an ssh login"),
                text.format("-x A").splitlines()[1].replace("python", "/path/to/python"),
            ),
            text.format("-x A -x PATH"),
            text.format("-genvall"),
        )
    ],
    "MPICH needs none of these options": [
        pbs("export A=1", f"{command} --hostfile $PBS_NODEFILE python train.py", select=TWO_CHUNKS)
        for command in ("mpiexec -n 8 --ppn 4", "mpiexec.hydra -n 8", "mpirun -genvall -n 8")
    ],
    "more processes than tasks of Slurm": [
        (slurm(ON_SLURM), 9, "risky", "the job has 2 tasks: Open MPI refuses 8 processes"),
        slurm(ON_SLURM, ntasks_per_node=4),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_the_findings(name):
    verify(CASES[name])


def test_a_select_of_no_chunk_is_no_error():
    findings(pbs("mpirun -np 4 --hostfile $PBS_NODEFILE python /x/train.py", select="0:ncpus=4:mpiprocs=2"))
