from rankzero.runs.reports.comparison.settings import differences


def as_dict(*configs):
    return {difference.name: difference.values for difference in differences(configs)}


def test_only_settings_that_differ_are_returned_with_their_flags():
    first = {"seed_everything": 0, "model": {"class_path": "MLP", "init_args": {"width": 8, "depth": 2}}}
    second = {"seed_everything": 0, "model": {"class_path": "MLP", "init_args": {"width": 16, "depth": 2}}}
    assert as_dict(first, second) == {"model.width": ["8", "16"]}
    assert as_dict(first, first, second) == {"model.width": ["8", "8", "16"]}
    for name in ("name", "root", "resume", "launcher", "node_rank"):
        assert differences([{name: "a"}, {name: "b"}]) == []
    assert differences([{"trainer": {"root": "a"}}, {"trainer": {"root": "b"}}]) == []


def test_classes_settings_that_only_one_has_and_items_of_nested_lists_are_differences():
    first = {"model": {"class_path": "MLP", "init_args": {"width": 8}}, "data": {"class_path": "A", "init_args": {}}}
    second = {"model": {"class_path": "ResNet", "init_args": {"depth": 18}}, "data": {"class_path": "B"}}
    model = {"model": ["MLP", "ResNet"], "model.width": ["8", "-"], "model.depth": ["-", "18"]}
    assert as_dict(first, second) == {**model, "data": ["A", "B"]}
    callbacks = [{"class_path": "A", "init_args": {"x": 1}}, {"class_path": "B"}]
    first = {"trainer": {"callbacks": callbacks, "sizes": [1, 2]}}
    second = {"trainer": {"callbacks": [{"class_path": "A", "init_args": {"x": 2}}], "sizes": [1, 2, 3]}}
    items = {"trainer.callbacks.0.x": ["1", "2"], "trainer.callbacks.1": ["B", "-"]}
    assert as_dict(first, second) == {**items, "trainer.sizes": ["[1, 2]", "[1, 2, 3]"]}


def test_null_equals_absent_and_null_false_zero_and_absent_are_shown_as_such():
    assert differences([{"a": None, "b": 1}, {"b": 1}]) == []
    values = [{"a": None, "b": 1}, {"a": False, "b": 1}, {"a": 0, "b": 1}, {"b": 1}]
    assert as_dict(*values) == {"a": ["null", "false", "0", "-"]}
    assert as_dict({"seed": 1}, {}, {"seed": 2}) == {"seed": ["1", "-", "2"]}
    assert differences([{"seed": 1}, {}]) is None  # an unknown configuration is no difference


def test_values_of_secrets_are_hidden():
    first = {"model": {"init_args": {"token": "abc", "url": "https://u:abc@host", "eos_token": "a"}}}
    second = {"model": {"init_args": {"token": "def", "url": "https://u:def@host", "eos_token": "b"}}}
    hidden = {"model.token": ["...", "..."], "model.url": ["https://u:...@host", "https://u:...@host"]}
    assert as_dict(first, second) == {**hidden, "model.eos_token": ["a", "b"]}
