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
    def add_module(name, file):
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)

    own = tmp_path / "my_model.py"
    own.write_text("x = 1\n")
    add_module("my_model", own)
    add_module("__main__", f"{sysconfig.get_path('scripts')}/rankzero")
    add_module("my_extension", "/home/me/my_extension.cpython-311-x86_64-linux-gnu.so")
    before = user_code()
    assert {"my_model", "lightning_modules", "data_modules"} <= set(before)
    assert not {"torch", "json", "rankzero", "builtins", "__main__", "my_extension"} & set(before)
    own.write_text("x = 2\n")
    assert user_code()["my_model"] != before["my_model"]


def test_a_lazy_module_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "lazy.py").write_text("raise ImportError('loaded')\n")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazy", module)
    assert "lazy" in user_code()


def test_a_combined_digest_depends_on_names_and_contents_and_not_on_their_order(tmp_path):
    assert combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"}) != combined({"a": "2", "b": "1"})
    assert digests({"missing": tmp_path / "missing.py", "folder": tmp_path}) == {}  # cannot be read
