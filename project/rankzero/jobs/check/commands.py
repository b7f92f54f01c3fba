"""Splits the text of a shell script into commands. Does not import torch.

This is not a shell: the texts of here-documents, `$(...)`, `${...}`, arrays and `eval` are not read. A command in a
branch, a loop, a function or a subshell is not certain to run, so that no rule reports it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

LITERAL = "\ue000"
"""Stands for a `$` that the job script does not expand, because it is quoted; a shell of a task may expand it."""


def _bracket(opening: str, closing: str) -> str:
    """Returns a pattern of a text in brackets, with up to five levels of the same brackets in it."""
    inside = f"[^{opening}{closing}]*"
    for _ in range(5):
        inside = rf"(?:[^{opening}{closing}]|\{opening}{inside}\{closing})*"
    return rf"\{opening}{inside}\{closing}"


_EXPANSION = rf"[${LITERAL}]{_bracket('(', ')')}|[${LITERAL}]{_bracket('{', '}')}|`[^`]*`"
_PARTS = {
    "escaped": r"\\.",
    "single": r"\$?'[^']*'",
    "double": rf'"(?:\\.|{_EXPANSION}|[^"\\`${LITERAL}]|[${LITERAL}](?![({{]))*"',
    "expansion": rf"{_EXPANSION}|[<>]{_bracket('(', ')')}",
    "plain": r"[^\s\\'\"`;&|()<>]",
}
_PART = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PARTS.items()), re.DOTALL)
_WORD = f"(?:{'|'.join(_PARTS.values())})+"
_TOKEN = re.compile(
    rf"(?P<skipped>\\\n|[ \t]+|\#[^\n]*|(?:[0-9]+|&)?(?:<<<|<<-?|[<>]&|>>|>\||<>|[<>](?!\())[ \t]*(?:{_WORD})?)"
    rf"|(?P<word>{_WORD})|(?P<operator>;;|&&|\|\||\|&|.)",
    re.DOTALL,
)
HERE_DOCUMENT = re.compile(r"""((?<!<)<<-?\s*['"\\]?(\w+)['"]?(?!\w).*\n)((?s:.*?)\n)??(\t*\2)$""", re.MULTILINE)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)

_OPENING, _CLOSING = ("if", "for", "select", "while", "until", "case"), ("fi", "done", "esac", "}")
_BEFORE_COMMANDS = ("then", "do", "else", "elif", "!", "exec", "time", "nohup")
_TESTS = ("[", "[[", "test", "command", "which", "type", "hash", "grep", "pgrep")  # `&&` then means a branch

