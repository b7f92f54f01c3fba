"""Sources of configuration values: the command line, config files and checkpoints. Does not import torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.cli.foreign_flags import quoted
from rankzero.runs.stored_config import flattened


class Origins(NamedTuple):
    """Names the source of a value as the user typed it.

    Args:
        typed: The command line as typed.
        names: Short flag or alias -> LightningCLI key, or the flag's name if it has none.
        files: Further sources such as `--config FILE`, each with its content; later sources override earlier ones.
        stored: Name in `files` of the configuration stored in a checkpoint; empty without one.
    """

    typed: Sequence[str] = ()
    names: Mapping[str, str] = {}
    files: Sequence[tuple[str, Mapping[str, Any]]] = ()
    stored: str = ""

    def asked(self, key: str, given: str = "") -> str:
        """Returns the request that set a value: the flag and value as typed, or the key, the value and the file.

        Args:
            key: LightningCLI key, such as `data.num_workers`.
            given: The value, if known.
        """
        options = list(self._options())
        exact = [text for option, text in options if self.names.get(option, option) == key]
        if exact:
            return exact[-1]
        if name := self.file_of(key):
            content = flattened(dict(self.files)[name])
            value = f": {quoted(str(content[key]))}" if key in content else ""
            return f"{key}{value}, in {name}"
        above = [(option, text) for option, text in options if f"{key}.".startswith(f"{option}.")]
        if above:
            return str(max(above, key=lambda typed: len(typed[0]))[1])
        return f"--{key}" + (f" {quoted(given)}" if given and "Namespace(" not in given else "")

    def file_of(self, key: str) -> str:
        """Returns the file or checkpoint that sets a value; empty if none does, or if the value was typed."""
        if any(self.names.get(option, option) == key for option, _ in self._options()):
            return ""
        for name, content in reversed(self.files):
            if any(path == key or path.startswith(f"{key}.") for path in flattened(content)):
                return str(name)
        return ""

    def without(self, key: str) -> str:
        """Returns the flag that passes a section of the stored configuration without the argument `key`."""
        section, _, argument = key.partition(".")
        content = dict(self.files)[self.stored][section]
        kept = {name: value for name, value in (content.get("init_args") or {}).items() if name != argument}
        text = json.dumps({"class_path": content["class_path"], "init_args": kept})
        return f"--{section} '{text}'"

    def _options(self) -> Iterator[tuple[str, str]]:
        """Yields each typed flag without dashes, and its text with the value."""
        for i, token in enumerate(self.typed):
            if token.startswith("--"):
                option, equals, value = token[2:].partition("=")
                following = self.typed[i + 1 : i + 2]
                if not equals and following and not following[0].startswith("--"):
                    value, equals = following[0], " "
                yield option.removesuffix("+"), f"--{option}" + (f" {quoted(value)}" if equals else "")
