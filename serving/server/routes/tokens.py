"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Response
from fastapi import Request as HttpRequest

from distillspec.serving.server.answers.app_state import app_state_of
from distillspec.serving.server.answers.parsed_request import check_model
from distillspec.serving.server.answers.stream import CLIENT_LEFT, unless_disconnected
from distillspec.serving.server.http.bodies import described, read_as
from distillspec.serving.server.http.errors import bad_request
from distillspec.serving.server.http.schemas import DetokenizeBody, TokenizeBody
from distillspec.serving.server.routes.access import tenant

T = TypeVar("T")
Tenant = Annotated[str, Depends(tenant)]

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(
    request: HttpRequest, who: Tenant, body: Annotated[TokenizeBody, Depends(read_as(TokenizeBody))]
) -> Any:
    """Return the token ids of a text, or of a conversation up to the assistant's turn."""
    state = app_state_of(request)
    check_model(state, body.model)

    def counted() -> list[int]:
        if body.messages is not None:
            return list(state.codec.render([message.as_template for message in body.messages]))
        return list(state.codec.encode(body.prompt or "", special=body.add_special_tokens))

    ids = await _in_turn(request, who, counted)
    if ids is None:
        return Response(status_code=CLIENT_LEFT)
    return {"tokens": ids, "count": len(ids), "max_model_len": state.engine.max_model_len}


@router.post("/detokenize", openapi_extra=described(DetokenizeBody))
async def detokenize(
    request: HttpRequest, who: Tenant, body: Annotated[DetokenizeBody, Depends(read_as(DetokenizeBody))]
) -> Any:
    """Return the text of token ids."""
    state = app_state_of(request)
    check_model(state, body.model)
    size = state.engine.target.identity.vocab_size
    if bad := [token for token in body.tokens if token >= size]:
        raise bad_request(f"token id {bad[0]} is not in the model's vocabulary (0…{size - 1})", "tokens")
    text = await _in_turn(request, who, lambda: state.codec.decode(body.tokens))
    return Response(status_code=CLIENT_LEFT) if text is None else {"prompt": text}


async def _in_turn(request: HttpRequest, who: str, work: Callable[[], T]) -> T | None:
    """Return the result of work on tokens. None: the client has left."""
    return await unless_disconnected(request.receive, app_state_of(request).in_counting_thread(work, who))
