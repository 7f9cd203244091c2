"""Tokenisation for the server: prompts, chat template, text and bytes of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from distillspec.data.chat import TemplateRefused, render_prompt
from distillspec.serving.server.http.errors import bad_request


class TextCodec:
    """Tokenizer of the server. All methods are safe in any thread.

    A model without a tokenizer refuses text (ApiError 400) and shows a token as `token_id:17`.

    Args:
        tokenizer: the model's, if it has one.
        longest: the most tokens a prompt may have.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self.most_characters = 0 if tokenizer is None else longest * max(map(len, tokenizer.get_vocab()))
        self._bytes_of = _byte_alphabet() if _is_byte_level(tokenizer) else {}
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    def encode(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of raw text. Token ids are returned as they are."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        return tuple(self._tokenizer_for("prompt")(prompt, add_special_tokens=special)["input_ids"])

    def render(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to the start of the assistant's turn.

        Raises:
            ApiError: the model's template refuses these messages, or there is no tokenizer.
        """
        try:
            return render_prompt(self._tokenizer_for("messages"), messages)
        except TemplateRefused as error:
            problem = f"the model's chat template refuses these messages: {error.reason}"
            raise bad_request(problem, "messages") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer_for("tokens").decode(list(ids)))

    def _tokenizer_for(self, param: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raise ApiError 400, blaming the field `param`, if there is none."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer; give the prompt as token ids, to /v1/completions", param)
        return self.tokenizer

    def check_fits(self, prompt: str | Sequence[int] | Sequence[dict[str, str]], param: str) -> None:
        """Raise ApiError 400 if a prompt cannot fit into the context. Nothing is tokenised.

        Token ids are counted. Text and messages are refused if they have more characters than the context has room for
        even when every token is the longest of the vocabulary. Without a tokenizer any text is refused.
        """
        if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], dict):
            if len(prompt) > self.longest:
                problem = f"a prompt of {len(prompt)} tokens leaves no room to answer: this model reads {self.longest}"
                raise bad_request(f"{problem} (max_model_len)", param, "context_length_exceeded")
            return
        texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m, dict)]
        if texts:
            self._tokenizer_for(param)
        characters = sum(map(len, texts))
        if characters > self.most_characters:
            raise bad_request(
                f"{characters} characters cannot fit: this model reads at most {self.most_characters}"
                " (max_model_len tokens as long as its longest)",
                param,
                "context_length_exceeded",
            )

    def _token_text(self, token: int) -> str:
        """Return the text of one token inside a text. For a part of a UTF-8 character it is the replacement character.

        Many decoders drop the space before a text's first word (Llama 2's, T5's), and others put one before each later
        word (BERT's). So the token is decoded after itself. Byte-level decoders give the same text everywhere.
        """
        if self.tokenizer is None:
            return f"token_id:{token}"
        alone = str(self.tokenizer.decode([token]))
        if self._bytes_of:
            return alone
        twice = str(self.tokenizer.decode([token, token]))
        return twice[len(alone) :] if twice.startswith(alone) else alone

    def token_bytes(self, token: int) -> list[int]:
        """Return the UTF-8 bytes of a token. Exact for byte-level tokenizers, also for parts of a character."""
        piece = None if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str):
            if self._bytes_of and all(letter in self._bytes_of for letter in piece):
                return [self._bytes_of[letter] for letter in piece]
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's single bytes
                return [int(piece[3:5], 16)]
        return list(self.token_text(token).encode())


def _is_byte_level(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from letter to byte: printable bytes are themselves, the others come after 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table
