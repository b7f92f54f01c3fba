"""Reads the options of `submit` from the command line and from a site file. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rankzero.cli.flags import COMMON_FLAGS, TRAINING_FLAGS
from rankzero.cli.flags.flag import Flag
from rankzero.cli.foreign_flags import quoted, similar_names
from rankzero.commands.jobs.options import LISTS, SUBMIT_FLAGS, accepted_flags, is_queuing
from rankzero.commands.jobs.request import FORMS, JobRequest
from rankzero.distributed.process.config_folder import config_folder
from rankzero.messages import RequestError, nearest

SWITCHES = ("dry_run", "follow", "help")
"""Flags of `submit` without a value."""

_OTHER_NAMES = {
    "name": "job_name J N",
    "devices": "ntasks_per_node gpus nproc_per_node ppn mpiprocs",
    "cpus_per_device": "cpus_per_task c ncpus",
    "gpus_per_device": "gres gpus_per_node gpus_per_task ngpus",
    "memory": "mem",
    "time": "walltime t time_limit",
    "partition": "p q",
    "account": "project A P",
    "exclude": "x",
    "mail": "mail_user M",
    "dependency": "d W depend",
    "hosts": "host H hostlist nodelist w",
    "modules": "module",
    "image": "container",
    "nodes": "N nnodes num_nodes",
}
"""Flag -> names of sbatch, qsub and mpirun for the same."""

_OWN = {name: flag for flag in SUBMIT_FLAGS for name in (flag.name, *flag.aliases)}
_FLAGS = {flag.name: flag for flag in SUBMIT_FLAGS}


class CommandLine(NamedTuple):
    """A parsed command line of `submit`.

    Args:
        values: Flag -> its value; flags of `LISTS` have a tuple of values.
        switches: The given flags without a value.
        paths: `site` -> the given path.
        words: Arguments that belong to no flag.
        arguments: The arguments after `--`; None without `--`.
    """

    values: Mapping[str, Any]
    switches: frozenset[str]
    paths: Mapping[str, str]
    words: Sequence[str]
    arguments: Sequence[str] | None


def parse(tokens: Sequence[str]) -> CommandLine:
    """Parses a command line.

    Raises:
        RequestError: A flag does not exist, lacks its value, or its value is invalid.
    """
    tokens = list(tokens)
    arguments = None
    if "--" in tokens:
        arguments = tokens[tokens.index("--") + 1 :]
        tokens = tokens[: tokens.index("--")]
    values: dict[str, Any] = {}
    switches, paths, words = set(), {}, []
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-"):
            words.append(token)
            continue
        name, equals, text = ("help", "", "") if token == "-h" else token.removeprefix("--").partition("=")
        if name in SWITCHES and token.startswith(("--", "-h")):
            switches.add(name)
            continue
        if not token.startswith("--") or name not in (*_OWN, "site"):
            raise _unknown_flag(token.split("=")[0], text if equals else next(iter(tokens), ""))
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise RequestError(f"--{name}", "it has no value", f"--{name}=VALUE")
            text = tokens.pop(0)
        if name in _OWN:
            _put(values, _OWN[name], text)
        else:
            paths[name] = text
    return CommandLine(values, frozenset(switches), paths, words, arguments)


def job_request(command_line: CommandLine) -> JobRequest:
    """Returns the requested job.

    Raises:
        RequestError: A required flag is missing, or flags contradict each other or the scheduler.
    """
    site_file = _site_file(command_line.paths.get("site"))
    site = read_site(site_file) if site_file else {}
    given = command_line.values
    scheduler = given.get("scheduler") or site.get("scheduler")
    if scheduler is None:
        names = ", ".join(FORMS)
        raise RequestError("a job without --scheduler", f"the schedulers are {names}", "--scheduler slurm")
    if "name" not in given:
        raise RequestError(
            "a job without --name", "status, log, stop and resume find a job by its name", "--name my-run"
        )
    accepted = accepted_flags(scheduler)
    for name in given:
        if name not in accepted:
            raise RequestError(
                f"--{name} with --scheduler {scheduler}",
                f"{scheduler} has no such option",
                "--extra, for an option in the scheduler's own words"
                if is_queuing(scheduler)
                else f"leave --{name} out",
            )
    values = {name: value for name, value in {**site, **given}.items() if name in accepted}
    for name in LISTS:
        if name in accepted and name != "hosts" and (both := (*site.get(name, ()), *given.get(name, ()))):
            values[name] = both
    if "form" in values and values["form"] not in FORMS[scheduler]:
        if "form" in given:
            forms = FORMS[scheduler]
            raise RequestError(
                f"--form {values['form']} with --scheduler {scheduler}",
                f"its forms are {', '.join(forms)}" if forms else f"{scheduler} has only one form",
                f"--form {forms[0]}" if forms else "leave --form out",
            )
        del values["form"]
    values.setdefault("form", next(iter(FORMS[scheduler]), None))
    return _with_hosts(
        JobRequest(**{**values, "scheduler": scheduler, "arguments": tuple(command_line.arguments or ())}),
        "nodes" in given,
    )


def read_site(file: Path) -> dict[str, Any]:
    """Reads a site file: YAML with the names of flags as keys.

    Raises:
        RequestError: The file cannot be read, or has an unknown key or an invalid value.
    """
    try:
        content = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"--site {file}", f"cannot read this file: {reason}", "--site FILE") from None
    except yaml.YAMLError as error:
        raise RequestError(f"--site {file}", f"not YAML: {error}", "scheduler: slurm") from None
    if not isinstance(content, dict):
        raise RequestError(f"--site {file}", "not a YAML mapping", "scheduler: slurm")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in _OWN:
            instead = nearest(str(key), _OWN) or "partition"
            raise RequestError(
                f"{file}: {key}", f"there is no such key; the keys are {', '.join(_FLAGS)}", f"{instead}: ..."
            )
        for item in value if isinstance(value, list) and _OWN[key].name in LISTS else [value]:
            if item is not None:
                try:
                    _put(values, _OWN[key], _as_typed(_OWN[key], item))
                except RequestError as error:
                    raise RequestError(
                        f"{file}: {key}: {item}", error.found, error.instead.lstrip("-").replace(" ", ": ", 1)
                    ) from None
    return values


def _as_typed(flag: Flag, value: Any) -> str:
    """Returns a value of YAML as text. YAML 1.1 reads `1:30:00` as a number of seconds, and `yes` as a truth value."""
    return f"{value}s" if flag.name == "time" and isinstance(value, int) and value >= 3600 else str(value)


def _site_file(path: str | None) -> Path | None:
    """Returns the given site file, or else the user's own if it exists."""
    if path is not None:
        return Path(path)
    folder = config_folder()
    return folder / "site.yaml" if folder and (folder / "site.yaml").is_file() else None


