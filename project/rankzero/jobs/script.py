"""Renders the script of a job. Does not import torch."""

import re
import shlex
import zlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import jinja2
import yaml

from rankzero.distributed.connections.key import KEY_VARIABLE
from rankzero.jobs.options import QUEUING, JobRequest
from rankzero.messages import RequestError

TEMPLATES = Path(__file__).parent / "templates"

FIRST_PORT, PORTS = 20000, 12000
"""Rendezvous ports are below 32768, where Linux begins to choose ports for other connections."""

WARNING_SECONDS = 120
"""Time before the limit at which Slurm signals a job whose own clock has not stopped it; less if the limit is short."""

ARRAY_INDEX = "{array_index}"
"""Text in fit's arguments that the index of the member of a job array replaces."""


def render(request: JobRequest, program: Sequence[str], folder: Path) -> str:
    """Returns the script of a job.

    Raises:
        RequestError: A value cannot be passed to the scheduler or the container.
    """
    if request.scheduler == "kubernetes":
        folder = Path("/workspace")
    root = folder / request.root
    is_array = request.array is not None
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    values |= {
        "folder": str(folder),
        "root": str(root),
        "script": str(script_path(root, request.name)),
        "log": _log_for_directive(request, root),
        "select": _select(request),
        "python": program[0],
        "program": shlex.join(program[1:]),
        "arguments": fit_arguments(request, root),
        "hostfile": str(folder / request.hostfile) if request.hostfile else None,
        "container": _container_prefix(request, folder, root),
        "port": FIRST_PORT + zlib.crc32(str(root / request.name).encode(errors="surrogateescape")) % PORTS,
        "first_host": request.hosts[0].rpartition("@")[2] if request.hosts else "127.0.0.1",
        "warning": WARNING_SECONDS if request.time is None else min(WARNING_SECONDS, request.time // 20),
        "first_port": FIRST_PORT,
        "ports": PORTS,
    }
    values["stopped"] = (re.findall("stopped_exit_code[= ]([0-9]+)", " ".join(request.arguments)) or [75])[-1]
    text, end = str(values), "END_OF_TASK"  # ends the lines of a task in the script; no value contains it
    while end in text:
        end += "_"
    values["end"] = end
    name = "/".join(filter(None, (request.scheduler, request.form)))
    if request.scheduler in ("docker", "apptainer"):
        name = "ssh" if request.hosts else "local"
    suffix = "yaml" if request.scheduler == "kubernetes" else "sh"
    return _environment(is_array).get_template(f"{name}.{suffix}.j2").render(values)


def fit_arguments(request: JobRequest, root: Path) -> list[str]:
    """Returns the arguments of `fit` in a job: those that follow from the request, then the user's own."""
    name = f"{request.name}-{ARRAY_INDEX}" if request.array else request.name
    arguments = [f"--name={name}", f"--root={root}", f"--nodes={request.nodes}", f"--devices={request.devices}"]
    if request.scheduler not in QUEUING and request.time:
        arguments.append(f"--time_limit={request.time}s")
    given = {token.partition("=")[0] for token in request.arguments}
    if request.gpus_per_device and not given & {"--accelerator", "--trainer.accelerator"}:
        arguments.append("--accelerator=gpu")  # `auto` would train on the CPU if no GPU is visible
    if request.scheduler == "pbs":
        arguments.append("--requeue=never")  # the script submits itself again; PBS permits qrerun to operators only
    if request.scheduler == "kubernetes" and "--start_timeout" not in given:
        arguments.append("--start_timeout=1h")  # a machine may be scheduled much later than the others
    return [*arguments, *request.arguments]


def script_path(root: Path, name: str, scheduler: str = "") -> Path:
    """Returns the file of a job's script, beside the run's directory."""
    return root / f"{name}.job.{'yaml' if scheduler == 'kubernetes' else 'sh'}"


def log_path(root: Path, name: str) -> Path:
    """Returns the file with the output of a job, beside the run's directory."""
    return root / f"{name}.job.log"


def slurm_value(text: str) -> str:
    """Returns a value for a line `#SBATCH --option=VALUE`; sbatch removes the quotes and expands nothing (22.05)."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_./:,=@%+&|*~-]+", text)
    return text if is_plain else '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


def pbs_job_name(name: str) -> str:
    """Returns a name that PBS accepts for a job: letters, digits, `_`, `-` and `.`."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def clock(seconds: int) -> str:
    """Returns a duration as `hours:minutes:seconds`, which Slurm and PBS accept."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def hours_and_minutes(seconds: int) -> str:
    """Returns a duration as `hours:minutes`, rounded up, which LSF accepts."""
    return f"{-(-seconds // 60) // 60}:{-(-seconds // 60) % 60:02d}"


def yaml_text(text: str) -> str:
    """Returns a text as a value of YAML, in several lines if it has several."""
    style = "|" if "\n" in text else '"'
    return yaml.dump(text, default_style=style, width=1_000_000, allow_unicode=True).removesuffix("\n")


def shell_argument(text: str, is_array: bool = False) -> str:
    """Returns an argument quoted for a shell; in a job array, `{array_index}` becomes the variable `array_index`."""
    if not is_array or ARRAY_INDEX not in text:
        return shlex.quote(text)
    return '"$array_index"'.join(shlex.quote(part) if part else "" for part in text.split(ARRAY_INDEX))


def _environment(is_array: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the filter `quote` quotes for the shell
    )

    def words(texts: Sequence[str]) -> str:
        return " ".join(shell_argument(text, is_array) for text in texts)

    environment.filters.update(quote=shlex.quote, words=words, clock=clock, pbs_job_name=pbs_job_name)
    # qsub removes both kinds of quotes in a line `#PBS -o VALUE`, and expands nothing.
    environment.filters.update(sbatch=slurm_value, qsub=shlex.quote)
    environment.filters.update(hours_and_minutes=hours_and_minutes, yaml=yaml_text)
    return environment


def _log_for_directive(request: JobRequest, root: Path) -> str:
    """Returns the path of the log for the scheduler, relative to `root` if a directive cannot hold the whole path."""
    path = log_path(root, request.name)
    if request.scheduler == "slurm":
        path = path if str(path).isprintable() else Path(path.name)
        # sbatch replaces %j and the like, and removes backslashes.
        text = str(path).replace("\\", "\\\\").replace("%", "%%")
        return text.removesuffix(".log") + "-%a.log" if request.array else text
    if request.array:
        index = "%I" if request.scheduler == "lsf" else "^array_index^"
        path = path.with_name(f"{request.name}.job-{index}.log")
    # PBS takes what precedes a colon for a host; LSF replaces %J and the like, Flux {{id}}.
    special = {"pbs": ":", "lsf": "%", "flux": "{{"}.get(request.scheduler, "\n")
    can_hold = str(path).isprintable() and special not in str(path.parent)
    return str(path) if can_hold else path.name


def _select(request: JobRequest) -> str:
    """Returns the resources of a PBS job: one chunk per machine."""
    processes = 1 if request.form == "torchrun" else request.devices
    chunk = [str(request.nodes), f"ncpus={(request.cpus_per_device or 1) * request.devices}", f"mpiprocs={processes}"]
    if request.gpus_per_device:
        chunk.append(f"ngpus={request.devices}")
    if request.memory:
        chunk.append(f"mem={request.memory.lower()}b")
    if request.constraint:
        chunk.append(request.constraint)
    return f"select={':'.join(chunk)}"


def _container_prefix(request: JobRequest, folder: Path, root: Path) -> str:
    """Returns the command, for a shell, that precedes a program in its container; empty without a container.

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
