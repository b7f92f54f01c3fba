"""Messages about a user's class that does not exist or cannot be imported."""

import subprocess
import sys

import pytest

from rankzero.cli.class_errors import unknown_class_error
from rankzero.cli.import_names import CHECKOUT
from rankzero.messages import CannotStart
from running import fit_in_process, refusal_of

BROKEN_FILES = {
    "missing.py": ("import json\nimport nosuchthing\n", "missing.py, line 2: import nosuchthing"),
    "name.py": ("x = undefined\n", "NameError: name 'undefined' is not defined"),
    "syntax.py": ("def f(:\n", "syntax.py, line 1: def f(:"),
    "raises.py": ("def f():\n    raise KeyError('mine')\nf()\n", "raises.py, line 2: raise KeyError('mine')"),
    "other.py": ("from json import no_such_name\n", "ImportError: cannot import name 'no_such_name'"),
}


@pytest.mark.parametrize(
    ("text", "found", "instead"),
    [
        ("net.py", "net.py is a file, not a class path; classes in this folder: net.Net, net.Data", "net.Net"),
        ("net", "; classes in this folder: net.Net, net.Data", "net.Net"),
        ("Data", "; classes in this folder: net.Data", "net.Data"),
        ("models/big.py", "; classes in this folder: models.big.Big", "models.big.Big"),
        ("Inner", "there is no model of that name; choose MLP, ResNet, or a class path", "MLP"),
        *((file, f"{file} is a file, not a class path", "MLP") for file in ("binary.py", "models/../net.py")),
        *((file, "there is no such file", "MLP") for file in ("missing.py", "x" * 300 + ".py")),
        *((text, "there is no model of that name", "MLP") for text in ("x" * 300, "a\0b")),
        ("ResNet50", "there is no model of that name", "ResNet --model.depth 50"),
        ("resnet-18", "there is no model of that name", "ResNet --model.depth 18"),
        ("resnet-20", "there is no model of that name", "ResNet"),
    ],
)
def test_an_unknown_class_suggests_classes_of_the_folder(cwd, text, found, instead):
    (cwd / "models").mkdir()
    (cwd / "net.py").write_text("class Net:\n    class Inner: ...\n\nclass Data(Net): ...\n")
    (cwd / "models/big.py").write_text("class Big: ...\n")
    (cwd / "binary.py").write_bytes(b"\xff\xfe\0class")
    error = unknown_class_error("model", text, ["MLP", "ResNet"])
    assert error.asked == f"--model {text}" and found in error.found
    assert error.instead == f"--model {instead}"
    assert unknown_class_error("data", "resnet50", ["Toy"]).instead == "--data Toy"  # only a model is completed


@pytest.mark.parametrize("file", BROKEN_FILES)
def test_an_error_in_a_users_module_names_its_file_and_line(cwd, monkeypatch, file):
    content, found = BROKEN_FILES[file]
    folder = cwd / "broken_modules"
    folder.mkdir()
    (folder / file).write_text(content)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(CannotStart) as error:
        fit_in_process("--model", f"{file.removesuffix('.py')}.Net")
    message = str(error.value)
    assert found in message and "the folder that contains" not in message and "Traceback" not in message
    assert f"asked  --model {file.removesuffix('.py')}.Net" in message and "the same command, after" in message


def test_a_missing_class_of_a_module_names_the_classes_of_the_same_kind_that_it_defines(add_module):
    classes = (
        "class Data(LightningDataModule): ...\nclass Other(LightningModule): ...\nclass Net(LightningModule): ...\n"
    )
    add_module(
        "seen", f"from lightning.pytorch import LightningDataModule, LightningModule\n{classes}class Plain: ...\n"
    )
    for flag, name, advice, defined in (
        *(("model", "Netz", "Net", "Other, Net"), ("model", "Missing", "Other", "Other, Net")),
        ("data", "Net_", "Data", "Data"),
    ):
        error = refusal_of(fit_in_process, f"--{flag}", f"seen.{name}")
        assert error.found == f"seen has no class {name}; it defines {defined}"
        assert (error.asked, error.instead) == (f"--{flag} seen.{name}", f"--{flag} seen.{advice}")


def test_a_class_of_the_users_package_is_named_with_its_file():
    for name, instead in (("Short", "lightning_modules.FILE.Short"), ("ResNt", "ResNet")):
        error = refusal_of(fit_in_process, "--model", f"lightning_modules.{name}", "--data", "Toy")
        assert error.found.startswith(f"lightning_modules has no class {name}; a class in your own folder")
        assert error.instead == f"--model {instead}"


@pytest.mark.system
def test_a_users_file_hidden_by_a_rankzero_module_is_named(cwd):
    (cwd / "data_modules").mkdir()
    (cwd / "data_modules/toy.py").write_text("class Mine: pass")
    command = [sys.executable, str(CHECKOUT / "launch/fit.py"), "--model", "data_modules.toy.Mine"]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 2
    assert f"{cwd}/data_modules/toy.py cannot be imported as data_modules.toy: Rankzero has a module" in process.stderr
