"""The bodies of requests: OpenAI's fields, vLLM's sampling fields, ours under `speculation`.

Strict: an unknown field is refused by its name. Unsupported fields of OpenAI's API are listed with the only value that
has no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from distillspec.config.serving import MOST_N, MOST_PROMPTS
from distillspec.serving.base.params import LEAST_REPETITION, MOST_REPETITION

# fail_fast: collecting the errors of a million entries takes the event loop a minute.
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
BadWord = Annotated[str, Field(min_length=1, max_length=128)]
Note = Annotated[str, Field(max_length=512)]
SpeculationLength = Annotated[
    int | None,
    Field(
        ge=0,
        le=1024,
        validation_alias=AliasChoices("speculation_length", "max_length"),
        description="At most so many levels of drafted tokens a step. `max_length`, its earlier name, is taken too.",
    ),
]


class Body(BaseModel):
    """Base of all bodies: strict types, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class SpeculationOptions(Body):
    """Options for speculation in one request, and for what is done with its answer."""

    enabled: bool = True
    speculation_length: SpeculationLength = None
    draft: str | None = Field(default=None, max_length=200)  # the draft in use must be this version
    max_time_per_token_s: float | None = Field(default=None, gt=0, le=3600)  # a limit for the goodput controller
    log: bool = True  # False: never recorded for online adaptation
    domain: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w .:/+-]+$")] = "default"  # kind of text
    require_exact: bool = False  # refuse the request if this server's verification is lossy
    trace: bool = False  # return each token's kind (accepted, corrected, bonus or plain) and who proposed it


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # taken, and nothing done: chunks carry no padding


class GenerationBody(Body):
    """Fields that completions and chat completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_N)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    user: str | None = Field(default=None, max_length=512)  # goes into the log line of the request
    # vLLM's
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=LEAST_REPETITION, le=MOST_REPETITION)
    min_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)
    stop_token_ids: Ids | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = None
    bad_words: Annotated[list[BadWord], Field(fail_fast=True)] | None = Field(default=None, max_length=1024)
    allowed_token_ids: Ids | None = Field(default=None, max_length=1 << 18)  # the largest vocabularies
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None  # separates cached prompts
    # ours
    speculation: SpeculationOptions | None = None
    # the client's own notes, which change nothing
    metadata: Annotated[dict[str, Note], Field(max_length=16)] | None = None
    prompt_cache_key: Note | None = None
    safety_identifier: Note | None = None
    # refused unless they have no effect
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def speculation_options(self) -> SpeculationOptions:
        """The given options, or the defaults."""
        return self.speculation or SpeculationOptions()

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(default=16, ge=1, lt=1 << 31)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1)
    echo: Literal[False] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of={self.best_of} is not supported unless it equals n={self.n or 1}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt) and self.prompt:
            return [[int(part) for part in self.prompt]]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation. Clients send the empty fields back with an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=256)]
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def as_template(self) -> dict[str, str]:
        """The turn for a chat template. `developer` is OpenAI's newer name for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class PlainFormat(Body):
    type: Literal["text"]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: PlainFormat | None = None
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=1)
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens disagree; give one of them")
        return self


class TokenizeBody(Body):
    """POST /tokenize: text as it is, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[Ids, Field(max_length=1 << 20)]


class DraftBody(Body):
    """POST /admin/drafts/load and /admin/drafts/promote."""

    draft: Annotated[str, Field(min_length=1, max_length=200)]


class ControllerBody(Body):
    """PATCH /admin/controller. Omitted fields stay as they are."""

    policy: Literal["engine", "fixed", "off"] | None = None
    speculation_length: SpeculationLength = None

    @field_validator("policy")
    @classmethod
    def _not_null(cls, value: str | None) -> str | None:
        if value is None:
            raise ValueError("must be engine, fixed or off")
        return value


class TenantBody(Body):
    """POST /admin/replay/delete."""

    tenant: Annotated[str, Field(min_length=1, max_length=200)]


class ExclusionBody(TenantBody):
    """POST /admin/replay/exclude."""

    excluded: bool = True
