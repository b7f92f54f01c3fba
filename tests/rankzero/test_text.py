import datetime
import io
import math
import os
import sys

import pytest
from rich.box import SQUARE
from rich.cells import cell_len
from rich.table import Table

from rankzero.show.report.curves import SERIES
from rankzero.show.text_table import Column, Row, column_widths, print_table, rendered
from rankzero.text import (
    age,
    command_without_secrets,
    compact,
    direction,
    duration,
    is_measurement,
    is_secret,
    is_training_loss,
    is_validation,
    main_metric,
    metrics_line,
    number_text,
    rough_duration,
    shortened,
    unique_metrics,
    without_secrets,
)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("short", 10, "short"),
        ("resnet-with-a-long-name-seed1", 13, "resnet…-seed1"),
        ("a\nb\x1b[0m", 10, "a?b?[0m"),
        ("漢字漢字漢字", 7, "漢字…字"),
        ("abcdefgh", 4, "abcd"),
        ("abcdefgh", 0, ""),
    ],
)
def test_long_texts_lose_their_middle_and_control_characters(text, width, expected):
    assert shortened(text, width) == expected


TIMES = {
    age: [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 5, "5 d")],
    duration: [(None, "-"), (12.54, "12.5 s"), (59.96, "1 min 0 s"), (310, "5 min 10 s"), (7500, "2 h 5 min")],
    rough_duration: [
        (44.6, "45 s"),
        (59.6, "1 min"),
        (3571, "1 h 00 min"),
        (172_740, "47 h 59 min"),
        (273_600, "3 d 04 h"),
    ],
}


@pytest.mark.parametrize("format_time", TIMES)
def test_times_have_one_or_two_units(format_time):
    for seconds, expected in TIMES[format_time]:
        assert format_time(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        *((None, "-"), (0, "0"), (1.25, "1.2"), (9.97, "10"), (460, "460"), (9999, "9999"), (12_345, "12.3k")),
        *((999_960, "1.0M"), (123_456_789, "123M"), (1.2e9, "1.2G"), (float("nan"), "?"), (9e15, "9000T")),
    ],
)
def test_counts_have_at_most_five_characters(number, expected):
    assert compact(number) == expected and len(expected) <= 5


def test_metrics_have_four_significant_digits():
    values = {
        0.98765: "0.9877",
        1e-9: "1e-09",
        None: "-",
        1234.5: "1,234",
        -56789.4: "-56,789",
        2e12: "2e+12",
        0.0: "0",
    }
    assert [number_text(value) for value in values] == list(values.values())
    assert {number_text(float(value)) for value in ("inf", "-inf", "nan")} == {"not finite"}
    assert [number_text(value, 6) for value in (0.98765432, 1234.5678, 1e6)] == ["0.987654", "1,234.57", "1,000,000"]


def test_the_longest_texts_are_shortened_first_none_below_its_minimum_and_none_in_a_pipe(monkeypatch, capsys):
    columns = [Column("name", 6), Column("status"), Column("other", 4)]
    rows = [Row(["n" * 30, "finished", "o" * 20])]
    assert column_widths(columns, rows, 100) == ([30, 8, 20], 2)
    assert column_widths(columns, rows, 40) == ([15, 8, 15], 1)
    assert column_widths(columns, rows, 10) == ([6, 8, 4], 1)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    print_table([Column("name", 6)], [Row(["n" * 500])])
    assert "n" * 500 in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "corner"), [("utf-8", "┌"), ("ascii", "+"), ("latin-1", "+")])
def test_borders_and_texts_use_characters_that_the_terminal_can_show(monkeypatch, encoding, corner):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "12")
    table = Table(box=SQUARE)
    table.add_row("漢字")
    table.add_row("value")
    text = rendered(table, has_colors=False)
    assert text.startswith(corner) and "?" not in text.splitlines()[0]
    print_table([Column("name", 6), Column("n", is_number=True)], [Row(["first-漢字-second", "1"])])
    stream.seek(0)
    assert stream.read().splitlines()[1].startswith("fir")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "value" in rendered(table, has_colors=True)  # a notebook gets text


