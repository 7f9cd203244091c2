"""Text of `distill --help` and `distill COMMAND --help`, made from the schemas."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count, takewhile
from typing import Any, get_type_hints

from distillspec.composition_errors import conf_folder, yaml_options
from distillspec.config import COMMANDS
from distillspec.config.everyday import EVERYDAY
from distillspec.config.registry import Choice
from distillspec.config.removed import removed
from distillspec.errors import ConfigError

EXAMPLES = {
    "init-draft": "distill init-draft draft=pruned draft.layers=3",
    "train": "distill train loss=tvd data=mixed draft=pruned draft.layers=4 train.max_minutes=10",
    "train-stop": "distill train-stop draft.path=runs/train/A stop.reads=state",
    "eval": "distill eval drafts=[runs/train/A/draft,runs/train/B/draft]",
    "generate": "distill generate data.prompts=prompts.jsonl data.signal=topk",
    "export": "distill export draft.path=runs/train/A/draft format=vllm",
    "bench": "distill bench draft.path=runs/train/A/draft bench.prompts=[math.jsonl] bench.rates=[0.5,1]\n"
    "         distill bench url=[http://127.0.0.1:8000,http://127.0.0.1:8001] bench.prompts=[math.jsonl]",
    "quality": "distill quality draft.path=runs/train/A quality.prompts=[math.jsonl] sampling.temperature=0.7",
    "profile": "distill profile target=smollm2 draft.path=runs/train/A/draft",
    "report": "distill report runs=[runs/train/A,runs/train/B]",
    "adapt": "distill adapt online.folder=online once=true judge=true",
    "replay": "distill replay action=delete tenant=acme online.folder=online",
    "versions": "distill versions action=list online.folder=online",
    "serve": "distill serve target=smollm2 draft.path=runs/train/A server.port=8000 online=on replay.share=0.5",
    "simulate": "distill simulate hardware=a100-7b workload=chat workload.rates=[1,4] policies=[none,goodput]",
}


@dataclass(frozen=True)
class Setting:
    """One setting of a command, with its dotted name."""

    name: str
    default: Any
    comment: str
    choices: Mapping[str, Choice]  # empty where any value of the type may be given

    @property
    def group(self) -> str:
        """First word of a dotted name, empty for a setting of the command itself."""
        return self.name.partition(".")[0] if "." in self.name else ""


def general_help() -> str:
    """Return a line a command, and how settings are given."""
    lines = ["distill COMMAND [key=value ...]", "", "Commands:"]
    lines += [f"  {name:<11} {_summary(schema)}" for name, schema in COMMANDS.items()]
    lines += [
        "",
        "Settings are given as key=value (draft.layers=4) or group=choice (loss=tvd); -m runs a sweep over",
        "comma-separated values (-m loss=fkl,tvd). distill COMMAND --help lists a command's common settings,",
        "distill COMMAND --help=all every one.",
        "Results go to runs/COMMAND/DATE_TIME, printed last. Exit codes: 0 done, 1 failed, 2 bad settings,",
        "130/143 interrupted with the state saved.",
    ]
    return "\n".join(lines)


def command_help(command: str, *, everything: bool = False) -> str:
    """Return a command's settings with defaults and meaning: those of `EVERYDAY`, or all of them."""
    schema = COMMANDS[command]
    known = list(settings_of(command))
    shown = known if everything else [setting for setting in known if setting.name in EVERYDAY[command]]
    lines = [inspect.getdoc(schema) or "", "", f"Example: {EXAMPLES[command]}"]
    kinds = get_type_hints(schema)
    group = None
    for setting in shown:
        if setting.group != group:
            group = setting.group
            lines += ["", *([f"{group}: {_about(kinds[group], whole=everything)}"] if group else [])]
        lines += _lines(setting, everything)
    lines += _presets(command)
    if left := len(known) - len(shown):
        lines += ["", f"{left} more settings: distill {command} --help=all"]
    return "\n".join(lines)


def settings_of(command: str) -> Iterator[Setting]:
    """Yield every setting that a command takes. Fields that only Python may set are left out."""
    return (setting for setting in settings(COMMANDS[command]) if removed(command, setting.name) is None)


def settings(schema: type, prefix: str = "", defaults: Any = None) -> Iterator[Setting]:
    """Yield every setting of a schema, depth first."""
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        default = _default(field) if defaults is None else getattr(defaults, field.name)
        if dataclasses.is_dataclass(kind := hints[field.name]):
            assert isinstance(kind, type)
            yield from settings(kind, f"{prefix}{field.name}.", default)
        else:
            choices = field.metadata.get("choices", {})
            yield Setting(f"{prefix}{field.name}", default, _comment(schema, field.name), choices)


def _lines(setting: Setting, everything: bool) -> list[str]:
    """Return a setting's line. With `everything`, a line for each of its choices follows."""
    words = " | ".join(setting.choices) if not everything else ""
    said = "; ".join(part for part in (words, setting.comment) if part)
    indent = "  " if setting.group else ""
    line = f"{indent}{setting.name}={_shown(setting.default)}{f'  ({said})' if said else ''}"
    if not everything:
        return [line]
    return [line, *(f"      {name:<18} {choice.about}" for name, choice in setting.choices.items())]


def _presets(command: str) -> list[str]:
    """Return the line about `experiment=NAME` where the command takes presets."""
    if "- experiment:" not in (conf_folder() / f"{command}.yaml").read_text(encoding="utf-8"):
        return []
    return ["", f"experiment=null  (a preset: {' | '.join(sorted(yaml_options('experiment')))})"]


def _about(kind: Any, *, whole: bool) -> str:
    """Return a group's docstring on one line: its first sentence, or the whole."""
    text = inspect.getdoc(kind) or ""
    return " ".join((text if whole else text.split("\n\n")[0]).split())


def _summary(schema: type) -> str:
    return (inspect.getdoc(schema) or "").splitlines()[0].split(": ", 1)[-1]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        try:
            return field.default_factory()
        except ConfigError:
            return None
    return None


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).replace(" ", "")


def _comment(schema: type, field: str) -> str:
    """Return the comment beside the field in its source: the one place where a setting is explained.

    A long comment goes on in lines of its own below the field.
    """
    owner = next(kind for kind in schema.__mro__ if field in vars(kind).get("__annotations__", {}))
    return _field_comments(owner).get(field, "")


@cache
def _field_comments(schema: type) -> dict[str, str]:
    """Return field → comment, on one line, for the fields that the class itself declares."""
    source = textwrap.dedent(inspect.getsource(schema))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {number for number, comment in comments.items() if comment.line.lstrip().startswith("#")}
    (declaration,) = ast.parse(source).body
    assert isinstance(declaration, ast.ClassDef)
    found = {}
    for node in declaration.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end = node.end_lineno or node.lineno
            below = takewhile(alone.__contains__, count(end + 1))
            numbers = [*range(node.lineno, end + 1), *below]
            found[node.target.id] = " ".join(comments[n].string[1:].strip() for n in numbers if n in comments)
    return found
