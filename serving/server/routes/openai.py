"""/v1: models, completions, chat completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from starlette.responses import Response

from distillspec.serving.server.answers.app_state import app_state_of
from distillspec.serving.server.answers.generation import answer, new_head
from distillspec.serving.server.answers.parsed_request import ParsedRequest, check_model
from distillspec.serving.server.answers.replies import ChatReplies, CompletionReplies
from distillspec.serving.server.answers.sampling_options import chat_params, completion_params
from distillspec.serving.server.http.bodies import described, read_as
from distillspec.serving.server.http.schemas import ChatBody, CompletionBody
from distillspec.serving.server.routes.access import tenant

router = APIRouter(prefix="/v1", tags=["OpenAI"])
Tenant = Annotated[str, Depends(tenant)]
ANSWER: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


@router.get("/models")
async def models(request: HttpRequest, who: Tenant) -> dict[str, Any]:
    """List the one model that is served."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/models/{name:path}")
async def model(request: HttpRequest, name: str, who: Tenant) -> dict[str, Any]:
    """Return the served model by its name."""
    check_model(app_state_of(request), name)
    return _model(request)


@router.post("/completions", openapi_extra=described(CompletionBody), responses=ANSWER)
async def completions(
    request: HttpRequest, who: Tenant, body: Annotated[CompletionBody, Depends(read_as(CompletionBody))]
) -> Response:
    """Continue one or more prompts, given as text or token ids."""
    state = app_state_of(request)
    check_model(state, body.model)
    params = completion_params(body)
    parsed = ParsedRequest(body, params, body.prompts, state.codec.encode, "prompt", who)
    replies = CompletionReplies(new_head(state, "cmpl"), state.codec, parsed.answers, params.logprobs is not None)
    return await answer(state, request, parsed, replies)


@router.post("/chat/completions", openapi_extra=described(ChatBody), responses=ANSWER)
async def chat_completions(
    request: HttpRequest, who: Tenant, body: Annotated[ChatBody, Depends(read_as(ChatBody))]
) -> Response:
    """Answer a conversation, through the model's own chat template."""
    state = app_state_of(request)
    check_model(state, body.model)
    params = chat_params(body)
    turns = [message.as_template for message in body.messages]
    parsed = ParsedRequest(body, params, [turns], state.codec.render, "messages", who)
    replies = ChatReplies(new_head(state, "chatcmpl"), state.codec, parsed.answers, params.logprobs is not None)
    return await answer(state, request, parsed, replies)


def _model(request: HttpRequest) -> dict[str, Any]:
    state = app_state_of(request)
    return {
        "id": state.model,
        "object": "model",
        "created": state.started,
        "owned_by": "distillspec",
        "max_model_len": state.engine.max_model_len,
    }