def _put(values: dict[str, Any], flag: Flag, text: str) -> None:
    """Stores the value of a flag; a flag of `LISTS` adds to earlier values."""
    if flag.name in ("modules", "hosts"):
        values[flag.name] = (*values.get(flag.name, ()), *(flag.value(part.strip()) for part in text.split(",")))
    elif flag.name in LISTS:
        values[flag.name] = (*values.get(flag.name, ()), flag.value(text))
    else:
        values[flag.name] = flag.value(text)


def _with_hosts(request: JobRequest, nodes_given: bool) -> JobRequest:
    """Returns the request with the machines of `--hostfile`, and with as many nodes as machines if none were given."""
    if is_queuing(request.scheduler):
        return request
    hosts = request.hosts
    if request.hostfile is not None:
        if hosts:
            raise RequestError("--hosts and --hostfile", "both list machines", "leave one of them out")
        hosts = hosts_in(Path(request.hostfile))
    nodes = request.nodes if nodes_given or not hosts else max(request.nodes, len(hosts))
    flag = "--hostfile" if request.hostfile else "--hosts"
    if request.scheduler == "local" and nodes > 1:
        raise RequestError(
            f"--nodes {nodes} with --scheduler local", "it is one machine", "--scheduler ssh --hosts n1,n2"
        )
    if len(hosts) < nodes and (nodes > 1 or request.scheduler == "ssh"):
        found = (
            f"{flag} lists {len(hosts)}: {', '.join(hosts)}"
            if hosts
            else f"{request.scheduler} does not choose machines"
        )
        names = ",".join(f"n{i + 1}" for i in range(nodes))
        raise RequestError(f"{nodes} machines (--nodes {nodes})", found, f"--hosts {names}")
    if request.scheduler in ("docker", "apptainer") and request.image is None:
        raise RequestError(f"--scheduler {request.scheduler}", "the container image is missing", "--image IMAGE")
    return replace(request, hosts=hosts[:nodes], nodes=nodes)


def hosts_in(file: Path) -> tuple[str, ...]:
    """Returns the machines that a host file of mpirun names, in order.

    Raises:
        RequestError: The file cannot be read, or names no machine.
    """
    try:
        lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"--hostfile {file}", f"cannot read this file: {reason}", "--hosts n1,n2") from None
    hosts = tuple(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
    if not hosts:
        raise RequestError(f"--hostfile {file}", "it names no machine", "--hosts n1,n2")
    return hosts


def _unknown_flag(typed: str, value: str) -> RequestError:
    """Returns the error for a flag that does not exist."""
    name = typed.lstrip("-").replace("-", "_")
    legal = (*_FLAGS, "site", *SWITCHES)
    listing = f"the flags are {', '.join(f'--{flag}' for flag in legal)}"
    same = next((flag for flag, names in _OTHER_NAMES.items() if name in names.split()), None)
    if name not in legal and same is None and name.split(".")[0] in _FIT_NAMES:
        return RequestError(typed, f"a flag of fit.py comes after --; {listing}", f"-- {typed} {quoted(value)}")
    instead = name if name in (*_OWN, *legal) else same or next(iter(similar_names(name, legal)), None)
    value_text = f" {quoted(value)}" if value and not value.startswith("-") and instead not in SWITCHES else ""
    return RequestError(
        f"{typed}{value_text}",
        f"there is no flag of that name; {listing}",
        f"--{instead}{value_text}" if instead else "python launch/submit.py --help",
    )


_FIT_NAMES = {
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "config",
    *(name for flag in (*COMMON_FLAGS, *TRAINING_FLAGS) for name in (flag.name, *flag.aliases)),
}
"""Names of flags of fit.py."""
