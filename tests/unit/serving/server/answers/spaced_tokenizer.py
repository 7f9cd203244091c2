"""A tokenizer whose pieces hold their spaces, as SentencePiece's do, with any decoder."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = ("▁", "▁▁", "▁the", "the", "me", ".")


def llama_decoder(strip: bool = True) -> decoders.Sequence:
    """Return the decoder of transformers' LlamaTokenizer, which drops a text's first space, or Gemma's without that."""
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def spaced_tokenizer(decoder: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer that prefers words to single bytes."""
    pieces = [(piece, -1.0 if piece in WORDS else -20.0) for piece in (*SPECIAL, *BYTES, *WORDS)]
    backend = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
