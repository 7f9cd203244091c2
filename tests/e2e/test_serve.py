"""`distill serve` as a process: OpenAI's own client, signals, one-line errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

KEY = "a-key-for-the-test"
TURNS: Any = [{"role": "user", "content": "Hello"}]
FAST = (
    "target=tiny",
    "server.port=0",
    "engine.compile=false",
    "engine.measure_costs_s=0",
    "engine.max_model_len=256",
    "engine.proposer=prompt_lookup",
)


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    folder: Path
    startup_banner: str

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def start(folder: Path, *words: str) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", "distillspec.cli", "serve", *FAST, "hydra.run.dir=run", *words],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "DISTILLSPEC_API_KEYS": KEY},
    )
    assert process.stdout is not None
    startup_banner = process.stdout.readline() + process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", startup_banner)
    assert found, process.communicate()
    url = found[0]
    for _ in range(200):  # the URL is printed before the first connection is accepted
        try:
            urllib.request.urlopen(f"{url}/health", timeout=60)
            break
        except OSError:
            assert process.poll() is None
    return Server(process, url, folder, startup_banner)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = start(tmp_path_factory.mktemp("serve"))
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120, max_retries=0) as made:
        yield made


def test_the_official_client_works_unchanged(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    options: Any = {"temperature": 0, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(model="tiny", messages=TURNS, n=2, logprobs=True, top_logprobs=2, **options)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12
    pieces = list(
        client.chat.completions.create(
            model="tiny", messages=TURNS, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage is not None
    again = client.chat.completions.create(
        model="tiny", messages=[*TURNS, whole.choices[0].message, TURNS[0]], extra_body={"top_k": 5}, **options
    )
    assert again._request_id is not None
    completion = client.completions.create(model="tiny", prompt=["ab", "cd"], logprobs=1, stop="zz", **options)
    streamed = client.completions.create(model="tiny", prompt=["ab", "cd"], stream=True, **options)
    texts = ["", ""]
    for piece in streamed:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [choice.text for choice in completion.choices]


def test_the_official_async_client_works_unchanged(server: Server, client: openai.OpenAI) -> None:
    options: Any = {"temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(model="tiny", messages=TURNS, **options).choices[0].message.content

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120, max_retries=0) as own:

            async def one(stream: bool) -> str:
                if not stream:
                    reply = await own.chat.completions.create(model="tiny", messages=TURNS, **options)
                    return reply.choices[0].message.content or ""
                pieces = await own.chat.completions.create(model="tiny", messages=TURNS, stream=True, **options)
                return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

            return list(await asyncio.gather(*(one(i % 2 == 0) for i in range(8))))

    assert asyncio.run(many()) == [whole] * 8


def test_the_official_client_understands_refusals(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tempratur") as refusal:
        client.completions.create(model="tiny", prompt="x", extra_body={"tempratur": 1})
    assert refusal.value.param == "tempratur"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another-key").models.list()


def test_bench_puts_two_servers_side_by_side(
    distill: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"say {i} again", "domain": "chat"} for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("A_KEY", KEY)
    addresses = [server.url, server.url.replace("127.0.0.1", "localhost")]  # one server under two names
    load = ["bench.prompts=[prompts.jsonl]", "bench.rates=[40]", "bench.seconds=0.3", "bench.rounds=2"]
    answer = ["bench.max_tokens=8", "bench.ignore_eos=true", "sampling.temperature=0"]
    outcome = distill("bench", f"url=[{','.join(addresses)}]", "key_env=[A_KEY]", "hydra.run.dir=run", *load, *answer)
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    requests = json.loads((tmp_path / "run/requests.json").read_text())
    names = [address.removeprefix("http://") for address in addresses]
    sent = [
        sorted((r["round"], r["id"], r["arrived_s"], r["prompt_tokens"]) for r in requests if r["server"] == name)
        for name in names
    ]
    assert sent[0] == sent[1] != []
    for name in names:
        figures = summary["servers"][name]["40.0"]
        assert (figures["failed"], figures["output_tokens"]) == (0, 8 * len(sent[0]))
        assert 0 < figures["time_to_first_token_s"]["p50"] <= figures["latency_s"]["p50"]
        assert 0 <= figures["acceptance"] <= 1
        assert name in outcome.out.replace("\n", "")
    assert summary["models"] == dict.fromkeys(names, "tiny")
    assert list(summary[f"times_faster_than_{names[0]}"]["40.0"]) == names[1:]
    assert (tmp_path / "run/load.png").read_bytes()[:4] == b"\x89PNG"
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert KEY not in outcome.out + "".join(file.read_text(errors="replace") for file in files)
    monkeypatch.setenv("A_KEY", "another-key")
    for word, message in (("key_env=[A_KEY]", "the key in A_KEY is refused"), ("key_env=[NONE]", "put it into NONE")):
        refusal = distill("bench", f"url={server.url}", word, "hydra.run.dir=no", *load)
        assert (refusal.code, refusal.err.count("\n")) == (2, 1)
        assert message in refusal.err
        assert not (tmp_path / "no").exists()


def test_the_printed_line_works(server: Server) -> None:
    if not Path("/usr/bin/curl").exists():
        pytest.skip("curl is not installed")
    line = server.startup_banner.splitlines()[1].strip()
    done = subprocess.run(
        ["bash", "-c", line], env={**os.environ, "KEY": KEY}, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_sigterm_stops_the_server_in_order(tmp_path: Path) -> None:
    server = start(tmp_path)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=120) as client:
        client.completions.create(model="tiny", prompt="x", max_tokens=5)
    code, out, err = server.end()
    assert code == 0, err
    assert out.endswith("results: run\n")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["requests"], summary["tokens"], summary["answers_cut_off"]) == (1, 5, 0)
    lines = [json.loads(line) for line in err.splitlines()]
    assert any(line.get("event") == "generation" and line["outcome"] == "done" for line in lines)
    written = out + err + "".join(file.read_text() for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert KEY not in written


def test_a_port_in_use_is_one_line(distill: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = distill("serve", "target=tiny", f"server.port={port}")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert f"server.port={port} is in use" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("server.host=0.0.0.0", "server.allow_open"),
        ("server.port=99999", "server.port=99999"),
        ("server.full_status=418", "server.full_status=418"),
        ("server.api_key_file=none", "none"),
        ("engine.max_slots=0", "max_slots=0"),
        ("engine.controller=best", "controller=best"),
    ],
)
def test_impossible_settings_are_one_line(distill: Any, tmp_path: Path, word: str, named: str) -> None:
    outcome = distill("serve", "target=tiny", "server.port=0", word)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert named in outcome.err
    assert list(tmp_path.iterdir()) == []
