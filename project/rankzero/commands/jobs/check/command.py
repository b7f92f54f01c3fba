"""One command of a user's job script: its words, its launchers, and whether it trains. Does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

LAUNCHERS = {
    "srun": "srun",
    "torchrun": "torchrun",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
    "mpiexec.hydra": "mpirun",
    "mpirun.openmpi": "mpirun",
    "mpirun.mpich": "mpirun",
    "orterun": "mpirun",
    "pbsdsh": "pbsdsh",
    "pbs_tmrsh": "ssh",
    "ssh": "ssh",
    "pdsh": "ssh",
    "clush": "ssh",
}
"""Program -> the launcher that it is, for the rules."""

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Module -> the launcher that it is, for the rules."""

_WRAPPERS = (
    *("env", "nice", "numactl", "taskset", "stdbuf", "timeout", "nsys", "ncu", "strace", "coverage"),
    *("apptainer", "singularity", "docker", "podman", "shifter", "enroot"),
    *("conda", "mamba", "micromamba", "uv", "poetry"),
)
"""Programs that run the program in their arguments once."""

_PYTHON = r"python[0-9.]*|\$\{?\w*(PY|py)\w*\}?"
"""Name of a program that is Python, or of a variable that probably holds it."""

_OTHER_MODULES = ("pip", "venv", "ensurepip", "virtualenv", "json.tool", "http.server", "tensorboard.main")
"""Modules that train nothing."""


class Word(NamedTuple):
    """A word of a command.

    Args:
        text: The word without its quotes, with expansions as written, such as `$X` or `$(hostname)`.
        expanded: Names of the variables that the job script itself expands, before the command starts.
        substituted: Whether the job script itself runs a command substitution in the word.
    """

    text: str
    expanded: frozenset[str] = frozenset()
    substituted: bool = False


class Assignment(NamedTuple):
    """What a command assigns to a variable.

    Args:
        text: The value as written.
        words: The value as one word, or the elements of an array.
        is_array: Whether the value is an array.
        appends: Whether it is appended to the earlier value, by `+=`.
    """

    text: str
    words: tuple[Word, ...]
    is_array: bool = False
    appends: bool = False


class Value(NamedTuple):
    """The last value of a variable.

    Args:
        line: Number of the line that assigns it.
        text: The value as written.
        words: Its words, with the values of other variables; None if the value is unknown, for example because it is
            assigned in one branch only.
        is_array: Whether the variable is an array.
    """

    line: int
    text: str
    words: tuple[Word, ...] | None
    is_array: bool = False


class Position(NamedTuple):
    """Where a command stands in the script.

    Args:
        in_background: Whether it ends with `&`.
        in_function: Whether it is part of a function.
        loop: Number of the first line of the innermost loop that contains it, from 1; 0 outside of loops.
        is_conditional: Whether it may not run: part of a branch or a loop, or after `&&` or `||`.
    """

    in_background: bool = False
    in_function: bool = False
    loop: int = 0
    is_conditional: bool = False


@dataclass(frozen=True)
class Command:
    """A command, with the lines that continue it.

    Args:
        line: Number of its first line, from 1.
        text: The command as written, in one line.
        words: Program and arguments, without assignments before the program. A command in `bash -c '...'` or after
            `ssh HOST` has the words of the launchers before it.
        position: Where it stands in the script.
        is_nested: Whether it is in the text of `bash -c` or `ssh`.
        assignments: Variables that the command sets: before its program, by `export`, or as a command of its own.
        is_export: Whether it exports variables.
        values: The values of variables before the command.
    """

    line: int
    text: str
    words: tuple[Word, ...]
    position: Position
    is_nested: bool = False
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    is_export: bool = False
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """Name of the program without its folder; empty for an assignment."""
        return _name(self.words[0]) if self.words else ""

    @cached_property
    def _launcher_indices(self) -> list[tuple[int, str]]:
        """Index and name of each launcher among the words."""
        found = []
        for i, word in enumerate(self.words):
            if self._script_index is not None and i > self._script_index:
                break
            if _name(word) in LAUNCHERS and (i == 0 or self.words[i - 1].text not in ("-J", "--job-name")):
                found.append((i, LAUNCHERS[_name(word)]))
            elif word.text in MODULES and i and self.words[i - 1].text == "-m":
                found.append((i, MODULES[word.text]))
        return found

    @property
    def launchers(self) -> list[str]:
        """The launchers in the command, from the outermost to the innermost."""
        return [name for _, name in self._launcher_indices]

    @cached_property
    def _script_index(self) -> int | None:
        """Index of the Python script or module that is run; None without one."""
        for i, word in enumerate(self.words):
            if word.text.endswith(".py") and i:
                return i
            if i and self.words[i - 1].text == "-m" and word.text not in MODULES:
                python = i > 1 and re.fullmatch(_PYTHON, _name(self.words[i - 2]))
                if (python or "torchrun" in map(_name, self.words[:i])) and re.fullmatch(r"[\w.]+", word.text):
                    return i
        return None

    @property
    def trains(self) -> bool:
        """Whether the command probably starts training: Python with a script, or a launcher with a program for it."""
        is_known = self.program in LAUNCHERS or self.program in _WRAPPERS or re.fullmatch(_PYTHON, self.program)
        if not is_known:  # such as a launcher that the rules do not know
            return False
        if {"torchrun", "accelerate", "deepspeed"} & set(self.launchers):
            return True
        if self.launchers and any(word.text.endswith(".sh") for word in self.words):
            return True
        index = self._script_index
        if index is None or self.words[index].text in _OTHER_MODULES:
            return False
        return any(re.fullmatch(_PYTHON, _name(word)) for word in self.words[:index])

    @property
    def script(self) -> str:
        """The Python script or module; empty without one."""
        return "" if self._script_index is None else self.words[self._script_index].text

    def option(self, launcher: str, *names: str) -> Word | None:
        """Returns the value of an option of a launcher; None if the launcher or the option is missing.

        Args:
            launcher: The launcher, or `script` for the options of the Python script.
            names: Names of the option with dashes, such as `--nodes`, `-N`; `_` in long names is read as `-`.
        """
        words = self.options_of(launcher)
        for i, word in enumerate(words):
            name, equals, value = word.text.partition("=")
            if (name.replace("_", "-") if name.startswith("--") else name) in names:
                return word._replace(text=value) if equals else words[i + 1] if i + 1 < len(words) else Word("")
            short = name[:2]
            if short in names and re.fullmatch(r"-[A-Za-z][0-9].*", word.text):
                return word._replace(text=word.text[2:])
        return None

    def is_open(self, launcher: str) -> bool:
        """Whether options of a launcher may be in a variable whose value is unknown."""
        words = self.options_of(launcher)
        for i, word in enumerate(words):
            is_value = i and words[i - 1].text.startswith("-") and "=" not in words[i - 1].text
            if not is_value and re.fullmatch(r"\$(\w+|[@*]|\{\w+(\[[@*]\])?\})", word.text):
                return True
        return False

    def options_of(self, launcher: str) -> tuple[Word, ...]:
        """Returns the words of a launcher's options."""
        script = len(self.words) if self._script_index is None else self._script_index
        if launcher == "script":
            return self.words[script + 1 :]
        indices = [*self._launcher_indices, (script, "")]
        for (start, name), (end, _) in pairwise(indices):
            if name == launcher:
                return self.words[start + 1 : end]
        return ()


def _name(word: Word) -> str:
    """Returns the name of a program without its folder."""
    return word.text.rpartition("/")[2]
