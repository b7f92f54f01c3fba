"""Prints the installed version of each package that Rankzero needs, directly or not, as requirements for pip."""

from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed_packages(name: str, extras: frozenset[str] = frozenset()) -> set[tuple[str, frozenset[str]]]:
    """Returns the packages that a package needs on this machine, with their extras."""
    found: set[tuple[str, frozenset[str]]] = set()
    remaining = [(name, extras)]
    while remaining:
        package = remaining.pop()
        if package in found:
            continue
        found.add(package)
        for line in requires(package[0]) or ():
            requirement = Requirement(line)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (*package[1], "")
            ):
                remaining.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


if __name__ == "__main__":
    names = {name for name, _ in needed_packages("rankzero")} - {"rankzero"}
    print("\n".join(f"{name}=={version(name)}" for name in sorted(names)))
