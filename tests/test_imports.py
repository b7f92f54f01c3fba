"""Checks the layers of the packages, the size of files and folders, and which modules do without torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import REPOSITORY

ROOT = REPOSITORY / "project" / "rankzero"

LAYERS = (
    *("commands", "jobs", "trainer", "cli", "preflight", "show", "training"),
    *("runs", "checkpoints", "sampling", "distributed", "text", "messages"),
)
"""From top to bottom; a module never imports from a layer above its own."""

MAX_ENTRIES, MAX_ROOT_ENTRIES, MAX_LINES = 13, 15, 400

WITHOUT_TORCH = (
    *("lightning_modules", "data_modules", "rankzero", "rankzero.__main__", "rankzero.cli.arguments"),
    *("rankzero.commands.start", "rankzero.commands.explain"),
    *("rankzero.commands.preflight", "rankzero.commands.submit", "rankzero.commands.list", "rankzero.commands.compare"),
    *("rankzero.distributed.environments.detect", "rankzero.distributed.process.spawn"),
    *("rankzero.distributed.rendezvous.client", "rankzero.distributed.scheduler.job"),
    *("rankzero.distributed.scheduler.requeue", "rankzero.runs.directory", "rankzero.commands.report"),
)

WITH_PRIVATE_NAMES = ("rankzero.distributed.torch_inside", "rankzero.training.lightning_inside")
"""The modules that use private names of other packages."""
MAX_PRIVATE_NAMES = 48

OF_PYTHON = {"_asdict", "_current_frames", "_fields", "_ncallbacks", "_option_string_actions"}
"""Private names of Python's own modules, and the methods of named tuples."""

MAX_FILES, MAX_SOURCE_LINES, MAX_TEST_LINES = 211, 33_690, 38_250
"""Size of `rankzero` and of the tests; like the numbers below, they may fall and may not rise."""

MAX_CLOSURES = {
    "trainer": (153, 27_931),
    "commands.fit": (161, 29_266),
    "commands.evaluate": (164, 29_524),
    "commands.predict": (166, 29_890),
    "commands.preflight": (161, 29_310),
    "commands.submit": (186, 31_876),
    "commands.list": (44, 5_490),
    "commands.compare": (40, 5_778),
    "commands.report": (39, 5_968),
    "commands.explain": (33, 4_683),
}
"""Module -> most files, and most lines, of all modules that it imports, also inside functions."""

MAX_CHAIN = 24
"""Most modules of which each imports the next one while it is itself imported."""

FILES = sorted(ROOT.rglob("*.py"))
OTHER_PACKAGES = ("launch", "lightning_modules", "data_modules")
"""The repository's packages beside `rankzero`."""


def imports(file: Path) -> Iterator[str]:
    """Yields the dotted names that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(file: Path, also_inside_functions: bool) -> set[str]:
    """Returns the modules of `rankzero` that a file imports."""
    nodes, found = [ast.parse(file.read_text())], set()
    while nodes:
        node = nodes.pop()
        names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {module for name in names for module in (name, name.rpartition(".")[0]) if module in MODULES}
        is_late = isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)
        is_late = is_late or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        if also_inside_functions or not is_late:
            nodes += ast.iter_child_nodes(node)
    return found


def closure(module: str) -> set[str]:
    """Returns all modules that a module imports, directly or through others, also inside functions."""
    found, rest = set(), [f"rankzero.{module}"]
    while rest:
        if (name := rest.pop()) not in found:
            found.add(name)
            rest += imported_modules(MODULES[name], also_inside_functions=True)
    return found


def longest_chain(modules: dict[str, set[str]]) -> list[str]:
    """Returns the longest chain of modules, given the modules that each one imports."""
    chains: dict[str, list[str]] = {}

    def chain(module: str) -> list[str]:
        if module not in chains:
            chains[module] = []  # ends a cycle
            chains[module] = [module, *max(map(chain, sorted(modules[module])), key=len, default=[])]
        return chains[module]

    return max(map(chain, sorted(modules)), key=len)


def layer(module: str) -> int | None:
    """Returns a module's layer, counted from the top, or None outside all layers (such as `rankzero` itself)."""
    _, _, rest = module.partition("rankzero.")
    name = rest.split(".")[0]
    return LAYERS.index(name) if name in LAYERS else None


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


MODULES = {module_of(file).removesuffix(".__init__"): file for file in FILES}


def upward_imports(files: list[Path]) -> list[str]:
    pairs = [(module_of(file), name) for file in files for name in imports(file) if name.startswith("rankzero.")]
    layers = [(layer(module), layer(name)) for module, name in pairs]
    return [
        f"{module} imports {name}"
        for (module, name), (own, imported) in zip(pairs, layers, strict=True)
        if None not in (own, imported) and imported < own
    ]


