from rankzero.commands.jobs.check.bash import commands_of


def command(text):
    return commands_of(text)[0]


def test_the_launchers_are_found_from_the_outermost_on():
    expected = {
        **dict.fromkeys(("python train.py", "python train.py --launcher torchrun"), ()),
        **dict.fromkeys(("srun python train.py", "srun --job-name srun python train.py"), ("srun",)),
        "/usr/bin/srun --nodes=2 /env/bin/torchrun train.py": ("srun", "torchrun"),
        "python -m torch.distributed.run train.py": ("torchrun",),
        "python -u -m torch.distributed.launch train.py": ("torchrun",),
        "mpiexec.hydra -n 2 python train.py": ("mpirun",),
        "pbsdsh -- /env/bin/torchrun train.py": ("pbsdsh", "torchrun"),
    }
    assert {text: tuple(command(text).launchers) for text in expected} == expected


def test_whether_a_command_trains():
    training = (
        *("python train.py", "/env/bin/python3.11 -u train.py", "python -m rankzero fit", "$PYTHON train.py"),
        *("${PYTHON_EXE} -u train.py", "torchrun train.py", "srun ./run.sh", "srun bash run.sh"),
        "accelerate launch train.py",
    )
    other = (
        *("bash run.sh", "srun hostname", "python -m pip install x", "python -m venv env", "python -c 'import torch'"),
        *("pip install -r x.py", "cp train.py x", "A=1"),
    )
    expected = dict.fromkeys(training, True) | dict.fromkeys(other, False)
    assert {text: command(text).trains for text in expected} == expected


def test_long_and_short_options_belong_to_their_launcher():
    found = command("srun -N2 --ntasks 4 torchrun --nnodes=2 --nproc_per_node 8 train.py --nodes 3 --x=1")
    assert found.option("srun", "--nodes", "-N").text == "2"
    assert found.option("srun", "--ntasks", "-n").text == "4"
    assert found.option("srun", "--nnodes") is None
    assert found.option("torchrun", "--nproc-per-node").text == "8"
    assert found.option("torchrun", "--nodes") is None
    assert found.option("script", "--nodes").text == "3"
    assert found.option("mpirun", "-np") is None
    for value in ("-c8", "-c 8"):
        assert command(f"srun {value} python train.py").option("srun", "--cpus-per-task", "-c").text == "8"
    assert command("mpirun -np 8 python train.py").option("mpirun", "-n", "-np").text == "8"
