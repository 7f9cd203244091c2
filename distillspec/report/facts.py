"""End of the page: commands and machines of the runs, and caveats of the figures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import PurePath

from distillspec.report.runs import Json, ReportEntry, Run
from distillspec.report.words import mean_of, policy_text


def what_was_run(runs: Sequence[Run]) -> str:
    """Return one HTML block a run: command, facts, and the resolved config folded away."""
    return "".join(_block(run) for run in runs)


def command_of(run: Run) -> str:
    """Return the command as typed, with the program's name instead of its path."""
    argv = [str(argument) for argument in run.provenance.get("argv") or []]
    return shlex.join([PurePath(argv[0]).name, *argv[1:]]) if argv else ""


def caveats(runs: Sequence[Run], entries: Sequence[ReportEntry]) -> list[str]:
    """Return the sentences to read before quoting the numbers."""
    results = [entry.result for entry in entries]
    lines = [_about_policy(results), _about_prompts(results)]
    if any(result.get("speedup") for result in results):
        lines.append(
            "Predicted speed-ups are τ / (γ·c + β(γ)) with step times measured on the machine named above; "
            "other hardware, context lengths and batch sizes have other costs. Their intervals cover the held-out text "
            "and the timing rounds of this run, not another day on the same machine."
        )
    if any(result.get("measured") for result in results):
        lines.append("Measured speed-ups are of one request at a time, with the serving engine where it is installed.")
    lines += [_about_cut(results)] + [line for run in runs for line in _about_run(run)]
    lines += [line for entry in entries for line in _about_ceiling(entry)]
    if len({str(run.provenance.get("hardware")) for run in runs}) > 1:
        lines.append("The runs come from different machines: compare acceptance, not times.")
    return [line for line in lines if line]


def _block(run: Run) -> str:
    command = command_of(run)
    command_html = (
        f'<pre class="command">{escape(command)}</pre>' if command else '<p class="missing">No command recorded.</p>'
    )
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(run) if value)
    config = f"<details><summary>Resolved configuration</summary><pre>{escape(run.config)}</pre></details>"
    config = config if run.config else '<p class="missing">No config.yaml was found.</p>'
    return (
        f"<article><h3>{escape(run.name)} <small>distill {escape(run.command)}</small></h3>"
        f"{command_html}<dl>{facts}</dl>{config}</article>"
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    provenance, hardware = run.provenance, run.provenance.get("hardware") or {}
    commit = str(provenance.get("git_commit") or "")[:12]
    packages = provenance.get("packages") or {}
    return [
        ("Started", str(provenance.get("started") or "").replace("T", " ").replace("+00:00", " UTC")),
        ("Code", _code(str(provenance.get("distillspec") or ""), commit, bool(provenance.get("git_dirty")))),
        ("Hardware", _hardware(hardware)),
        ("Software", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("Python", " on ".join(filter(None, [str(provenance.get("python") or ""), str(provenance.get("os") or "")]))),
        ("Seed", "" if provenance.get("seed") is None else str(provenance["seed"])),
        ("Best draft", str(run.summary.get("draft") or "")),
        ("Folder", str(run.path)),
    ]


def _code(version: str, commit: str, dirty: bool) -> str:
    parts = [f"distillspec {version}" if version else "", f"commit {commit}" if commit else ""]
    return ", ".join(filter(None, parts)) + (" with uncommitted changes" if dirty and commit else "")


def _hardware(hardware: Json) -> str:
    memory = hardware.get("memory_bytes")
    parts = [
        str(hardware.get("cpu") or ""),
        f"{hardware['cores']} cores" if hardware.get("cores") else "",
        f"{memory / 2**30:.0f} GiB" if isinstance(memory, int | float) else "",
        ", ".join(str(name) for name in hardware.get("gpus") or []),
    ]
    return ", ".join(filter(None, parts))


def _about_policy(results: Sequence[Json]) -> str:
    policies = sorted({policy_text(result.get("policy")) for result in results})
    if len(policies) > 1:
        listed = "; ".join(policies)
        return f"The drafts were judged under different policies ({listed}): do not compare their α."
    return f"α holds for {policies[0]}; other sampling settings and other traffic give other values."


def _about_prompts(results: Sequence[Json]) -> str:
    counts = sorted({int(result["prompts"]) for result in results if result.get("prompts")})
    if not counts:
        return ""
    prompts = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    few = " That is few: expect the intervals to be optimistic." if counts[0] < 20 else ""
    return f"Intervals are 95 % bootstrap intervals over {prompts} held-out prompts.{few}"


def _about_cut(results: Sequence[Json]) -> str:
    shares = sorted({float(result["cut"]) for result in results if result.get("cut")})
    if not shares:
        return ""
    share = f"{shares[0]:.0%}" if len(shares) == 1 else f"{shares[0]:.0%} to {shares[-1]:.0%}"
    return f"{share} of the held-out answers were cut at the token limit: how answers end is hardly judged."


def _about_run(run: Run) -> list[str]:
    lines = []
    if run.command == "train":
        lines.append(f"{run.name}: {_about_selection(run.summary.get('selection_prompts'))}")
    if cut := run.summary.get("training_answers_cut"):
        lines.append(f"{run.name}: {cut:.0%} of the training answers were cut at the token limit or the deadline.")
    if problem := run.summary.get("nothing_learned"):
        lines.append(f"{run.name}: {problem}")
    if change := run.summary.get("target_change"):
        lines.append(f"{run.name}: {change['line']}.")
    if curve := run.summary.get("learning_curve"):
        lines.append(f"{run.name}: {curve['line']}")
    if bad := run.summary.get("bad_steps"):
        lines.append(f"{run.name}: {bad} training steps were skipped because loss or gradient was not finite.")
    if run.provenance.get("git_dirty"):
        lines.append(f"{run.name}: the code had uncommitted changes, so the commit alone does not reproduce it.")
    if run.command == "train" and run.summary.get("before") is None:
        lines.append(f"{run.name}: the draft was not evaluated before training, so no gain can be stated.")
    return lines


def _about_selection(prompts: int | None) -> str:
    if prompts is None:
        return "the best checkpoint was picked by held-out α, which flatters it a little."
    return f"the best checkpoint was picked on {prompts} other held-out prompts than those quoted here."


def _about_ceiling(entry: ReportEntry) -> list[str]:
    ceiling = mean_of(entry.result.get("ceiling"))
    if entry.baseline or ceiling is None or ceiling >= 0.9995:
        return []
    return [f"{entry.label}: the draft's truncated vocabulary bounds α at {ceiling:.3f}."]
