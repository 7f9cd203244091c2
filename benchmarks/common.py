"""What all benchmarks share: where results go, and on what machine they were made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distillspec.files import write_json
from distillspec.provenance import provenance

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any], seed: int = 0, folder: Path = RESULTS) -> None:
    """Print the result and write it to `results/NAME.json` (or another folder's) with its provenance.

    Paths on the command line are cut to their names: a result should not tell where somebody keeps files.
    """
    print(json.dumps(result, indent=2))
    argv = [Path(word).name if word.startswith(("/", "~")) else word for word in sys.argv]
    write_json(folder / f"{name}.json", {**result, "provenance": provenance(argv, seed)})
