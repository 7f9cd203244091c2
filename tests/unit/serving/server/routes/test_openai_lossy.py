"""A server with a lossy verification says so everywhere, and refuses requests that require exactness."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.serving.server.listening import startup_banner

from ..conftest import Running, Serve

LOSSY: dict[str, Any] = {"drafts": True, "verification": "typical"}


def test_it_is_named_in_answers_streams_metrics_page_and_banner(serve: Serve, page: Any) -> None:
    running = serve(engine=LOSSY)
    assert running.complete(temperature=1).json()["speculation"]["verification"] == "typical"
    assert '"verification":"typical"' in running.complete(stream=True).text.replace(" ", "")
    metrics = running.http.get("/metrics").text
    assert 'distillspec:verification_info{model_name="tiny",verification="typical"} 1.0' in metrics
    assert "verification=typical is lossy" in startup_banner(running.url, running.state)
    page.goto(running.url)
    page.wait_for_function("document.getElementById('lossy').textContent.includes('verification=typical is lossy')")


def test_a_request_that_requires_exactness_is_refused(serve: Serve) -> None:
    running = serve(engine=LOSSY)
    refused = running.complete(speculation={"require_exact": True})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "speculation.require_exact"
    assert error["message"] == (
        "require_exact is refused: verification=typical is lossy; leave it out, or use an engine with "
        "verification=exact"
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_exact_server_answers_it(served: Running, temperature: float) -> None:
    answered = served.complete(temperature=temperature, speculation={"require_exact": True})
    assert answered.json()["speculation"]["verification"] == "exact"
    assert "lossy" not in startup_banner(served.url, served.state)
