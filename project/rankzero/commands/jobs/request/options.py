"""The flags of `submit`, and which of them each scheduler accepts. Does not import torch."""

import os
import re
from typing import Any

from rankzero.cli.flags.table import NAME_ALIASES, Flag
from rankzero.cli.flags.values import choice, file_path, positive_int, run_name, text_matching, whole_number
from rankzero.commands.jobs.request.job_request import FORMS, QUEUING
from rankzero.distributed.scheduler.durations import parse_duration
from rankzero.messages import RequestError, spelled


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


def command_lines(text: str) -> str:
    """Reads lines that are inserted unchanged."""
    if not text.strip() or "\0" in text:
        raise ValueError("one or more lines of text")
    return text


def script_line(text: str) -> str:
    """Reads a line that is inserted unchanged; an option without `#SBATCH` or `#PBS` would be run as a command."""
    if re.match(r"\s*(-|SBATCH|PBS)", command_lines(text)):
        raise ValueError("a whole line of the script, such as '#SBATCH --qos=high'")
    return text


def path_value(text: str) -> str:
    """Reads a path, and expands `~`, which a shell does not expand after `=` or in quotes."""
    path = os.path.expanduser(file_path(text))  # noqa: PTH111 - `Path` would change the image `docker://x`
    if path.startswith("~"):
        raise ValueError("a path in the home folder of a user")
    return path


def image_value(text: str) -> str:
    """Reads the name or the path of a container image."""
    return path_value(one_line(text))


def array_value(text: str) -> str:
    """Reads the indices of a job array: numbers and ascending ranges, such as `0-3`, `1,5,9` or `0-8:2%4`."""
    part = r"[0-9]{1,7}(-[0-9]{1,7}(:[1-9][0-9]{0,6})?)?"
    ranges = re.findall(r"([0-9]+)-([0-9]+)", text, re.ASCII)
    is_valid = re.fullmatch(rf"{part}(,{part})*(%[1-9][0-9]{{0,6}})?", text, re.ASCII)
    if not is_valid or any(int(first) > int(last) for first, last in ranges):
        raise ValueError("a list of indices (0-3, 1,5,9)")
    return text


host_value = text_matching(
    r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*", "a list of host names, separated by commas"
)

LISTS = ("modules", "setup", "hosts", "extra")
"""Flags that can be repeated, and whose values in a site file come first."""

SUBMIT_FLAGS = (
    Flag("scheduler", "NAME", choice(*FORMS), f"what starts the job: {', '.join(FORMS)}", "slurm"),
    Flag(
        "form",
        "NAME",
        choice(*dict.fromkeys(form for forms in FORMS.values() for form in forms)),
        "program that starts the processes [slurm: srun; pbs: pbsdsh; mpirun: openmpi]",
        "torchrun",
    ),
    Flag("name", "NAME", run_name, "name of the run, and of the job", "my-run", aliases=NAME_ALIASES),
    Flag("root", "DIR", path_value, "folder of the runs; the script is written to it [runs]", "runs"),
    Flag("nodes", "N", positive_int, "number of machines [1]", "2"),
    Flag("devices", "N", positive_int, "number of processes per machine [1]", "4"),
    Flag("cpus_per_device", "N", positive_int, "cores and threads per process [the scheduler's default]", "8"),
    Flag("gpus_per_device", "0|1", whole_number(0, 1), "1: request one GPU per process; 0: request none [0]", "1"),
    Flag("memory", "SIZE", memory_value, "memory per machine: 64G [the scheduler's default]", "64G"),
    Flag(
        "time",
        "TIME",
        parse_duration,
        "time limit: 02:00:00, 90min, 90 (minutes) [the scheduler's default]",
        "02:00:00",
    ),
    Flag("partition", "NAME", one_line, "partition (Slurm) or queue (PBS); also --queue", "gpu", aliases=("queue",)),
    Flag("account", "NAME", one_line, "account (Slurm) or project (PBS) to charge", "my-project"),
    Flag("constraint", "TEXT", one_line, "required features of the machines (PBS: name=value)", "gpu_type=a100"),
    Flag("exclude", "HOSTS", one_line, "machines not to use (Slurm)", "n7"),
    Flag("mail", "ADDRESS", one_line, "send mail to ADDRESS about the end of the job", "me@example.org"),
    Flag("array", "INDICES", array_value, "one run per index; {array_index} in fit's arguments is the index", "0-3"),
    Flag("dependency", "JOBS", one_line, "wait for other jobs", "afterok:123"),
    Flag("modules", "NAMES", one_line, "environment modules to load, separated by commas", "cuda/12.4"),
    Flag(
        "setup", "COMMAND", command_lines, "shell command to run before training; can be repeated", "source settings.sh"
    ),
    Flag("venv", "DIR", path_value, "virtual environment whose Python runs [that of submit]", ".venv"),
    Flag("image", "IMAGE", image_value, "container image in which to train", "rankzero.sif"),
    Flag("hosts", "HOSTS", host_value, "machines, separated by commas; the first has rank zero", "n1,n2"),
    Flag("hostfile", "FILE", path_value, "file of machines for mpirun, instead of --hosts", "hosts.txt"),
    Flag(
        "extra",
        "LINE",
        script_line,
        "line to insert unchanged, such as '#SBATCH --qos=high'; can be repeated",
        "'#SBATCH --qos=high'",
    ),
)
"""The flags of `submit` that describe a job; each is a field of `JobRequest` and a key of a site file."""

