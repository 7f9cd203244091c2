"""What `distill serve` prints once it listens."""

from __future__ import annotations

import json
import shlex
from typing import Any

from distillspec.serving.server.parts import Parts


def greeting(url: str, parts: Parts) -> str:
    """Where it is, and a line to try it with."""
    asked: dict[str, Any]
    path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    if parts.codec.tokenizer is None:
        path, asked = "completions", {"prompt": [1, 2, 3]}
    body = shlex.quote(json.dumps({"model": parts.model, **asked}))
    key = ' -H "Authorization: Bearer $KEY"' if parts.keys else ""
    learning = "" if parts.online is None else f"\n  learning from the traffic: {parts.online.place}"
    return (
        f"{parts.model} at {url}/v1, dashboard at {url}/, stop with Ctrl-C; try:\n"
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {body}{learning}"
    )