@pytest.mark.parametrize(
    ("names", "kept_best", "expected"),
    [
        (["train/loss", "val/loss", "val/accuracy"], None, "val/accuracy"),
        (["train/loss", "val/loss", "val/accuracy"], ("min", "val/loss"), "val/loss"),
        (["val_loss", "val_acc"], None, "val_acc"),
        (["valLoss", "train_acc"], None, "valLoss"),
        (["train/loss", "x_axis/samples"], None, "train/loss"),
        (["value", "interval"], None, "value"),
        ([], None, None),
    ],
)
def test_the_metric_that_matters_most(names, kept_best, expected):
    assert main_metric(names, kept_best) == expected


def test_kinds_and_directions_of_metrics_are_recognized_by_whole_words_and_rankzeros_own_series():
    names = {"val/acc": "max", "val_top1": "max", "loss": "min", "perplexity": "min", "temperature": None}
    assert {name: direction(name) for name in names} == names
    assert {direction(name, ("max", name)) for name in names} == {"max"}
    assert is_validation("val/loss") and is_validation("ValAccuracy") and not is_validation("interval/value")
    assert is_training_loss("train_loss") and is_training_loss("loss") and not is_training_loss("val_loss")
    assert {tag for tag in SERIES if "/" in tag and not is_measurement(tag)} == {"train/loss"}
    assert is_measurement("epoch") and is_measurement("train/lr-1") and not is_measurement("worldly/metric")


