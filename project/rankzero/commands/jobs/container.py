"""The command that starts a program in a container. Does not import torch."""

import re
import shlex
from pathlib import Path

from rankzero.commands.jobs.request.job_request import JobRequest
from rankzero.distributed.connections.key import KEY_VARIABLE
from rankzero.messages import RequestError


def container_prefix(request: JobRequest, folder: Path, root: Path) -> str:
    """Returns the command, for a shell, that precedes a program in its container; empty without a container.

    Args:
        request: The job.
        folder: Folder of the job, mounted under the same path.
        root: Folder of the runs, mounted under the same path.

    Raises:
        RequestError: A folder with this name cannot be mounted.
    """
    if request.image is None:
        return ""
    folders = list(dict.fromkeys(map(str, (folder, root))))
    for path in folders:
        if not path.isprintable() or re.search("[:,]", path):
            found = "a path with a colon, a comma or a control character cannot be mounted"
            raise RequestError(f"the folder {path!r} in a container", found, "use another folder")
    if request.scheduler == "docker":
        return _docker(request, folders, folder)
    gpus = ["--nv"] if request.gpus_per_device else []
    binds = [f"--bind={path}" for path in folders]
    return shlex.join(["apptainer", "exec", *gpus, *binds, f"--pwd={folder}", "--", request.image]) + " "


def _docker(request: JobRequest, folders: list[str], folder: Path) -> str:
    options = ["--rm", "--init", "--network=host", "--ipc=host", "--env=HOME=/tmp", f"--env={KEY_VARIABLE}"]
    if request.gpus_per_device:
        options.append(f"--gpus={request.devices}")
    if request.memory:
        options.append(f"--memory={request.memory.lower()}")
    if request.cpus_per_device:
        options.append(f"--cpus={request.cpus_per_device * request.devices}")
        options.append(f"--env=OMP_NUM_THREADS={request.cpus_per_device}")
    options += [f"--volume={path}:{path}" for path in folders]
    # Files of the run belong to the user, not to root.
    user = '--user="$(id -u):$(id -g)"'
    return f"docker run {user} {shlex.join([*options, f'--workdir={folder}', '--', request.image or ''])} "
