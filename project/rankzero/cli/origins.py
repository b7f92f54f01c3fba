"""Sources of configuration values: the command line, config files and checkpoints. Does not import torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.messages import quoted
from rankzero.runs.stored_config import flattened


class Origins(NamedTuple):
    """Names the source of a value as the user typed it.

    Args:
        typed_arguments: The command line as typed.
        keys: Short flag or alias -> LightningCLI key, or the flag's name if it has none.
        sources: Further sources such as `--config FILE`, each with its content; later sources override earlier ones.
        stored_source: Name in `sources` of the configuration stored in a checkpoint; empty without one.
    """

    typed_arguments: Sequence[str] = ()
    keys: Mapping[str, str] = {}
    sources: Sequence[tuple[str, Mapping[str, Any]]] = ()
    stored_source: str = ""

    def request_for(self, key: str) -> str:
        """Returns the request that set a value: the flag and value as typed, or the key, the value and the file."""
        options = list(self._options())
        exact = [
            text for option, text, _ in options if self.keys.get(option, option).removesuffix(".class_path") == key
        ]
        if exact:
            return exact[-1]
        if name := self.source_of(key):
            value = self.value_of(key)
            return f"{key}{f': {quoted(value)}' if value else ''}, in {name}"
        sections = [(option, text) for option, text, _ in options if f"{key}.".startswith(f"{option}.")]
        return str(max(sections, key=lambda option: len(option[0]))[1]) if sections else f"--{key}"

    def value_of(self, key: str) -> str:
        """Returns a value as it was typed or as text; empty if neither the command line nor a file sets it."""
        keys = (key, f"{key}.class_path")
        typed = [value for option, _, value in self._options() if self.keys.get(option, option) in keys]
        if typed or not (name := self.source_of(key)):
            return typed[-1] if typed else ""
        content = flattened(dict(self.sources)[name])
        given = content.get(key, content.get(f"{key}.class_path"))
        return "" if given is None else str(given)

    def source_of(self, key: str) -> str:
        """Returns the file or checkpoint that sets a value; empty if none does, or if the value was typed."""
        if any(self.keys.get(option, option) == key for option, *_ in self._options()):
            return ""
        for name, content in reversed(self.sources):
            if any(path == key or path.startswith(f"{key}.") for path in flattened(content)):
                return str(name)
        return ""

    def flag_without(self, key: str) -> str:
        """Returns the flag that passes a section of the stored configuration without the argument `key`."""
        section, _, argument = key.partition(".")
        content = dict(self.sources)[self.stored_source][section]
        init_args = {name: value for name, value in (content.get("init_args") or {}).items() if name != argument}
        text = json.dumps({"class_path": content["class_path"], "init_args": init_args})
        return f"--{section} '{text}'"

    def _options(self) -> Iterator[tuple[str, str, str]]:
        """Yields each typed flag without dashes, its text with the value, and the value."""
        for i, token in enumerate(self.typed_arguments):
            if token.startswith("--"):
                option, equals, value = token[2:].partition("=")
                next_tokens = self.typed_arguments[i + 1 : i + 2]
                if not equals and next_tokens and not next_tokens[0].startswith("--"):
                    value, equals = next_tokens[0], " "
                yield option.removesuffix("+"), f"--{option}" + (f" {quoted(value)}" if equals else ""), value
