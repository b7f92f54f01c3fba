"""The request for a job, from the command line and the site file. Does not import torch."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rankzero.cli.command_line import CommandLine
from rankzero.distributed.connections.key import config_folder
from rankzero.jobs import options
from rankzero.jobs.options import FLAGS, FORMS, JOB_FLAGS, LISTS, QUEUING, JobRequest
from rankzero.messages import RequestError, nearest

_SET_BY_SCRIPT = {
    "slurm": r"\s*#SBATCH\b.*?\s(-[NaJc]|--(?:nodes|ntasks-per-node|array|job-name|cpus-per-task)\b)",
    "pbs": r"\s*#PBS\b.*?\s(-[JN]|-l\s*['\"]?(?:[^\s]*,)?(?:select|nodes|place)\b)",
    "lsf": r"\s*#BSUB\b.*?\s(-(?:J|n[0-9]*|nnodes|Q)\b)",
    "flux": r"\s*#flux:.*?\s(-[Nnc]|--(?:nodes|nslots|cores-per-slot|job-name|output)\b)",
}
"""Scheduler -> options that contradict the arguments that the script passes to `fit`."""

_PATHS = ("root", "venv", "hostfile", "image")
"""Keys whose values may contain variables."""


def job_request(command_line: CommandLine) -> JobRequest:
    """Returns the requested job.

    Raises:
        RequestError: A required flag is missing, or flags contradict each other or the scheduler.
    """
    site = dict(read_site(command_line.values.get("site")))
    given = {name: value for name, value in command_line.values.items() if name in FLAGS}
    scheduler = given.get("scheduler") or site.get("scheduler")
    if scheduler is None:
        names = ", ".join(FORMS)
        raise RequestError("a job without --scheduler", f"the schedulers are {names}", "--scheduler slurm")
    _check_values(scheduler, {**site, **given})
    if "name" not in given:
        found = "status, log, stop and resume find a job by its name"
        raise RequestError("a job without --name", found, "--name my-run")
    if "hosts" in given or "hostfile" in given:
        site = {name: value for name, value in site.items() if name not in ("hosts", "hostfile")}
    if "venv" in given:
        site.pop("image", None)
    image = given.get("image") or site.get("image")
    if scheduler in ("docker", "apptainer", "kubernetes") and image is None:
        raise RequestError(f"--scheduler {scheduler}", "the container image is missing", "--image IMAGE")
    accepted = options.accepted_flags(scheduler, image is not None)
    _refuse_ignored(given, accepted, scheduler)
    _check_extra((*site.get("extra", ()), *given.get("extra", ())) if scheduler in QUEUING else (), scheduler)
    values = {name: value for name, value in {**site, **given}.items() if name in accepted}
    for name in LISTS:
        if name in accepted and name != "hosts" and (both := (*site.get(name, ()), *given.get(name, ()))):
            values[name] = both
    values |= {"scheduler": scheduler, "form": _form(scheduler, given.get("form"), site.get("form"))}
    request = JobRequest(**values, arguments=tuple(command_line.rest or ()))
    return _with_hosts(request, "nodes" in given)


def _refuse_ignored(given: Mapping[str, Any], accepted: Sequence[str], scheduler: str) -> None:
    """Raises an error for a given flag that would have no effect."""
    for name in given:
        if name in accepted:
            continue
        if name == "venv":
            raise RequestError("--venv with --image", "the image contains its own Python", "leave --venv out")
        if name == "gpus_per_device":
            found = "the processes use the GPUs that they find"
            instead = "leave --gpus_per_device out; CUDA_VISIBLE_DEVICES= hides all GPUs"
        else:
            found = f"{scheduler} has no such option"
            instead = _instead_of(name, scheduler)
        raise RequestError(f"--{name} with --scheduler {scheduler}", found, instead)


def _instead_of(name: str, scheduler: str) -> str:
    """Returns what to type instead of a flag that a scheduler does not have."""
    if name == "array" and scheduler in QUEUING:
        return "one job per member, such as --name my-run-0 and --name my-run-1"
    if scheduler == "kubernetes":
        return f"leave --{name} out; with --dry_run, a line can be added to the file by hand"
    is_left_out = name == "volume" or scheduler not in QUEUING
    return f"leave --{name} out" if is_left_out else "--extra LINE, with an option of the scheduler"


def _check_extra(lines: Sequence[str], scheduler: str) -> None:
    """Raises an error for a line of `--extra` that the scheduler ignores, or that contradicts the script."""
    for line in lines:
        own = options.DIRECTIVES[scheduler]
        others = [text for text in options.DIRECTIVES.values() if text != own and line.lstrip().startswith(text)]
        if others:
            found = f"{scheduler} ignores a line that begins with {others[0]}"
            example = {"slurm": "--qos=high", "pbs": "-m n", "lsf": "-x"}.get(scheduler, "--exclusive")
            raise RequestError(f"--extra {shlex.quote(line)}", found, f"--extra '{own} {example}'")
        if match := re.match(_SET_BY_SCRIPT[scheduler], line):
            instead = "the flag of submit.py instead: --nodes, --devices, --cpus_per_device, --array or --name"
            raise RequestError(f"--extra {shlex.quote(line)}", f"the script itself sets {match[1]}", instead)


def _form(scheduler: str, given: str | None, of_site: str | None) -> str | None:
    """Returns the form of a job: the given one, the site's form if the scheduler has it, or the default."""
    forms = FORMS[scheduler]
    if given is not None and given not in forms:
        found = f"its forms are {', '.join(forms)}" if forms else f"{scheduler} has only one form"
        instead = f"--form {forms[0]}" if forms else "leave --form out"
        raise RequestError(f"--form {given} with --scheduler {scheduler}", found, instead)
    return given or (of_site if of_site in forms else next(iter(forms), None))


