"""/v1: models, completions, chat completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.responses import Response

from distillspec.serving.server.access import tenant
from distillspec.serving.server.bodies import described, read_as
from distillspec.serving.server.generation import Wanted, answer, check_model, new_head
from distillspec.serving.server.parts import parts_of
from distillspec.serving.server.replies import ChatReplies, CompletionReplies
from distillspec.serving.server.schemas import ChatBody, CompletionBody
from distillspec.serving.server.wishes import chat_params, completion_params

router = APIRouter(prefix="/v1", tags=["OpenAI"])
Tenant = Annotated[str, Depends(tenant)]
ANSWER: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


@router.get("/models")
async def models(request: HttpRequest, who: Tenant) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/models/{name:path}")
async def model(request: HttpRequest, name: str, who: Tenant) -> dict[str, Any]:
    """The same by its name."""
    check_model(parts_of(request), name)
    return _model(request)


@router.post("/completions", openapi_extra=described(CompletionBody), responses=ANSWER)
async def completions(
    request: HttpRequest, who: Tenant, body: Annotated[CompletionBody, Depends(read_as(CompletionBody))]
) -> Response:
    """Continue one or more prompts, as text or token ids."""
    parts = parts_of(request)
    check_model(parts, body.model)
    params = completion_params(body)
    wanted = Wanted(body, params, body.prompts, parts.codec.encode, "prompt", who)
    replies = CompletionReplies(new_head(parts, "cmpl"), parts.codec, wanted.answers, params.logprobs is not None)
    return await answer(parts, request, wanted, replies)


@router.post("/chat/completions", openapi_extra=described(ChatBody), responses=ANSWER)
async def chat_completions(
    request: HttpRequest, who: Tenant, body: Annotated[ChatBody, Depends(read_as(ChatBody))]
) -> Response:
    """Answer a conversation, through the model's own chat template."""
    parts = parts_of(request)
    check_model(parts, body.model)
    params = chat_params(body)
    turns = [message.as_template for message in body.messages]
    wanted = Wanted(body, params, [turns], parts.codec.render, "messages", who)
    replies = ChatReplies(new_head(parts, "chatcmpl"), parts.codec, wanted.answers, params.logprobs is not None)
    return await answer(parts, request, wanted, replies)


def _model(request: HttpRequest) -> dict[str, Any]:
    parts = parts_of(request)
    return {
        "id": parts.model,
        "object": "model",
        "created": parts.started,
        "owned_by": "distillspec",
        "max_model_len": parts.engine.max_model_len,
    }
