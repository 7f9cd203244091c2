"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest

from distillspec.serving.server.access import tenant
from distillspec.serving.server.bodies import described, read_as
from distillspec.serving.server.errors import bad_request
from distillspec.serving.server.generation import check_model
from distillspec.serving.server.parts import parts_of
from distillspec.serving.server.schemas import DetokenizeBody, TokenizeBody

router = APIRouter(tags=["tokens"], dependencies=[Depends(tenant)])


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(
    request: HttpRequest, body: Annotated[TokenizeBody, Depends(read_as(TokenizeBody))]
) -> dict[str, Any]:
    """Token ids of a text, or of a conversation up to where the assistant speaks."""
    parts = parts_of(request)
    check_model(parts, body.model)
    if body.messages is not None:
        turns = [message.as_template for message in body.messages]
        ids = await parts.counting(lambda: parts.codec.render(turns))
    else:
        ids = await parts.counting(lambda: parts.codec.encode(body.prompt or "", special=body.add_special_tokens))
    return {"tokens": list(ids), "count": len(ids), "max_model_len": parts.engine.max_model_len}


@router.post("/detokenize", openapi_extra=described(DetokenizeBody))
async def detokenize(
    request: HttpRequest, body: Annotated[DetokenizeBody, Depends(read_as(DetokenizeBody))]
) -> dict[str, Any]:
    """The text of token ids."""
    parts = parts_of(request)
    check_model(parts, body.model)
    size = parts.engine.target.identity.vocab_size
    if bad := [token for token in body.tokens if token >= size]:
        raise bad_request(f"token id {bad[0]} is not in the model's vocabulary (0…{size - 1})", "tokens")
    return {"prompt": await parts.counting(lambda: parts.codec.decode(body.tokens))}
