from job_scripts import findings, one_finding, pbs, slurm

FILE = '--hostfile "$PBS_NODEFILE" --bind-to none'
OTHER_MACHINES = [
    f"export A=1\nmpirun -np 4 {hosts} --bind-to none {{}} python train.py\n"
    for hosts in ("-H n1:2,n2:2", "--host n1,n2", "--hostfile hosts")
]
TWO = "2:ncpus=8"
OLD_REQUEST = "#!/bin/bash\n#PBS -l nodes=2:ppn=4\n#PBS -l walltime=1:00:00,place=scatter\n"

CASES = {
    "risky: an mpirun that was built without support for PBS starts all processes on the first machine": [
        (6, pbs("mpirun -np 4 --bind-to none python train.py"), 'mpirun --hostfile "$PBS_NODEFILE" ...'),
        pbs(f"mpirun -np 4 {FILE} python train.py"),
        *(  # MPICH
            pbs("export A=1", f"{command} --hostfile $PBS_NODEFILE python train.py", select=TWO)
            for command in ("mpiexec -n 8 --ppn 4", "mpiexec.hydra -n 8", "mpirun -genvall -n 8")
        ),
    ],
    "risky: the node file has 2 lines, one per chunk and mpiprocs: Open MPI refuses 8 processes": [
        (6, pbs(f"mpirun -np 8 {FILE} python train.py", select=TWO), ":mpiprocs=4 in line 2")
    ],
    "risky: the node file has 8 lines": [
        (4, f"{OLD_REQUEST}mpirun {FILE} -np 16 python /x/a.py\n", ":ppn=8 in line 2")
    ],
    "risky: Open MPI may fill the cores of the first machine first": [
        (6, pbs(f"mpirun -np 2 {FILE} python train.py", select=TWO), "mpirun --map-by ppr:1:node ..."),
        pbs(f"mpirun -np 2 {FILE} --map-by ppr:1:node python train.py", select=TWO),
    ],
    "risky: Open MPI binds each process to one core": [
        (1, "mpirun -np 2 python train.py\n", "mpirun --bind-to none ..."),
        (1, "mpirun -np 2 python train.py --depth 50 --env X\n"),  # options of the script
        "mpirun -np 4 --bind-to none python train.py\n",
        "mpirun -np 4 --map-by slot:PE=4 python train.py\n",
    ],
    "risky: Open MPI does not pass A to processes on other machines": [
        *((1, text.format("-x PATH")) for text in OTHER_MACHINES),
        *(text.format(option) for text in OTHER_MACHINES for option in ("-x A -x PATH", "-genvall")),
    ],
    "risky: on other machines, python is the one on the PATH of an ssh login": [
        (2, text.format("-x A"), text.format("-x A").splitlines()[1].replace("python", "/path/to/python"))
        for text in OTHER_MACHINES
    ],
    "risky: the job has 2 tasks: Open MPI refuses 8 processes": [
        (9, slurm("mpirun -np 8 --bind-to none python train.py")),
        slurm("mpirun -np 8 --bind-to none python train.py", ntasks_per_node=4),
    ],
}

test_the_only_finding_in_a_script = one_finding(CASES)


def test_a_select_of_no_chunk_is_no_error():
    findings(pbs("mpirun -np 4 --hostfile $PBS_NODEFILE python /x/train.py", select="0:ncpus=4:mpiprocs=2"))
