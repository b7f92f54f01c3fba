import importlib.util
import sys
import sysconfig
import types
from pathlib import Path

import data_modules  # noqa: F401  # part of the compared code
import lightning_modules  # noqa: F401
import rankzero
from rankzero.preflight.code import combined, digests, rankzero_code, user_code


def test_rankzeros_code_covers_all_its_files():
    code = rankzero_code()
    assert "rankzero/trainer.py" in code and "rankzero/preflight/code.py" in code
    assert len(code) == len(list(Path(rankzero.__file__).parent.rglob("*.py")))


def test_the_users_code_covers_imported_modules_outside_of_libraries(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text("x = 1\n")
    module = types.ModuleType("my_model")
    module.__file__ = str(tmp_path / "my_model.py")
    monkeypatch.setitem(sys.modules, "my_model", module)
    before = user_code()
    assert "my_model" in before and not {"torch", "json", "rankzero", "builtins"} & set(before)
    assert {"lightning_modules", "data_modules"} <= set(before)
    (tmp_path / "my_model.py").write_text("x = 2\n")
    assert user_code()["my_model"] != before["my_model"]


def test_installed_commands_and_extensions_are_not_compared(monkeypatch):
    module = types.ModuleType("__main__")
    module.__file__ = f"{sysconfig.get_path('scripts')}/rankzero"
    monkeypatch.setitem(sys.modules, "__main__", module)
    extension = types.ModuleType("my_extension")
    extension.__file__ = "/home/me/my_extension.cpython-311-x86_64-linux-gnu.so"
    monkeypatch.setitem(sys.modules, "my_extension", extension)
    assert not {"__main__", "my_extension"} & set(user_code())


def test_a_lazy_module_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "lazy.py").write_text("raise ImportError('loaded')\n")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazy", module)
    assert "lazy" in user_code()


def test_a_file_that_cannot_be_read_has_no_digest(tmp_path):
    assert digests({"missing": tmp_path / "missing.py", "folder": tmp_path}) == {}


def test_a_combined_digest_depends_on_names_and_contents_and_not_on_their_order():
    assert combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"}) != combined({"a": "2", "b": "1"})
