"""`distill --help` and `distill COMMAND --help` in plain words, made from the schemas themselves."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

from distillspec.config import COMMANDS
from distillspec.errors import ConfigError

EXAMPLES = {
    "init-draft": "distill init-draft draft=pruned draft.layers=3",
    "train": "distill train loss=tvd data=mixed draft=pruned draft.layers=4 train.max_minutes=10",
    "eval": "distill eval drafts=[runs/train/A/draft,runs/train/B/draft]",
    "generate": "distill generate data.prompts=prompts.jsonl data.signal=topk",
    "export": "distill export draft.path=runs/train/A/draft format=vllm",
    "bench": "distill bench draft.path=runs/train/A/draft bench.prompts=[math.jsonl] bench.rates=[0.5,1]\n"
    "         distill bench url=[http://127.0.0.1:8000,http://127.0.0.1:8001] bench.prompts=[math.jsonl]",
    "profile": "distill profile target=smollm2 draft.path=runs/train/A/draft",
    "report": "distill report runs=[runs/train/A,runs/train/B]",
    "adapt": "distill adapt online.folder=online once=true judge=true",
    "replay": "distill replay action=delete tenant=acme online.folder=online",
    "versions": "distill versions action=list online.folder=online",
    "serve": "distill serve target=smollm2 draft.path=runs/train/A server.port=8000 online=on replay.share=0.5",
    "simulate": "distill simulate hardware=a100-7b workload=chat workload.rates=[1,4] policies=[none,goodput]",
}


def general_help() -> str:
    """Every command in a line, and how settings are given."""
    lines = ["distill COMMAND [key=value ...]", "", "Commands:"]
    lines += [f"  {name:<11} {_summary(schema)}" for name, schema in COMMANDS.items()]
    lines += [
        "",
        "Settings are given as key=value (draft.layers=4) or group=choice (loss=tvd); -m runs a sweep over",
        "comma-separated values (-m loss=fkl,tvd). distill COMMAND --help lists a command's settings.",
        "Results go to runs/COMMAND/DATE_TIME, printed last. Exit codes: 0 done, 1 failed, 2 bad settings,",
        "130/143 interrupted with the state saved.",
    ]
    return "\n".join(lines)


def command_help(command: str) -> str:
    """A command's settings with their defaults and meaning."""
    schema = COMMANDS[command]
    lines = [inspect.getdoc(schema) or "", "", f"Example: {EXAMPLES[command]}", ""]
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            lines += _group(field.name, kind, _default(field))
        else:
            lines.append(f"{field.name}={_shown(_default(field))}{_comment(schema, field.name)}")
    return "\n".join(lines)


def _group(name: str, kind: Any, default: Any) -> list[str]:
    about = " ".join((inspect.getdoc(kind) or "").split())
    lines = [f"{name}: {about}"]
    return [*lines, *_members(name, kind, default), ""]


def _members(name: str, kind: Any, default: Any) -> list[str]:
    lines: list[str] = []
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name) if default is not None else None
        if dataclasses.is_dataclass(hints[field.name]):
            lines += _members(f"{name}.{field.name}", hints[field.name], value)
        else:
            lines.append(f"  {name}.{field.name}={_shown(value)}{_comment(kind, field.name)}")
    return lines


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
    """The comment beside the field in its source: the one place where a setting is explained."""
    match = re.search(rf"^\s+{field}: [^#\n]*#\s*(.*)$", inspect.getsource(schema), re.MULTILINE)
    return f"  ({match[1]})" if match else ""
