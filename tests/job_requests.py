"""Requests of jobs, from the command line of `submit` or for a script."""

from dataclasses import replace
from pathlib import Path

from rankzero.jobs.job_request import job_request
from rankzero.jobs.options import FORMS, JobRequest, accepted_flags, parse
from rankzero.jobs.script import render
from running import refusal_of

SLURM = ("--scheduler", "slurm", "--name", "x")
MPIRUN = ("--scheduler", "mpirun", "--name", "x")

IN_CONTAINERS = "docker", "apptainer", "kubernetes"


def request(*tokens):
    """Returns the job that a command line requests."""
    return job_request(parse(tokens))


def refusal(*tokens):
    """Returns the three parts of the error that a command line gives."""
    error = refusal_of(request, *tokens)
    return error.asked, error.found, error.instead


FOLDER = Path("/home/user/project")
PROGRAM = ["/home/user/project/.venv/bin/python", "/home/user/project/launch/fit.py"]
IMAGE_PROGRAM = ["python", "-m", "rankzero", "fit"]
ARGUMENTS = ("--model", "ResNet", "--model.hidden_sizes", "[8, 8]")

OPTIONS = {"root": "my runs", "nodes": 2, "devices": 4, "cpus_per_device": 8, "gpus_per_device": 1, "memory": "64G"}
OPTIONS |= {"time": 7200, "partition": "gpu", "account": "my project", "constraint": "a100", "exclude": "n7,n8"}
OPTIONS |= {"mail": "me@example.org", "dependency": "afterok:123", "modules": ("cuda/12.4", "gcc"), "venv": ".venv"}
OPTIONS |= {"setup": ("source settings.sh", "export NCCL_DEBUG=INFO"), "hosts": ("n1", "user@n2"), "volume": "claim"}
EXTRA = {
    "slurm": ("#SBATCH --exclusive",),
    "pbs": ("#PBS -r n",),
    "lsf": ("#BSUB -x",),
    "flux": ("#flux: --exclusive",),
}


def _cases():
    """Yields the names and requests of the tested scripts."""
    for scheduler, forms in FORMS.items():
        for form in forms or (None,):
            start = f"{scheduler}-{form}" if form else scheduler
            accepted = accepted_flags(scheduler, has_image=scheduler in IN_CONTAINERS)
            needed = {"ssh": {"hosts": ("n1",)}, "docker": {"image": "rankzero"}, "apptainer": {"image": "image.sif"}}
            needed["kubernetes"] = {"image": "rankzero"}
            minimal = JobRequest(scheduler, "my-run", form, **needed.get(scheduler, {}), arguments=ARGUMENTS)
            values = {name: value for name, value in OPTIONS.items() if name in accepted}
            values["extra"] = EXTRA.get(scheduler, ())
            values["nodes"] = 1 if scheduler == "local" else 2
            complete = replace(minimal, **values)
            yield f"{start}-minimal", minimal
            yield f"{start}-all", complete
            if "array" in accepted:
                sweep = (*ARGUMENTS, "--seed={array_index}", "--model.lr", "0.{array_index}")
                yield (
                    f"{start}-array",
                    replace(complete, array="1-3" if scheduler == "lsf" else "0-3", dependency=None, arguments=sweep),
                )
            if "hostfile" in accepted:
                yield f"{start}-hostfile", replace(complete, hostfile="my hosts.txt")
            if scheduler in IN_CONTAINERS:
                yield f"{start}-one-machine", replace(complete, hosts=(), nodes=1)
            else:
                yield f"{start}-image", replace(complete, image="image.sif", venv=None, gpus_per_device=1)


CASES = dict(_cases())


def script(request):
    return render(request, IMAGE_PROGRAM if request.image else PROGRAM, FOLDER)
