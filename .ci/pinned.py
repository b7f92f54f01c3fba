"""Prints the installed version of each package that Rankzero needs, directly or indirectly, as requirements for pip."""

from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed_packages(name: str) -> set[str]:
    """Returns the package and all packages that it needs on this machine."""
    found: set[tuple[str, frozenset[str]]] = set()
    remaining = [(name, frozenset[str]())]
    while remaining:
        package = remaining.pop()
        if package in found:
            continue
        found.add(package)
        for line in requires(package[0]) or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*package[1], "")):
                remaining.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {package for package, _ in found}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version(name)}" for name in sorted(needed_packages("rankzero") - {"rankzero"})))
