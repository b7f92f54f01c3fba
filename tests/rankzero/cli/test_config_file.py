import yaml

from rankzero.cli.config_file import read_config
from running import command_of, refusal_of

FIT = command_of("fit")


def parse(path, text):
    path.write_text(text)
    return read_config(FIT, str(path))


def test_a_file_with_only_lightning_keys_is_passed_on_unchanged(tmp_path):
    path = tmp_path / "a.yaml"
    text, values = parse(path, "trainer:\n  max_epochs: 3\n  devices: 2\nmodel:\n  class_path: my.Net\n")
    assert text == str(path)
    assert values == {"trainer.max_epochs": 3, "trainer.devices": 2, "model": {"class_path": "my.Net"}}


def test_short_names_in_a_file_become_lightning_keys_and_numbers_are_unchanged(tmp_path):
    content = "epochs: 3\nmodel: MLP\ndata: {class_path: Toy}\nseed: 1\nbatch_size: 8\n"
    text, values = parse(tmp_path / "a.yaml", content)
    assert yaml.safe_load(text) == {
        "trainer": {"max_epochs": 3},
        "model": {"class_path": "lightning_modules.MLP"},
        "data": {"class_path": "data_modules.Toy"},
        "seed_everything": 1,
        "batch_size": 8,
    }
    assert values["trainer.max_epochs"] == 3 and values["batch_size"] == 8
    text, _ = parse(tmp_path / "a.yaml", "epochs: 1\ntrainer: {gradient_clip_val: 1e-3}\n")
    assert "gradient_clip_val: 1e-3" in text  # plain YAML reads this number as text


def test_a_wrong_or_missing_config_file_is_refused(tmp_path):
    expected = {"epoch: 3": "no such key", "a: [": "not YAML", "devices: 0": "not a whole number"}
    expected |= dict.fromkeys(("just words", ""), "no 'key: value' lines")
    for text, found in (expected | {"model: RezNet": "no model of that name"}).items():
        assert found in refusal_of(parse, tmp_path / "train.yaml", text).found
    error = refusal_of(read_config, FIT, str(tmp_path / "trian.yaml"))
    assert "contains train.yaml" in error.found and error.instead.endswith("train.yaml")