_LAUNCHERS = {
    **{name: name for name in ("srun", "torchrun", "accelerate", "deepspeed", "mpirun", "pbsdsh", "ssh")},
    **dict.fromkeys(("mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich", "orterun"), "mpirun"),
    **dict.fromkeys(("pbs_tmrsh", "pdsh", "clush"), "ssh"),
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Program or module -> the launcher that it is, for the rules."""

_PYTHON = r"python[0-9.]*|\$\{?(\w*_)?(PYTHON|python|PY|py)\w*\}?"
"""Name of a program that is Python, or of a variable that probably contains it."""


@dataclass(frozen=True)
class Command:
    """A command, with the lines that continue it.

    Args:
        line: Number of its first line, from 1.
        words: Program and arguments. A command in `bash -c TEXT` has the launchers before it.
        assignments: Variable that the command sets -> its value.
        is_export: Whether it exports these variables.
        is_certain: Whether it certainly runs, once: it is in no function, branch or loop.
        in_background: Whether it ends with `&`.
        is_nested: Whether it is in the text of `bash -c`.
        values: Variable -> its value before the command, if it is known.
    """

    line: int
    words: tuple[str, ...]
    assignments: Mapping[str, str] = field(default_factory=dict)
    is_export: bool = False
    is_certain: bool = True
    in_background: bool = False
    is_nested: bool = False
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """Name of the program without its folder; empty for an assignment."""
        return name_of(self.words[0]) if self.words else ""

    @cached_property
    def options(self) -> dict[str, tuple[str, ...]]:
        """Launcher -> its options, from the outermost launcher to the innermost, then `script` -> the Python script.

        Without launchers if the program is one that the rules do not know.
        """
        starts: list[tuple[str, int]] = []
        end = len(self.words)
        for i, (earlier, word) in enumerate(pairwise(("", *self.words))):
            name, python = name_of(word), name_of(self.words[max(i - 2, 0)])
            is_module = earlier == "-m" and re.fullmatch(_PYTHON, python) and word not in ("pip", "venv")
            if name in _LAUNCHERS and earlier not in ("-J", "--job-name"):
                starts.append((_LAUNCHERS[name], i))
            elif i and (re.fullmatch(r"\S+\.py", word) or is_module):
                end = i
                break
        is_known = self.program in _LAUNCHERS or re.fullmatch(_PYTHON, self.program)
        parts = {name: self.words[i + 1 : after] for (name, i), (_, after) in pairwise([*starts, ("", end)])}
        return {**(parts if is_known else {}), "script": self.words[end : end + 1] if is_known else ()}

    @property
    def launchers(self) -> list[str]:
        """The launchers in the command, from the outermost to the innermost."""
        return [*self.options][:-1]

    @property
    def trains(self) -> bool:
        """Whether the command probably starts training."""
        return bool(self.options["script"] or {"torchrun", "accelerate", "deepspeed"} & {*self.launchers})

    def option(self, launcher: str, *names: str) -> str | None:
        """Returns the value of an option of a launcher, such as `--nodes` or `-N`; None without it.

        In long names, `_` is read as `-`.
        """
        for word, following in pairwise((*self.options.get(launcher, ()), "")):
            name, equals, value = word.partition("=")
            if (name.replace("_", "-") if name.startswith("--") else name) in names:
                return value if equals else following
            if name[:2] in names and re.fullmatch(r"-[A-Za-z][0-9].*", word):
                return word[2:]
        return None

    def is_open(self, launcher: str) -> bool:
        """Whether options of a launcher may be in a variable whose value is unknown."""
        variable, pairs = rf"[${LITERAL}](\w+|[@*]|\{{.*\}}|\(.*\))", pairwise(("", *self.options.get(launcher, ())))
        return any(re.fullmatch(variable, word) and not re.fullmatch("-[^=]*", earlier) for earlier, word in pairs)


def name_of(word: str) -> str:
    """Returns the name of a program without its folder."""
    return word.rpartition("/")[2]


def _unquoted(word: str, is_nested: bool) -> str:
    """Returns a word without its quotes."""

    def text(match: re.Match[str]) -> str:
        part = match[0]
        if match.lastgroup == "double":
            part = re.sub(r'\\([$`"\\\n])', lambda escaped: escaped[1].replace("$", LITERAL).strip("\n"), part[1:-1])
        elif match.lastgroup in ("single", "escaped"):
            part = part.lstrip("$")[1:-1] if match.lastgroup == "single" else part[1:].strip("\n")
            return part if is_nested else re.sub("`([^`]*)`", r"$(\1)", part).replace("$", LITERAL)
        return re.sub("`([^`]*)`", r"$(\1)", part)

    return _PART.sub(text, word)


def parse(text: str, is_nested: bool = False) -> list[Command]:
    """Returns the commands of a script in their order."""
    commands: list[Command] = []
    words: list[str] = []
    line, begin, start, depth, parentheses = 1, 1, 0, 0, 0
    is_branch, operator = False, ""
    text = re.sub(rf"(?<![\\$])([${LITERAL}])([A-Za-z_]\w*)", r"\1{\2}", text)  # quotes after $NAME do not continue it
    for match in _TOKEN.finditer(f"{text}\n"):
        word, piece = match["word"], match[0]
        if word == "{" or (not words and word in _OPENING):
            words, depth = [], depth + 1
        elif word and not words and word in _CLOSING:
            depth -= 1
        elif word and (words or word not in _BEFORE_COMMANDS):
            begin = begin if words else line
            words.append(word)
        elif piece == "(":  # of a function, or a subshell
            words, parentheses = [], parentheses + 1
        elif match["operator"] and not (piece == "\n" and not words and operator in ("&&", "||", "|", "|&")):
            if words:
                is_certain = not (is_branch or depth or parentheses)
                commands.append(replace(_command(words, is_nested), line=begin, is_certain=is_certain))
            if piece == ")":
                parentheses = max(0, parentheses - 1)  # none is open after a pattern of `case`
            elif piece == "&":
                commands[start:] = [replace(command, in_background=True) for command in commands[start:]]
            if piece in ("&&", "||"):
                is_branch |= piece == "||" or not words or words[0] in _TESTS
            elif piece in (";", ";;", "&", "\n"):
                start, is_branch = len(commands), False
            words = []
        operator = piece if match["operator"] else "" if word else operator
        line += piece.count("\n")
    return commands


def _command(raw: list[str], is_nested: bool) -> Command:
    """Returns the command of these words."""
    assignments: dict[str, str] = {}
    words = list(raw)
    is_declaration = raw[0] in ("export", "declare", "typeset", "readonly", "local")
    while words and (is_declaration or _ASSIGNED.fullmatch(words[0])):
        if match := _ASSIGNED.fullmatch(words.pop(0)):
            earlier = f"${{{match[1]}}}" if match[2] else ""
            assignments[match[1]] = earlier + _unquoted(match[3], is_nested)
    is_export = is_declaration and (raw[0] == "export" or "-x" in raw)
    return Command(1, tuple(_unquoted(word, is_nested) for word in words), assignments, is_export)
