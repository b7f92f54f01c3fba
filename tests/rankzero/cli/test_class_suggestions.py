import pytest

from rankzero.cli.class_suggestions import user_classes, with_depth


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "net.py").write_text("class Net:\n    class Inner: ...\n\nclass Data(Net): ...\n")
    (tmp_path / "models/big.py").write_text("class Big: ...\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\0class")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("net.py", ["net.Net", "net.Data"]),
        ("net", ["net.Net", "net.Data"]),
        ("Data", ["net.Data"]),
        ("models/big.py", ["models.big.Big"]),
        ("Inner", []),
        ("binary.py", []),
        ("missing.py", []),
        ("../folder/net.py", []),
        ("", []),
        ("a\0b", []),
    ],
)
def test_a_file_a_module_or_a_class_is_completed_to_class_paths(folder, text, classes):
    assert user_classes(text) == classes


def test_an_absolute_path_is_not_completed(folder):
    assert user_classes(str(folder / "net.py")) == []


@pytest.mark.parametrize("text", ["ResNet50", "resnet-50", "resnet_50"])
def test_a_resnet_with_its_depth_is_completed_to_two_flags(text):
    assert with_depth(text) == "--model ResNet --model.depth 50"


@pytest.mark.parametrize("text", ["ResNet", "MLP2", ""])
def test_other_names_have_no_depth(text):
    assert with_depth(text) is None
