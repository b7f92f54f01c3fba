from rankzero.cli.origins import Origins

ORIGINS = Origins(
    typed_arguments=["--model", "my.Net", "--model.width=3", "--epochs", "2", "--flag", "--data.n", "a\x1b[31mb"],
    keys={"epochs": "trainer.max_epochs"},
    sources=[
        ("the stored configuration", {"data": {"class_path": "my.Data", "init_args": {"n": 1, "sleep": 0.5}}}),
        ("--config c.yaml", {"model": {"class_path": "my.Net", "init_args": {"width": 4, "depth": 5}}}),
    ],
    stored_source="the stored configuration",
)


def test_a_value_is_named_as_typed_or_with_its_file():
    expected = {
        "model.width": "--model.width 3",
        "trainer.max_epochs": "--epochs 2",
        "data.n": "--data.n 'a?[31mb'",
        "model.depth": "model.depth: 5, in --config c.yaml",
        "data.sleep": "data.sleep: 0.5, in the stored configuration",
        "model.other": "--model my.Net",
        "trainer.logger": "--trainer.logger given",
    }
    assert {key: ORIGINS.request_for(key, "given") for key in expected} == expected


def test_a_stored_section_is_shown_as_a_flag_without_an_argument_and_objects_of_the_parser_are_not_shown():
    assert ORIGINS.flag_without("data.sleep") == """--data '{"class_path": "my.Data", "init_args": {"n": 1}}'"""
    assert Origins().request_for("model", "Namespace(class_path='my.Net', init_args=Namespace())") == "--model"
