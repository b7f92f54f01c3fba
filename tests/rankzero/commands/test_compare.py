import time
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rankzero.commands.compare import main
from rankzero.show import comparison_figure as figure
from recorded_runs import locked, write_curves, write_run
from running import run, run_without_importing

CURVES = {"train/loss": {0: 1.0, 9: 0.5}, "val/loss": {9: 0.6}}
CURVES |= {"x_axis/epoch": {0: 0.1, 9: 1.0}}


@pytest.fixture
def compare(lines_of):
    return partial(lines_of, main)


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Returns a list that receives the figures; they are not rendered, which takes seconds."""
    figures, draw = [], figure.draw
    monkeypatch.setattr(figure, "draw", lambda *arguments: figures.append(draw(*arguments)) or figures[-1])
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **settings: Path(file).write_text(settings["format"]))
    return figures


def add(path, curves=CURVES, lr=0.1, **settings):
    config = {"name": path.name, "model": {"class_path": "m.Net", "init_args": {"lr": lr, "depth": 2}}}
    write_run(path, config=config, **settings)
    if curves:
        write_curves(path, curves)
    return path


def row_of(lines, name):
    return next(line.split()[1:] for line in lines if line.split()[:1] == [name])


def test_settings_that_differ_and_results_are_printed_and_curves_drawn(root, compare, drawn):
    add(root / "first", metrics={"val/loss": 0.6, "val/accuracy": 0.9})
    add(root / "second", lr=0.2, metrics={"val/loss": 0.3, "val/accuracy": 0.8})
    lines = compare("first", "second")
    assert row_of(lines, "model.lr") == ["0.1", "0.2"] and not any("depth" in line for line in lines)
    assert row_of(lines, "val/loss") == ["0.6", "0.3*"] and row_of(lines, "val/accuracy") == ["0.9*", "0.8"]
    assert row_of(lines, "status") == ["finished", "finished"]
    assert lines[-1] == "figure: runs/compare.png"
    assert (root / "compare.png").read_text() == "png"
    (found,) = drawn
    assert [axes.get_title() for axes in found.axes] == ["train loss", "val/loss"]
    assert [list(line.get_ydata()) for line in found.axes[0].lines] == [[1.0, 0.5]] * 2


def test_runs_are_given_by_name_or_path_and_drawn_once(root, cwd, compare, drawn):
    add(root / "first")
    add(cwd / "elsewhere/first")
    lines = compare("first", "runs/first/", "elsewhere/first")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["runs/first", "elsewhere/first"]
    assert row_of(lines, "steps") == ["69", "69"]
    add(root / "second", age=time.time() - 1e9)
    for axis, last in {"steps": 9, "samples": 320, "epochs": 0.1, "seconds": 9}.items():
        compare("second", "--x", axis)
        assert drawn[-1].axes[0].lines[0].get_xdata()[-1] == pytest.approx(last), axis


def test_metrics_can_be_chosen_and_unknown_ones_are_refused_with_similar_ones(root, compare, drawn):
    add(root / "first")
    compare("first", "--metric", "val/loss", "--metric", "x_axis/epoch")
    assert [axes.get_title() for axes in drawn[0].axes] == ["val/loss", "x_axis/epoch"]
    lines = compare("first", "--metric", "val/los", code=2)
    assert lines[1] == "  asked  --metric val/los" and lines[-1] == "  type   --metric val/loss"
    assert not (root / "figure.png").exists() and len(drawn) == 1


def test_an_unknown_run_or_root_is_refused_with_similar_names_and_the_other_runs(root, compare, cwd):
    assert "there is no folder" in compare("first", code=2)[2]
    root.mkdir()
    assert "contains no runs" in compare("first", code=2)[2]
    add(root / "first")
    add(root / "second")
    lines = compare("first", "secondd", code=2)
    assert lines[1] == "  asked  secondd" and "similar names: second" in lines[2]
    assert lines[3] == "  type   python launch/compare.py first second"
    lines = compare("zzz", code=2)
    assert "the newest runs: second, first" in lines[2] and lines[3].endswith("launch/list.py")
    (cwd / "data").mkdir()
    assert "it contains no run.json" in compare("data", code=2)[2]
    for path in ("~nosuchuser", "n" * 300, "/root/" + "x" * 300 + "/y"):  # paths that cannot exist
        assert "there is no such run" in compare(path, code=2)[2]


def test_suggested_commands_name_the_root_and_one_without_permission_is_named(root, cwd, compare, without_permission):
    add(cwd / "my runs/second")
    for run_name, end in {
        "secondd": "compare.py second --root 'my runs'",
        "zzz": "list.py --root 'my runs'",
        "": "compare.py second --root 'my runs'",
    }.items():
        assert compare(*filter(None, [run_name]), "--root", "my runs", code=2)[-1].endswith(end)
    add(root / "first")
    compare("first")  # imports everything, which an unprivileged user may be unable to do
    with without_permission(root):
        lines = compare("first", code=2)
    assert "cannot be read: Permission denied" in lines[2]


def test_one_run_has_no_settings_and_without_curves_no_figure_is_written(root, compare):
    add(root / "first")
    add(root / "second", curves=None)
    assert "one run, named more than once: there are no settings to compare" in compare("first", "runs/first")
    lines = compare("first")
    assert "one run: there are no settings to compare" in lines and (root / "compare.png").exists()
    assert not any("setting " in line for line in lines)
    assert "second: there are no curves in runs/second/metrics.jsonl" in compare("first", "second")
    (root / "compare.png").unlink()
    lines = compare("second")
    assert lines[-1] == "no figure is written, because there are no curves" and not (root / "compare.png").exists()


def test_no_run_and_too_many_runs_are_refused_with_runs_to_type(root, compare):
    for number in range(9):
        add(root / f"r{number}", curves=None, age=100 - number)
    assert compare(code=2)[-1] == "  type   python launch/compare.py r8"
    lines = compare(*(f"r{number}" for number in range(9)), code=2)
    assert "9 runs; one figure shows at most 8" in lines[2] and lines[-1].endswith("r6 r7")


def test_a_running_run_is_compared_with_the_values_it_has_logged(root, compare):
    add(root / "done", metrics={"val/loss": 0.3})
    with locked(add(root / "live", status=None)):
        lines = compare("done", "live")
    assert row_of(lines, "status") == ["finished", "running"] and row_of(lines, "steps") == ["69", "10"]
    assert row_of(lines, "val/loss") == ["0.3*", "0.6"]


def test_damaged_configurations_are_named_and_the_rest_is_compared(root, compare):
    add(root / "first")
    contents = {"empty": "", "open": "a: [", "list": "- 1", "cycle": "x: &a [*a]", "nul": "\0"}
    for name, content in contents.items():
        (add(root / name) / "config.yaml").write_text(content)
    lines = compare("first", *contents)
    for name in contents:
        assert f"{name}: config.yaml is missing or damaged, so its settings are not known" in lines
    rows = [line.split() for line in lines if line.split()[:1] == ["steps"]]  # 80 columns show four runs
    assert rows == [["steps", *["69"] * 4], ["steps", *["69"] * 2]]


def test_the_figure_is_written_where_requested_or_refused(root, cwd, compare, capsys):
    add(root / "first")
    for suffix in ("svg", "png"):
        assert compare("first", "--output", f"figures/all.{suffix}")[-1] == f"figure: figures/all.{suffix}"
        assert (cwd / f"figures/all.{suffix}").read_text() == suffix and not (root / "compare.png").exists()
    for file in (".png", "figure", "figure.gif", "a.png/.svg"):
        lines = compare("first", "--output", file, code=2)
        assert "a file that ends in .png, .svg, .pdf" in lines[2] and lines[-1] == "  type   --output compare.svg"
    (cwd / "file").touch()
    assert main(["first", "--output", "file/figure.png"]) == 1
    printed = capsys.readouterr()
    assert "val/loss" in printed.out and printed.err.count("\n") == 1
    assert "the figure file/figure.png cannot be written: File exists; type --output FILE" in printed.err


def test_hostile_names_and_values_print_no_control_characters(root, compare):
    add(root / "esc\x1b[31mape\n", {"val/\x1b[2J": {0: 1.0}}, lr="[red]\x1b\n")
    add(root / "[bold]", {"[val]/$x$": {0: 1.0}}, lr="\u202e")
    text = "\n".join(compare("esc\x1b[31mape\n", "[bold]"))
    assert text.replace("\n", "").isprintable() and "[red]??" in text and "[bold]" in text


@pytest.mark.parametrize(
    ("runs", "modules"),
    [
        (["first", "second"], ("torch", "lightning", "matplotlib.pyplot")),
        (["without-curves"], ("torch", "lightning", "matplotlib", "numpy")),  # no figure is drawn
    ],
)
def test_a_comparison_imports_neither_torch_nor_pyplot(tmp_path, runs, modules):
    for name in ("first", "second", "without-curves"):
        add(tmp_path / "runs" / name, curves=None if "-" in name else CURVES)
    code = f"from rankzero.commands.compare import main; assert main({runs}) == 0"
    assert ("figure: " in run_without_importing(*modules, code=code, folder=tmp_path).out) == (len(runs) > 1)


def test_the_help_of_the_console_command_fits_a_terminal(tmp_path):
    help_text = run("python", "-m", "rankzero", "compare", "--help", folder=tmp_path).out
    assert "rankzero compare RUN RUN" in help_text and len(help_text.splitlines()) < 24
