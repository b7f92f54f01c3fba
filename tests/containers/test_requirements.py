import re
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from running import REPOSITORY

CONTAINERS = REPOSITORY / "containers"


def pinned():
    """Returns package -> version in containers/requirements.txt."""
    lines = (CONTAINERS / "requirements.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def test_each_dependency_is_pinned_to_a_version_that_rankzero_accepts():
    versions = pinned()
    for requirement in map(Requirement, requires("rankzero")):
        if requirement.marker is None:  # otherwise, it is a tool of developers
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_tools_of_developers_are_not_in_the_image():
    assert not {"pytest", "ruff", "mypy", "hypothesis", "rankzero"} & pinned().keys()


def test_both_images_copy_the_same_files():
    dockerfile = (CONTAINERS / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for word in line.split()}
    files = re.search(r"^%files\n(.*?)\n\n", (CONTAINERS / "rankzero.def").read_text(), re.MULTILINE | re.DOTALL)[1]
    ignored = (CONTAINERS / "Dockerfile.dockerignore").read_text().split()
    assert copied == {line.split()[0] for line in files.splitlines()}
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in copied)
