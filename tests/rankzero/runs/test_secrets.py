import datetime
import math

import pytest

from rankzero.runs.secrets import command_without_secrets, is_secret, without_secrets

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