CASES = {
    "step and epoch": ({"loss": 1.0, "loss_step": 2.0, "loss_epoch": 1.0}, {"loss": 1.0}),
    "the epoch's value counts": ({"loss": 2.0, "loss_step": 2.0, "loss_epoch": 1.0}, {"loss": 1.0}),
    "before the first epoch's end": ({"loss": 2.0, "loss_step": 2.0}, {"loss": 2.0}),
    "a name that ends so": ({"time_step": 3.0, "best_epoch": 4.0}, {"time_step": 3.0, "best_epoch": 4.0}),
    "two metrics": ({"time": 1.0, "time_step": 3.0}, {"time": 1.0, "time_step": 3.0}),
    "loaders": (
        {f"a{kind}/dataloader_idx_{n}": float(n) for kind in ("", "_step", "_epoch") for n in (0, 1)},
        {"a/dataloader_idx_0": 0.0, "a/dataloader_idx_1": 1.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_metric_is_shown_once(name):
    metrics, shown = CASES[name]
    assert unique_metrics(metrics) == shown


def test_a_line_with_any_characters_fits_its_width_and_states_how_many_metrics_are_omitted():
    metrics = {f"metric_{number:02}": float(number) for number in range(30)}
    line = metrics_line("epoch 1/2 done  step 3", metrics, ["metric_29"], "7 s")
    assert len(line) <= 120 and line.startswith("epoch 1/2 done  step 3  metric_29 29  metric_00 0  ")
    shown = line.count("metric_")
    assert line.endswith(f"  +{30 - shown} more  7 s") and shown > 4
    assert metrics_line("head", {"x" * 200: 1.0}, [], "tail") == "head  +1 more  tail"
    assert metrics_line("head", {}, [], "tail") == "head  tail"
    line = metrics_line("head", {"損失" * 12: 1.0, "a\nb\x1b[31m": 2.0, "w" * 30: 3.0}, (), "tail")
    assert cell_len(line) <= 120 and line.isprintable() and "a?b?[31m 2" in line


SECRET_NAMES = (
    *("password", "db.password", "DB_PASSWORD", "password2", "passwd", "passphrase", "pwd", "AWS_SECRET"),
    *("api_key", "logger.api-key", "apikey", "apiKey", "WANDB_API_KEY", "access_key", "aws_access_key_id"),
    *("private_key", "secretAccessKey", "client_secret", "ssh_key", "auth", "basic_auth", "credentials.value"),
    *("credential", "token", "--hub_token", "HF_TOKEN", "auth_token", "access_tokens", "--trainer.logger.0.token"),
    *("wandb_key", "smtp_pass", "jwt", "dsn", "RANKZERO_KEY"),
)
OTHER_NAMES = (
    *("eos_token", "pad_token", "eos_token_id", "num_tokens", "max_tokens", "tokens", "token_dim", "tokenizer"),
    *("key", "key_dim", "num_keys", "sort_key", "public_key", "monkey", "keyboard", "keep", "author", "secretary"),
    *("text_token", "query_token", "bypass", "password_file", "secret_name", "api_key_env"),
)


@pytest.mark.parametrize("name", [*SECRET_NAMES, *OTHER_NAMES])
def test_names_of_secrets_are_recognized(name):
    assert is_secret(name) == (name in SECRET_NAMES)


def test_secrets_are_hidden_at_any_depth_of_a_configuration_and_values_that_cannot_be_secrets_are_shown():
    def config(*secrets):
        logger = {"class_path": "WandbLogger", "init_args": {"api_key": secrets[0], "project": "x"}}
        return {"trainer": {"logger": [logger]}, "password": secrets[1], "db.pwd": secrets[2]}

    assert without_secrets(config("hidden", {"value": "hidden"}, 1234)) == config("...", "...", "...")
    for value in (None, True, False, "", [], {}):
        shown = {"use_auth_token": value, "token": value}
        assert without_secrets(shown) == shown


@pytest.mark.parametrize(
    "value",
    [
        *("bearer authentication", "sk-learn", "the bearer of news", "?key"),
        *("train/loss: x", "a:b", "{", "a: [", "https://host:80/path@v2", "ssh://git@host/x", "mode=auth"),
        *('{"eos_token": "</s>", "n": 1}', "max_tokens=5", "${HF_TOKEN}", "[" * 2000, "2026-01-02: 1"),
        *("hf_models_classification.Net", "sk-learn-style-dataset_name", "sk-resnet50-classification"),
        *(("a", 1), math.inf, datetime.date(2026, 1, 2), object()),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_without_secrets_are_unchanged(value):
    assert without_secrets({"x": [value]}) == {"x": [value]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:p@ss@host/db", "postgresql://user:...@host/db"),
        ("from https://abc@github.com/x", "from https://...@github.com/x"),
        ("https://host/x?n=1&token=abc&m=2", "https://host/x?n=1&token=...&m=2"),
        ("Authorization=Bearer abc, n=1", "Authorization=..., n=1"),
        ("curl -H 'Authorization: Bearer abc' -H 'X: y: z'", "curl -H 'Authorization: ...' -H 'X: y: z'"),
        ("host=h user=u password='a b' port=1", "host=h user=u password='...' port=1"),
        ('{"token": "abc", "n": 1}', '{"token": "...", "n": 1}'),
        ("[{'api_key': {'value': 'abc'}, 'n': None}]", '[{"api_key": "...", "n": "None"}]'),
        ("model:\n  token: abc\n  n: 1\n", '{"model": {"token": "...", "n": 1}}'),
        ('{"url": "https://u:abc@host"}', '{"url": "https://u:...@host"}'),
        ('{"inner": "{\\"token\\": \\"abc\\"}"}', '{"inner": "{\\"token\\": \\"...\\"}"}'),
        ("GET https://host/x?sig=a%2Bc&n=1", "GET https://host/x?sig=...&n=1"),
        ("https://s3/x?X-Amz-Signature=ab12&X-Amz-Date=1", "https://s3/x?X-Amz-Signature=...&X-Amz-Date=1"),
        ("error 401 for bearer abc.123", "error 401 for bearer ..."),
        (f"hf_{'abcdeF1234' * 3} is not valid", "... is not valid"),
        ("sk-proj-abcdefghijklmn0123456abcdefghijklmn is not valid", "... is not valid"),
        ("glpat-AbCdEfGhIjKlMnOpQrSt is not valid", "... is not valid"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nread", "...\nread"),
    ],
)
def test_secrets_in_texts_are_hidden_once(text, shown):
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown


KEY = "-----BEGIN PRIVATE KEY-----\nabc"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["fit.py", "--auth", "required"], ["fit.py", "--auth", "required"]),
        (["fit.py", "--api_key", "abc", "--epochs", "3"], ["fit.py", "--api_key", "...", "--epochs", "3"]),
        (["--logger.token=a b=c", "--model.num_tokens=5"], ["--logger.token=...", "--model.num_tokens=5"]),
        (["--model.x", '{"token": "abc"}'], ["--model.x", '{"token": "..."}']),
        (["--use_auth_token", "--epochs", "3"], ["--use_auth_token", "--epochs", "3"]),
        (["--private_key", KEY, "--lr", "-0.1"], ["--private_key", "...", "--lr", "-0.1"]),
        (["--password", "-abc", "--eos_token", "</s>"], ["--password", "...", "--eos_token", "</s>"]),
        (["--url=https://u:abc@host", "token=abc"], ["--url=https://u:...@host", "token=..."]),
    ],
)
def test_secrets_in_a_command_line_are_hidden(words, shown):
    assert command_without_secrets(words) == shown
    assert command_without_secrets(shown) == shown
