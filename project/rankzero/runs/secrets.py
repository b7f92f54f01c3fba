"""Hides passwords, tokens and keys in settings and command lines that are shown or stored. Does not import torch."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

HIDDEN = "..."
"""Replaces a secret value."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_ALWAYS = re.compile(r"(?:.*_)?(?:password|passwd|passphrase|secret|credential|api_?key|authorization)s?(?:_.*)?")
"""Words that indicate a secret anywhere in a name, unless the name ends with one of `_REFERENCES`."""

_REFERENCES = re.compile(r".*_(?:file|path|dir|folder|name|env|var|variable|type|size|length|count)")

_AT_END = re.compile(
    r"(?:.*_)?(?:pwd|auth|jwt|dsn|authkey|(?:db|ftp|mysql|smtp|user)_pass|(?:auth|access|api|hub|bearer)_?tokens?|(?:access|private|secret)_?keys?(?:_id)?"
    r"|(?:account|auth|deploy|encryption|license|service|session|shared|signing|ssh|subscription"
    r"|comet|neptune|rankzero|wandb)_keys?)"
)

_TOKEN = re.compile(r"(?:(?:.*_)?(?P<kind>[a-z]+)_)?token")
"""A single token is a secret, except for the kinds below. `tokens` is a number or a list of words: `max_tokens`."""

_TOKENS_OF_TEXT = (
    *("additional", "begin", "blank", "bos", "class", "cls", "decoder", "dist", "end", "eos", "eot", "extra", "first"),
    *("image", "last", "mask", "max", "min", "next", "no", "num", "pad", "padding", "patch", "per", "prefix", "prompt"),
    *("query", "register", "sep", "separator", "sos", "source", "special", "start", "stop", "suffix", "target", "text"),
    *("time", "unk", "unknown", "vision", "word"),
)

_URL = re.compile(r"(?<![\w+.-])(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s/?#'\":@]*)(?P<password>:[^\s/?#'\"]*)?@")

_PAIR = re.compile(
    r"(?<![\w.-])(?P<begin>(?P<quote>['\"]?)(?P<name>[\w-][\w.-]*)(?P=quote)(?:\s*=|\s*:(?!//))\s*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic|token)\s+)?[^\s,;&{}\[\]'\"]+)",
    re.IGNORECASE,
)
"""A name with its value in a text, such as `token=abc` or `"token": "abc"`."""

_UNNAMED = re.compile(
    r"(?P<begin>(?i:[?&](?:sig|signature|key|x-(?:amz|goog)-(?:credential|signature|security-token))=))[^\s&#'\"]+"
    r"|(?P<bearer>(?i:\bbearer\s+))(?=\S*\d|\S{20})[\w.~+/=-]+"
    r"|\b(?:AKIA[A-Z0-9]{16}|hf_[A-Za-z0-9]{30,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|xox[abp]-[\w-]{20,})"
    r"|\b(?:glpat-[\w-]{20,}|sk-(?:proj-|svcacct-|ant-)?(?=[\w-]*\d)[\w-]{32,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)",
    re.DOTALL,
)
"""Signatures in the query of a URL, tokens of known services, and private keys."""

_WORDS = ("auto", "required")
"""The values of `--auth`, which are no secrets."""

_FLAG = re.compile(r"--?\w")


def is_secret(name: str) -> bool:
    """Returns whether the name of a setting indicates a password, a token, a key or the like."""
    return any(_is_secret("_".join(_WORD.findall(part)).lower()) for part in name.split("."))


def without_secrets(value: Any) -> Any:
    """Returns settings with `HIDDEN` in place of secrets.

    A value is secret if `is_secret` holds for its name, unless it is a boolean, None or empty. In all other texts,
    passwords in URLs and secrets in nested values, such as `{"token": "abc"}` or `token=abc`, are replaced.

    Args:
        value: A configuration, nested to any depth; names may have several parts, such as `logger.api_key`.
    """
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if is_secret(str(name)) and _can_be_secret(item) else without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if type(value) is tuple:
        return tuple(without_secrets(item) for item in value)
    return _text_without_secrets(value) if isinstance(value, str) else value


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with `HIDDEN` in place of secrets.

    The result is for people to read. A program that starts the command again needs the original words.
    """
    shown: list[str] = []
    awaits_secret = False
    for word in words:
        flag, equals, text = word.partition("=")
        is_flag = bool(_FLAG.match(flag)) and not any(map(str.isspace, flag))
        if awaits_secret and not (is_flag and word.startswith("--")):
            shown.append(str(_hidden(word)))
        elif is_flag and equals:
            shown.append(f"{flag}={_hidden(text) if is_secret(flag) else _text_without_secrets(text)}")
        else:
            shown.append(_text_without_secrets(word))
        awaits_secret = is_flag and not equals and is_secret(flag)
    return shown


def _is_secret(name: str) -> bool:
    """Returns whether one part of a name, in lower case and with underscores between words, indicates a secret."""
    if _AT_END.fullmatch(name) or (_ALWAYS.fullmatch(name) and not _REFERENCES.fullmatch(name)):
        return True
    token = _TOKEN.fullmatch(name)
    return token is not None and token["kind"] not in _TOKENS_OF_TEXT


def _can_be_secret(value: Any) -> bool:
    is_empty = isinstance(value, str | list | dict) and not value
    is_word = isinstance(value, str) and value in _WORDS
    return not (value is None or isinstance(value, bool) or is_empty or is_word)


def _hidden(text: str) -> str:
    """Returns `HIDDEN` for the text of a secret value; a text that means true, false or nothing is shown."""
    return text if text.lower() in ("", "true", "false", "null", "none", *_WORDS) else HIDDEN


def _text_without_secrets(text: str) -> str:
    if any(character in text for character in "{[:"):
        try:
            content = yaml.safe_load(text)
            shown = without_secrets(content) if isinstance(content, dict | list) else content
            if shown != content:
                return json.dumps(shown, default=str, ensure_ascii=False)
        except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
            pass  # not a nested value
    return prose_without_secrets(text)


def prose_without_secrets(text: str) -> str:
    """Returns a text, such as the message of an error, with `HIDDEN` in place of what looks like a secret."""
    text = _UNNAMED.sub(lambda found: (found["begin"] or found["bearer"] or "") + HIDDEN, text)
    return _PAIR.sub(_hide_pair, _URL.sub(_hide_password, text))


def _hide_password(url: re.Match[str]) -> str:
    """Hides the password in a URL; without a password, the user name, which is a token in a URL of the Web."""
    if url["password"]:
        return f"{url['scheme']}{url['user']}:{HIDDEN}@"
    is_token = url["user"] and url["scheme"].lower() in ("http://", "https://")
    return f"{url['scheme']}{HIDDEN}@" if is_token else url[0]


def _hide_pair(pair: re.Match[str]) -> str:
    value = pair["value"]
    if not is_secret(pair["name"]) or _hidden(value.strip("'\"")) != HIDDEN:
        return pair[0]
    quote = value[0] if value[0] in "'\"" else ""
    return f"{pair['begin']}{quote}{HIDDEN}{quote}"


def launch_line(environment: Mapping[str, Any]) -> str:
    """Returns the command line of each process of an attempt, without secrets; empty if it is unknown."""
    return shlex.join(command_without_secrets(environment.get("command") or []))
