"""What can be typed after `submit`: its flags, and which of them each scheduler accepts. Does not import torch."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankzero.cli import command_line
from rankzero.cli.command_line import CommandLine, unknown_flag
from rankzero.cli.flags import (
    NAME_ALIASES,
    NOT_BLANK,
    Flag,
    Reader,
    choice,
    file_path,
    flags_of,
    positive_int,
    run_name,
    text_matching,
    whole_number,
)
from rankzero.distributed.scheduler.durations import parse_duration
from rankzero.messages import RequestError, quoted

FORMS: dict[str, tuple[str, ...]] = {
    "slurm": ("srun", "torchrun"),
    "pbs": ("pbsdsh", "torchrun", "mpirun"),
    "lsf": ("mpirun", "jsrun"),
    "flux": (),
    "kubernetes": (),
    "mpirun": ("openmpi", "mpich"),
    "ssh": (),
    "docker": (),
    "apptainer": (),
    "local": (),
}
"""Scheduler -> its forms, the programs that start the processes, with the default first."""

QUEUING = ("slurm", "pbs", "lsf", "flux", "kubernetes")
"""Schedulers with a queue. All others start a job at once, on this machine or from it."""

DIRECTIVES = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "#flux:"}
"""Scheduler -> what begins a line of the script that is an option of the scheduler."""

command_lines = text_matching(NOT_BLANK, "one or more lines of text")
host_value = text_matching(r"(?a)(\w[\w.-]*@)?\w[\w.-]*", "a list of host names, separated by commas")


def memory_value(text: str) -> str:
    """Reads an amount of memory, such as `64G`, `64 GB` or `64GiB`, and returns it as `64G`."""
    match = re.fullmatch(r"([1-9][0-9]{0,8}) ?([kmgt])(i?b)?", text, re.IGNORECASE | re.ASCII)
    if not match:
        raise ValueError("a number with a unit (64G, 500M)")
    return match[1] + match[2].upper()


def one_line(text: str) -> str:
    """Reads the value of an option of the scheduler: printable text without line breaks."""
    if not text.strip() or not text.isprintable():
        raise ValueError("text of printable characters in one line")
    return text


def script_line(text: str) -> str:
    """Reads a line that is inserted unchanged; an option without `#SBATCH` or the like would be run as a command."""
    if re.match(r"\s*(-|SBATCH|PBS|BSUB|flux:)", command_lines(text)):
        raise ValueError("a whole line of the script, such as '#SBATCH --qos=high'")
    return text


def path_value(text: str) -> str:
    """Reads a path, and expands `~`, which a shell does not expand after `=` or in quotes."""
    path: str = os.path.expanduser(file_path(text))  # noqa: PTH111 - `Path` would change the image `docker://x`
    if path.startswith("~"):
        raise ValueError("a path in the home folder of an existing user")
    return path


def array_value(text: str) -> str:
    """Reads the indices of a job array: numbers and ascending ranges, such as `0-3`, `1,5,9` or `0-8:2%4`."""
    part = r"[0-9]{1,7}(-[0-9]{1,7}(:[1-9][0-9]{0,6})?)?"
    ranges = re.findall(r"([0-9]+)-([0-9]+)", text, re.ASCII)
    is_valid = re.fullmatch(rf"{part}(,{part})*(%[1-9][0-9]{{0,6}})?", text, re.ASCII)
    if not is_valid or any(int(first) > int(last) for first, last in ranges):
        raise ValueError("a list of indices (0-3, 1,5,9)")
    return text


def comma_list(read: Reader) -> Reader:
    """Returns a reader of values separated by commas, as a tuple."""
    return lambda text: tuple(read(part.strip()) for part in text.split(","))


def gpus_value(text: str) -> int:
    """Reads whether each process gets a GPU: 1 or 0."""
    if re.fullmatch("[0-9]+", text) and text not in ("0", "1"):
        raise _request_for_gpus("--gpus_per_device", text)
    return int(whole_number(0, 1)(text))


# fmt: off
JOB_FLAGS = (
    Flag("scheduler", "NAME", choice(*FORMS), f"what starts the job: {', '.join(FORMS)}", "slurm"),
    Flag("form", "NAME", choice(*dict.fromkeys(form for forms in FORMS.values() for form in forms)),
         "program that starts the processes [slurm: srun; pbs: pbsdsh; lsf: mpirun; mpirun: openmpi]", "torchrun"),
    Flag("name", "NAME", run_name, "name of the run, and of the job", "my-run", aliases=NAME_ALIASES),
    Flag("root", "DIR", path_value, "folder of the runs; the script is written to it [runs]", "runs"),
    Flag("nodes", "N", positive_int, "number of machines [1]", "2"),
    Flag("devices", "N", positive_int, "number of processes per machine [1]", "4"),
    Flag("cpus_per_device", "N", positive_int, "cores and threads per process [the scheduler's default]", "8"),
    Flag("gpus_per_device", "0|1", gpus_value, "1: request one GPU per process; 0: request none [0]", "1"),
    Flag("memory", "SIZE", memory_value, "memory per machine: 64G [the scheduler's default]", "64G"),
    Flag("time", "TIME", parse_duration, "time limit: 02:00:00, 90min, 90 (minutes) [the scheduler's default]",
         "02:00:00"),
    Flag("partition", "NAME", one_line, "partition (Slurm) or queue; also --queue", "gpu", aliases=("queue",)),
    Flag("account", "NAME", one_line, "account, project or bank to charge", "my-project"),
    Flag("constraint", "TEXT", one_line, "required features of the machines (PBS: name=value)", "gpu_type=a100"),
    Flag("exclude", "HOSTS", one_line, "machines not to use (Slurm)", "n7"),
    Flag("mail", "ADDRESS", one_line, "send mail to ADDRESS about the end of the job", "me@example.org"),
    Flag("array", "INDICES", array_value, "one run per index; {array_index} in fit's arguments is the index", "0-3"),
    Flag("dependency", "JOBS", one_line, "wait for other jobs", "afterok:123"),
    Flag("modules", "NAMES", comma_list(one_line), "environment modules to load, separated by commas", "cuda/12.4",
         default=()),
    Flag("setup", "COMMAND", command_lines, "shell command to run before training; can be repeated",
         "source settings.sh", default=()),
    Flag("venv", "DIR", path_value, "virtual environment whose Python runs [that of submit]", ".venv"),
    Flag("image", "IMAGE", lambda text: path_value(one_line(text)), "container image in which to train",
         "rankzero.sif"),
    Flag("volume", "CLAIM", text_matching(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "the name of a claim in lower case"),
         "volume claim with the runs and the data (Kubernetes) [work]", "work"),
    Flag("hosts", "HOSTS", comma_list(host_value), "machines, separated by commas; the first has rank zero", "n1,n2",
         default=()),
    Flag("hostfile", "FILE", path_value, "file of machines for mpirun, instead of --hosts", "hosts.txt"),
    Flag("extra", "LINE", script_line, "line to insert unchanged, such as '#SBATCH --qos=high'; can be repeated",
         "'#SBATCH --qos=high'", default=()),
)
"""The flags that describe a job; each is a field of `JobRequest` and a key of a site file."""

SUBMIT_FLAGS = (
    *JOB_FLAGS,
    Flag("site", "FILE", path_value, "YAML file with defaults for these flags [~/.config/rankzero/site.yaml]",
         "site.yaml"),
    Flag("check", "FILE", path_value, "print what is wrong in your own job script, and what to write instead",
         "job.sh"),
    Flag("dry_run", "", str, "print the script and submit nothing", ""),
    Flag("follow", "", str, "print state and log until the job ends", ""),
    Flag("validate", "", str, "let fit.py check all its arguments first; this imports torch and the model", ""),
)
"""All flags of `submit`."""
# fmt: on

LISTS = tuple(flag.name for flag in JOB_FLAGS if flag.default == ())
"""Flags that can be repeated, and whose values in a site file come first."""

FLAGS = {name: flag for flag in JOB_FLAGS for name in (flag.name, *flag.aliases)}
"""Name or alias -> flag that describes a job."""

_FIT_NAMES = {
    *("model", "data", "trainer", "optimizer", "lr_scheduler", "config"),
    *(name for flag in flags_of("fit") for name in (flag.name, *flag.aliases)),
}
"""Names of flags of fit.py."""

_OTHER_NAMES = {
    "name": "job_name J",
    "devices": "ntasks_per_node nproc_per_node ppn mpiprocs",
    "cpus_per_device": "cpus_per_task c ncpus",
    "memory": "mem",
    "time": "walltime t time_limit",
    "partition": "p q",
    "account": "A",
    "exclude": "x",
    "mail": "mail_user M",
    "dependency": "d depend",
    "hosts": "host H hostlist w",
    "modules": "module",
    "image": "container",
    "nodes": "N nnodes num_nodes",
}
"""Flag -> names of sbatch, qsub and mpirun for the same."""

_EXTRA = ("qos", "reservation", "exclusive", "mem_per_cpu", "mem_per_gpu", "nodelist", "mail_type", "ntasks")
"""Options of sbatch that have no flag."""

_GPUS = ("gpus", "gres", "gpus_per_node", "gpus_per_task", "G", "ngpus", "gpus_per_device")
"""Names of sbatch and qsub for a number of GPUs."""


@dataclass(frozen=True)
class JobRequest:
    """A run of `fit` as a job. The fields are the flags of `submit` and the keys of a site file.

    `time` is in seconds, `memory` a number with the unit K, M, G or T, per machine. Without `cpus_per_device` the
    scheduler decides, without `venv` the Python of `submit` runs. `arguments` are those of `fit`.
    """

    scheduler: str
    name: str
    form: str | None = None
    root: str = "runs"
    nodes: int = 1
    devices: int = 1
    cpus_per_device: int | None = None
    gpus_per_device: int = 0
    memory: str | None = None
    time: int | None = None
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    mail: str | None = None
    array: str | None = None
    dependency: str | None = None
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    venv: str | None = None
    image: str | None = None
    volume: str = "work"
    hosts: tuple[str, ...] = ()
    hostfile: str | None = None
    extra: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


_QUEUE_ONLY = ("partition", "account", "constraint", "mail", "array", "dependency", "exclude", "extra")
_NOT_ACCEPTED = {
    "slurm": ("hosts", "hostfile"),
    "pbs": ("hosts", "hostfile", "exclude"),
    "lsf": ("hosts", "hostfile", "exclude"),
    "flux": ("hosts", "hostfile", "exclude", "memory", "mail", "array"),
    "kubernetes": (*set(_QUEUE_ONLY).difference({"partition"}), "hosts", "hostfile", "modules"),
    "mpirun": (*_QUEUE_ONLY, "memory"),
    "ssh": (*_QUEUE_ONLY, "memory", "hostfile"),
    "docker": (*_QUEUE_ONLY, "hostfile"),
    "apptainer": (*_QUEUE_ONLY, "memory", "hostfile"),
    "local": (*_QUEUE_ONLY, "memory", "hosts", "hostfile"),
}
"""Scheduler -> flags that have no meaning for it."""


def accepted_flags(scheduler: str, has_image: bool) -> tuple[str, ...]:
    """Returns the names of the flags that have an effect with a scheduler, with or without a container image."""
    without_effect = {*_NOT_ACCEPTED[scheduler], *(["volume"] if scheduler != "kubernetes" else [])}
    if has_image:
        without_effect.add("venv")
    elif scheduler not in QUEUING:
        without_effect.add("gpus_per_device")
    return tuple(flag.name for flag in JOB_FLAGS if flag.name not in without_effect)


def parse(tokens: Sequence[str]) -> CommandLine:
    """Parses a command line of `submit`.

    Raises:
        RequestError: A flag does not exist, lacks its value, or its value is invalid.
    """
    return command_line.parse(SUBMIT_FLAGS, tokens, _unknown_flag)


def _unknown_flag(typed: str, value: str, given: Mapping[str, Any]) -> RequestError:
    """Returns the error for a flag that does not exist."""
    name, scheduler = typed.lstrip("-").replace("-", "_"), given.get("scheduler")
    if name in _GPUS:
        return _request_for_gpus(typed, value)
    same = next((flag for flag, names in _OTHER_NAMES.items() if name in names.split()), None)
    error = unknown_flag("submit", SUBMIT_FLAGS, typed, value, same)
    if name in _EXTRA and (directive := DIRECTIVES.get(scheduler or "slurm")):
        option = f"--{name.replace('_', '-')}" + (f"={value}" if value else "")
        line = f"{directive} {option if directive == '#SBATCH' else 'OPTION'}"
        error.instead = f"--extra {shlex.quote(line)}"
    elif name not in FLAGS and same is None and name.split(".")[0] in _FIT_NAMES:
        error.found = error.found.replace("there is no flag of that name", "a flag of fit.py comes after --")
        error.instead = f"-- {typed} {quoted(value)}"
    return error


def _request_for_gpus(typed: str, value: str) -> RequestError:
    """Returns the error for a request of several GPUs; there is a process for each."""
    count = (re.findall(r"[1-9][0-9]*$", value) or ["N"])[0]
    found = "each process has one GPU; --devices is the number of processes per machine"
    devices = "" if count == "1" else f"--devices {count} "
    return RequestError(f"{typed} {value}".rstrip(), found, f"{devices}--gpus_per_device 1")


ACTIONS = (
    ("status NAME", "print the state of the run's job"),
    ("log NAME", "print the output of the run; with --follow, until its job ends"),
    ("stop NAME", "end the job; the run saves a checkpoint and stops"),
    ("resume NAME", "submit the script of the run again; the run resumes from its last checkpoint"),
)
EXAMPLES = (
    "python launch/submit.py --scheduler slurm --nodes 2 --devices 4 --time 02:00:00 --name my-run -- --model ResNet",
    "python launch/submit.py --scheduler pbs --form mpirun --nodes 2 --devices 4 --name my-run --dry_run",
    "python launch/submit.py log my-run --follow",
)


def help_text() -> str:
    """Returns the help: the actions, the flags and examples."""
    title = "python launch/submit.py: run fit.py as a job (defaults are in brackets; flags of fit.py come after --)"
    return command_line.help_text(title, SUBMIT_FLAGS, EXAMPLES, ACTIONS)
