"""One short flag of a command. Does not import torch."""

import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from rankzero.messages import RequestError, nearest


class Flag(NamedTuple):
    """One short flag.

    Args:
        name: Name without dashes.
        metavar: Placeholder for the value in the help.
        read: Reads the value from text, or raises a ValueError that describes valid values.
        help: Description in one line.
        example: A valid value, for error messages.
        lightning_key: LightningCLI key that has the same meaning, if any.
        aliases: Further names.
        default: Value without the flag.
        bare_value: Value of the flag if it is typed without a value; None if it needs one.
    """

    name: str
    metavar: str
    read: Callable[[str], Any]
    help: str
    example: str
    lightning_key: str | None = None
    aliases: tuple[str, ...] = ()
    default: Any = None
    bare_value: str | None = None

    def value(self, text: str) -> Any:
        """Reads the value.

        Raises:
            RequestError: The value is invalid.
        """
        try:
            return self.read(text)
        except ValueError as error:
            suggestion = (
                nearest(text, str(error).removeprefix("one of ").split(", ")) if "one of" in str(error) else None
            )
            raise RequestError(
                f"--{self.name} {shlex.quote(text)}",
                f"{text!r} is not {error}",
                f"--{self.name} {suggestion or self.example}",
            ) from None