FLAGS = {name: flag for flag in SUBMIT_FLAGS for name in (flag.name, *flag.aliases)}
"""Name or alias -> flag."""

_QUEUE_ONLY = ("partition", "account", "constraint", "mail", "array", "dependency", "exclude", "extra")
_NOT_ACCEPTED = {
    "slurm": ("hosts", "hostfile"),
    "pbs": ("hosts", "hostfile", "exclude"),
    "mpirun": (*_QUEUE_ONLY, "memory"),
    "ssh": (*_QUEUE_ONLY, "memory", "hostfile"),
    "docker": (*_QUEUE_ONLY, "hostfile"),
    "apptainer": (*_QUEUE_ONLY, "memory", "hostfile"),
    "local": (*_QUEUE_ONLY, "memory", "hosts", "hostfile"),
}
"""Scheduler -> flags that have no meaning for it."""


def accepted_flags(scheduler: str, has_image: bool) -> tuple[str, ...]:
    """Returns the names of the flags that have an effect with a scheduler, with or without a container image."""
    without_effect = set(_NOT_ACCEPTED[scheduler])
    if has_image:
        without_effect.add("venv")
    elif not is_queuing(scheduler):
        without_effect.add("gpus_per_device")
    return tuple(flag.name for flag in SUBMIT_FLAGS if flag.name not in without_effect)


def add_value(values: dict[str, Any], flag: Flag, text: str) -> None:
    """Stores the value of a flag; the value of a flag of `LISTS` is added to earlier values.

    Raises:
        RequestError: The value is invalid.
    """
    if flag.name in ("modules", "hosts"):
        try:
            parts = tuple(flag.read(part.strip()) for part in text.split(","))
        except ValueError as error:
            request = f"--{flag.name} {text}"
            raise RequestError(request, f"{text!r} is not {error}", f"--{flag.name} {flag.example}") from None
        values[flag.name] = (*values.get(flag.name, ()), *parts)
    elif flag.name in LISTS:
        values[flag.name] = (*values.get(flag.name, ()), flag.value(text))
    else:
        values[flag.name] = flag.value(text)


def is_queuing(scheduler: str) -> bool:
    """Returns whether the scheduler has a queue; all others start a job at once."""
    return scheduler in QUEUING


_EXAMPLES = """\
  python launch/submit.py --scheduler slurm --nodes 2 --devices 4 --time 02:00:00 --name my-run -- --model ResNet
  python launch/submit.py --scheduler pbs --form mpirun --nodes 2 --devices 4 --name my-run --dry_run
  python launch/submit.py log my-run --follow"""


def help_text() -> str:
    """Returns the help: the actions, the flags and examples."""
    rows = [
        ("status NAME", "print the state of the run's job"),
        ("log NAME", "print the output of the run; with --follow, until its job ends"),
        ("stop NAME", "end the job; the run saves a checkpoint and stops"),
        ("resume NAME", "submit the script of the run again; the run resumes from its last checkpoint"),
        None,
        *((f"--{flag.name} {flag.metavar}", flag.help) for flag in SUBMIT_FLAGS),
        ("--site FILE", "YAML file with defaults for these flags [~/.config/rankzero/site.yaml]"),
        ("--check FILE", "print what is wrong in your own job script, and what to write instead"),
        ("--dry_run", "print the script and submit nothing"),
        ("--follow", "print state and log until the job ends"),
        ("--validate", "let fit.py check all its arguments first; this imports torch and the model"),
    ]
    lines = [
        "python launch/submit.py: run fit.py as a job (defaults are in brackets; flags of fit.py come after --)",
        "",
    ]
    lines += ["" if row is None else f"  {row[0]:<25} {row[1]}" for row in rows]
    return spelled("\n".join([*lines, "", _EXAMPLES]))