def test_no_module_imports_from_a_layer_above_its_own_and_the_check_would_find_it(tmp_path, monkeypatch):
    assert upward_imports(FILES) == []
    file = tmp_path / "rankzero" / "sampling" / "plan.py"
    file.parent.mkdir(parents=True)
    file.write_text("def late():\n    from rankzero.trainer import Trainer\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path / "rankzero")
    assert upward_imports([file]) == ["rankzero.sampling.plan imports rankzero.trainer.Trainer"]


def test_closures_chains_and_lines_do_not_grow():
    lines = {module: len(file.read_text().splitlines()) for module, file in MODULES.items()}
    closures = {module: closure(module) for module in MAX_CLOSURES}
    sizes = {module: (len(names), sum(lines[name] for name in names)) for module, names in closures.items()}
    grown = {module: size for module, size in sizes.items() if any(map(int.__gt__, size, MAX_CLOSURES[module]))}
    assert grown == {}
    chain = longest_chain({module: imported_modules(file, False) for module, file in MODULES.items()})
    assert len(chain) <= MAX_CHAIN, chain
    assert longest_chain({"a": {"c"}, "b": {"a", "d"}, "c": {"b", "d"}, "d": set()}) == ["a", "c", "b", "d"]
    test_lines = sum(len(file.read_text().splitlines()) for file in (REPOSITORY / "tests").rglob("*.py"))
    assert len(FILES) <= MAX_FILES
    assert sum(lines.values()) <= MAX_SOURCE_LINES
    assert test_lines <= MAX_TEST_LINES


def test_no_package_imports_private_names_of_another_package():
    found = [
        f"{module_of(file)} imports {name}"
        for file in FILES
        for name in imports(file)
        if name.startswith("rankzero.") and name.rpartition(".")[2].startswith("_") and not name.endswith("__")
        if name.rpartition(".")[0].rpartition(".")[0] != module_of(file).rpartition(".")[0]
    ]
    assert found == []


def private_names(files):
    """Returns module -> the private names of other packages that it imports, or reads as attributes."""
    nodes = [(module_of(file), node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    defined = {getattr(node, "name", "") for _, node in nodes}
    for _, node in nodes:
        if isinstance(getattr(node, "ctx", None), ast.Store):
            is_own = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
            defined |= {node.attr} if is_own else {getattr(node, "id", "")}
    found = {}
    for module, node in nodes:
        names = [node.attr] if isinstance(node, ast.Attribute) and node.attr not in defined | OF_PYTHON else []
        if isinstance(node, ast.ImportFrom) and not node.module.startswith("rankzero"):
            names = [name for alias in node.names for name in (*node.module.split("."), alias.name)]
        private = {name for name in names if name.startswith("_") and not name.endswith("__")}
        found[module] = found.get(module, set()) | private
    return {module: names for module, names in found.items() if names}


def test_private_names_of_other_packages_are_in_two_files_and_the_check_would_find_others(tmp_path, monkeypatch):
    found = private_names(FILES)
    assert sorted(found) == sorted(WITH_PRIVATE_NAMES)
    assert len(set().union(*found.values())) <= MAX_PRIVATE_NAMES
    file = tmp_path / "rankzero" / "sampling" / "plan.py"
    file.parent.mkdir(parents=True)
    file.write_text("from torch._C import _log\nx = torch.y._asdict, torch._dynamo\nself._own = self._own\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path / "rankzero")
    assert private_names([file]) == {"rankzero.sampling.plan": {"_C", "_log", "_dynamo"}}


@pytest.mark.parametrize("package", OTHER_PACKAGES)
def test_models_and_data_import_no_package_of_the_repository_and_launch_only_rankzero(package):
    packages = {*OTHER_PACKAGES, "rankzero", "tests"} - {package}
    found = {name.split(".")[0] for file in (REPOSITORY / package).rglob("*.py") for name in imports(file)}
    assert found & packages == ({"rankzero"} if package == "launch" else set())


def test_folders_and_files_stay_within_their_limits():
    def entries(folder):
        ignored = {"__pycache__"} if folder == ROOT else {"__pycache__", "__init__.py"}  # counts only at the root
        return len([path for path in folder.iterdir() if path.name not in ignored])

    folders = {file.parent for file in FILES} - {ROOT}
    assert entries(ROOT) <= MAX_ROOT_ENTRIES
    assert [folder.name for folder in folders if entries(folder) > MAX_ENTRIES] == []
    assert [module_of(file) for file in FILES if len(file.read_text().splitlines()) > MAX_LINES] == []


def test_files_named_in_the_source_exist_and_pyproject_lists_every_package():
    existing = [f"/{file.relative_to(REPOSITORY)}" for file in REPOSITORY.glob("[!.]*/**/*.py")]
    existing.append("/train.py")  # a user's script
    name_in_text = r"(?<!\$)\b\w[\w/]*\.py\b"  # below a variable such as `$PWD/`, without it
    named = {(module_of(file), name) for file in FILES for name in re.findall(name_in_text, file.read_text())}
    missing = [(module, name) for module, name in named if not any(path.endswith(f"/{name}") for path in existing)]
    assert missing == []
    text = (REPOSITORY / "pyproject.toml").read_text()
    folders = {file.parent for file in FILES}
    assert [name for folder in folders if f'"{(name := module_of(folder))}"' not in text] == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_neither_torch_nor_lightning(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_only_distributed_and_generators_read_environment_variables_and_only_commands_import_models_and_data():
    def reads_environment(file):
        return "os.environ" in file.read_text() or "getenv" in file.read_text()

    readers = {module_of(file) for file in FILES if reads_environment(file)}
    outside_distributed = {name for name in readers if not name.startswith("rankzero.distributed.")}
    assert outside_distributed == {"rankzero.sampling.generators"}  # PL_GLOBAL_SEED, which Lightning sets
    other_files = [file for name in OTHER_PACKAGES for file in (REPOSITORY / name).rglob("*.py")]
    assert other_files and not [file for file in other_files if reads_environment(file)]
    packages = {*OTHER_PACKAGES, "tests"}
    importing = {file for file in FILES if packages & {name.split(".")[0] for name in imports(file)}}
    assert {file.parent.name for file in importing} == {"commands"}
