from rich.table import Table

from project.report import _print


def test_what_is_typed_again_stays_whole_in_a_pipe(capsys):
    path = "/a/path" * 30
    table = Table(show_header=False)
    table.add_row("checkpoint", path)
    _print(table)
    assert path in capsys.readouterr().out
