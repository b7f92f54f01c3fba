"""Checks the declared dependencies, and the versions that `make test-lowest` installs."""

import re
import sys
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement

from running import REPOSITORY, run

SOURCE_FOLDERS = ("launch", "project/rankzero", "lightning_modules", "data_modules")


def test_every_dependency_is_pinned_to_its_lower_bound(tmp_path):
    pins = run("python", str(REPOSITORY / ".ci/lowest.py"), folder=tmp_path).out.splitlines()
    assert "torch==2.10" in pins and "lightning==2.6.6" in pins and "jsonargparse[signatures]==4.52" in pins
    needed = [Requirement(line) for line in requires("rankzero") if "extra ==" not in line]
    assert {requirement.name for requirement in needed} <= {re.split(r"[\[=]", pin)[0] for pin in pins}


def test_every_imported_package_is_a_declared_dependency():
    declared = {Requirement(line).name.lower() for line in requires("rankzero")}
    text = "\n".join(file.read_text() for folder in SOURCE_FOLDERS for file in (REPOSITORY / folder).rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    imported -= {"rankzero", *SOURCE_FOLDERS, *sys.stdlib_module_names}
    owners = packages_distributions()
    names = {name: {owner.lower().replace("_", "-") for owner in owners.get(name, ())} for name in imported}
    assert not {name for name, packages in names.items() if packages and not packages & declared}
