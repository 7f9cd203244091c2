"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest

from distillspec.serving.server.answers.app_state import app_state_of
from distillspec.serving.server.answers.parsed_request import check_model
from distillspec.serving.server.http.bodies import described, read_as
from distillspec.serving.server.http.errors import bad_request
from distillspec.serving.server.http.schemas import DetokenizeBody, TokenizeBody
from distillspec.serving.server.routes.access import tenant

router = APIRouter(tags=["tokens"], dependencies=[Depends(tenant)])


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(
    request: HttpRequest, body: Annotated[TokenizeBody, Depends(read_as(TokenizeBody))]
) -> dict[str, Any]:
    """Return the token ids of a text, or of a conversation up to the assistant's turn."""
    state = app_state_of(request)
    check_model(state, body.model)
    if body.messages is not None:
        turns = [message.as_template for message in body.messages]
        ids = await state.in_counting_thread(lambda: state.codec.render(turns))
    else:
        ids = await state.in_counting_thread(
            lambda: state.codec.encode(body.prompt or "", special=body.add_special_tokens)
        )
    return {"tokens": list(ids), "count": len(ids), "max_model_len": state.engine.max_model_len}


@router.post("/detokenize", openapi_extra=described(DetokenizeBody))
async def detokenize(
    request: HttpRequest, body: Annotated[DetokenizeBody, Depends(read_as(DetokenizeBody))]
) -> dict[str, Any]:
    """Return the text of token ids."""
    state = app_state_of(request)
    check_model(state, body.model)
    size = state.engine.target.identity.vocab_size
    if bad := [token for token in body.tokens if token >= size]:
        raise bad_request(f"token id {bad[0]} is not in the model's vocabulary (0…{size - 1})", "tokens")
    return {"prompt": await state.in_counting_thread(lambda: state.codec.decode(body.tokens))}
