"""Small tokenizers and random cases for text tests. See also models.py."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from tokenizers.trainers import BpeTrainer

from support.models import TRAINING_TEXT

PIECES = ["a", "ab", "b", " ", "\n", "é", "e\u0301", "中", "文字", "🙂", "👩‍👩‍👧", "क्षि", "."]


def stopped_text(
    text: str, stops: Sequence[str], start: int, include: bool
) -> tuple[str, str | None]:
    """Reference: look at every end of the text in turn, for the longest string first."""
    for end in range(start, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[start:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def cut_bytes(data: bytes, rng: random.Random) -> list[bytes]:
    """``data`` in pieces of 1 to 5 bytes, as no tokenizer would be so unkind to cut it."""
    tokens = []
    while data:
        size = rng.randint(1, 5)
        tokens.append(data[:size])
        data = data[size:]
    return tokens


def random_stops(text: str, rng: random.Random) -> list[str]:
    """Parts of the text, beginnings of these, and near misses."""
    stops = []
    for _ in range(rng.randint(0, 3)):
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 6)]
        stops += [stop, stop[:-1] or stop, stop + rng.choice(PIECES)]
    return rng.sample(stops, rng.randint(0, len(stops)))


class ByteDecoder:
    """Token i is the i-th byte string; the text of ``special`` token ids can be skipped."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.special = frozenset(special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special if skip_special_tokens else frozenset()
        data = b"".join(self.tokens[i] for i in ids if i not in skipped)
        return data.decode(errors="replace")


def make_byte_fallback_tokenizer() -> Tokenizer:
    """A BPE with ``<unk>``, ``<s>`` (put before every text), ``</s>``; U+2581 marks a space.

    It knows few characters; all others are byte tokens such as ``<0x0A>``.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special_tokens = ["<unk>", "<s>", "</s>"]
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=[*special_tokens, *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT[:2], trainer)
    # The trainer can add byte tokens as special ones only, and decoding would skip those.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special_tokens]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer
