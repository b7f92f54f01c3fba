"""Prints the lowest version that pyproject.toml allows of each package, as requirements for pip.

Tools without a lower bound, such as linters, are left out.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement


def lowest_pin(line: str) -> str | None:
    """Returns a requirement at its lower bound, or None for a development tool without one."""
    requirement = Requirement(line)
    lowest = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
    if not lowest:
        if requirement.marker is None:
            raise SystemExit(f"pyproject.toml: {line} has no lower bound")
        return None
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}=={lowest[0]}"


if __name__ == "__main__":
    print("\n".join(pin for line in requires("rankzero") or () if (pin := lowest_pin(line))))