def _check_values(scheduler: str, values: Mapping[str, Any]) -> None:
    """Raises an error for values that a scheduler does not accept."""
    array, constraint, name = values.get("array"), values.get("constraint"), values.get("name", "")
    root = Path(values.get("root", "runs"))
    if scheduler == "kubernetes" and root.is_absolute():
        raise RequestError(f"--root {root}", "the runs are in a folder of the volume", "--root runs")
    if scheduler == "kubernetes" and name and not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
        found = "a TrainJob has a name of at most 50 lower-case letters, digits and -, and begins with a letter"
        raise RequestError(f"--name {name}", found, "--name my-run")
    if scheduler == "lsf" and array and re.search(r"(?<![0-9])0+(?![0-9])", array.partition("%")[0]):
        raise RequestError(f"--array {array}", "the indices of LSF begin at 1", "--array 1-4")
    if scheduler != "pbs":
        return
    if array and not re.fullmatch(r"[0-9]+-[0-9]+(:[0-9]+)?", array):
        raise RequestError(f"--array {array}", "PBS accepts a range with an optional step", "--array 0-3")
    if constraint and not re.fullmatch(r"[^=\s:]+=[^=:]+(:[^=\s:]+=[^=:]+)*", constraint):
        raise RequestError(f"--constraint {constraint}", "PBS accepts name=value", "--constraint gpu_type=a100")


def _with_hosts(request: JobRequest, nodes_given: bool) -> JobRequest:
    """Returns the request with the machines of `--hostfile`, and with as many nodes as machines if none were given."""
    if request.scheduler in QUEUING:
        return request
    hosts, scheduler = request.hosts, request.scheduler
    if request.hostfile is not None:
        if hosts:
            raise RequestError("--hosts and --hostfile", "both list machines", "leave one of them out")
        hosts = hosts_in(Path(request.hostfile))
    nodes = request.nodes if nodes_given or not hosts else max(request.nodes, len(hosts))
    flag = "--hostfile" if request.hostfile else "--hosts"
    if scheduler == "local" and nodes > 1:
        instead = "--scheduler ssh --hosts n1,n2"
        raise RequestError(f"--nodes {nodes} with --scheduler local", "it is one machine", instead)
    if len(hosts) < nodes and (nodes > 1 or scheduler == "ssh"):
        found = f"{flag} lists {len(hosts)}: {', '.join(hosts)}" if hosts else f"{scheduler} does not choose machines"
        names = ",".join(f"n{i + 1}" for i in range(nodes))
        raise RequestError(f"{nodes} machines (--nodes {nodes})", found, f"--hosts {names}")
    return replace(request, hosts=hosts[:nodes], nodes=nodes)


def hosts_in(file: Path) -> tuple[str, ...]:
    """Returns the machines that a host file of mpirun names, in order.

    Raises:
        RequestError: The file cannot be read, names no machine, or has an invalid name.
    """
    try:
        lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"--hostfile {file}", f"cannot read this file: {reason}", "--hosts n1,n2") from None
    names = dict.fromkeys(words[0].partition(":")[0] for words in lines if words)
    if not names:
        raise RequestError(f"--hostfile {file}", "it names no machine", "--hosts n1,n2")
    try:
        return tuple(options.host_value(name) for name in names)
    except ValueError:
        raise RequestError(f"--hostfile {file}", "a line does not begin with a host name", "n1 slots=4") from None


def read_site(path: str | None) -> dict[str, Any]:
    """Reads a site file, YAML with the names of flags as keys; None for the user's own, which may be missing.

    Raises:
        RequestError: The file cannot be read, or has an unknown key or an invalid value.
    """
    folder = config_folder()
    file = Path(path) if path is not None else folder / "site.yaml" if folder else None
    if file is None or (path is None and not file.is_file()):
        return {}
    try:
        # All values are text, as on the command line. YAML's own types would read `no` as False and `0123` as 83.
        content = yaml.load(file.read_text(), Loader=yaml.BaseLoader) or {}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"--site {file}", f"cannot read this file: {reason}", "--site FILE") from None
    except yaml.YAMLError as error:
        raise RequestError(f"--site {file}", f"not YAML: {error}", "scheduler: slurm") from None
    if not isinstance(content, dict):
        raise RequestError(f"--site {file}", "not a YAML mapping", "scheduler: slurm")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in FLAGS:
            names = [flag.name for flag in JOB_FLAGS]
            similar = nearest(str(key), names)
            found = f"there is no such key; the keys are {', '.join(names)}"
            raise RequestError(f"{file}: {key}", found, f"{similar}: ..." if similar else "remove this line")
        for item in value if isinstance(value, list) and FLAGS[key].name in LISTS else [value]:
            _add(values, key, item, file)
    return values


def _add(values: dict[str, Any], key: str, item: object, file: Path) -> None:
    """Adds a value of the file to the values of a flag."""
    flag = FLAGS[key]
    instead = f"- {flag.example}".replace("'", '"') if flag.name in LISTS else f"{key}: {flag.example}"
    if not isinstance(item, str) or not item:
        found = "the value is empty; a value that begins with # needs quotes" if not item else "the value is not text"
        raise RequestError(f"{file}: {key}", found, instead)
    text = os.path.expandvars(item) if flag.name in _PATHS else item  # as a shell does on the command line
    if flag.name in _PATHS and "$" in text:
        raise RequestError(f"{file}: {key}: {item}", "a variable in this path is not set", instead)
    try:
        flag.add(values, text)
    except RequestError as error:
        raise RequestError(f"{file}: {key}: {item}", error.found, instead) from None
