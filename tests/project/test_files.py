from project.files import write_text


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "below/a.json"
    for text in ("{}", "[1]"):
        write_text(path, text)
        assert path.read_text() == text and list(path.parent.iterdir()) == [path]


def test_what_a_crash_left_half_written_is_taken_by_the_next(tmp_path):
    path = tmp_path / "a.json"
    (tmp_path / ".a.json.saving").write_text("half")
    write_text(path, "whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]
