"""Several sources into one set of token blocks, by weight, with a manifest of what was used.

A weight is a share of the blocks, whatever the sources' lengths; every block is of one source. The
``self`` source is text sampled from the model, which only the runtime can do: whoever joins the
two hands in a :data:`Sampler`.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.calibration.data import calibration_documents, load_tokenizer, token_blocks
from qtool.calibration.documents import Documents, leading_bos
from qtool.calibration.sources import SELF, Source, parse_mix
from qtool.errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Part:
    """A source of a mix, read: its documents, or ``None`` for what the model is to say."""

    spec: str
    source: Source
    documents: Documents | None

    @property
    def name(self) -> str:
        """The source's name, without a path."""
        return SELF if self.documents is None else self.documents.name


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Blocks to sample from a model.

    Attributes:
        folder: the model.
        first_token: what every block begins with.
        num_samples, seq_len: how many blocks, of how many tokens.
        seed: decides them.
    """

    folder: Path
    first_token: int
    num_samples: int
    seq_len: int
    seed: int


# Returns int64 [num_samples, seq_len].
Sampler = Callable[[SampleRequest], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlocks:
    """Calibration samples.

    Attributes:
        ids: int64 [num_samples, seq_len], every entry a real token.
        manifest: what makes the same blocks again: sources, fingerprints, counts, seed, versions.
    """

    ids: Tensor
    manifest: dict[str, Any]


def read_mix(specs: Sequence[str]) -> tuple[Part, ...]:
    """Read all sources; needs no model.

    Raises:
        CalibrationError: one of them cannot be used.
    """
    return tuple(
        Part(spec, source, None if source.place == SELF else calibration_documents(source))
        for spec, source in zip(specs, parse_mix(specs), strict=True)
    )


def mixed_blocks(
    parts: Sequence[Part],
    folder: Path,
    *,
    num_samples: int,
    seq_len: int,
    seed: int,
    sampler: Sampler | None = None,
) -> TokenBlocks:
    """Blocks of all sources for the model in ``folder``, in the order of the sources.

    Raises:
        CalibrationError: a source is too small for its share or does not fit the tokenizer; these
            come before anything is sampled.
    """
    tokenizer = load_tokenizer(folder)
    counts = _counts(parts, num_samples)
    cut = [
        None if part.documents is None else _cut(part.documents, tokenizer, seq_len, count, seed)
        for part, count in zip(parts, counts, strict=True)
    ]
    blocks, entries = [], []
    for part, count, done in zip(parts, counts, cut, strict=True):
        if done is None:
            request = SampleRequest(folder, _first_token(tokenizer), count, seq_len, seed)
            done = _sample(request, sampler)
        ids, facts = done
        blocks.append(ids)
        counted = {"weight": part.source.weight, "samples": count, "tokens": ids.numel()}
        entries.append(facts | counted)
    ids = torch.cat(blocks)
    return TokenBlocks(ids, _manifest(ids, entries, seed))


def share_out(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Samples by weight: shares rounded down, and the rest to the largest remainders."""
    shares = [num_samples * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for index in by_remainder[: num_samples - sum(counts)]:
        counts[index] += 1
    return counts


def _counts(parts: Sequence[Part], num_samples: int) -> list[int]:
    """Samples of each source; none may go without."""
    counts = share_out(num_samples, [part.source.weight for part in parts])
    for part, count in zip(parts, counts, strict=True):
        if count == 0:
            raise CalibrationError(
                f"{part.spec} would get none of {num_samples} samples; raise its weight or "
                "--samples, or leave it out"
            )
    return counts


def _cut(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    count: int,
    seed: int,
) -> tuple[Tensor, dict[str, Any]]:
    """Blocks of a source that was read, and what the manifest says of it."""
    text = documents.render(tokenizer)
    ids = token_blocks(text, tokenizer, seq_len, count, seed)
    return ids, {
        "source": text.name,
        "sha256": text.fingerprint,
        "documents": len(text.documents),
        "whole": text.whole,
        "chat_template": text.chat_template,
    }


def _first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What a model knows as the beginning of a text: BOS, or the token between documents."""
    for token in (leading_bos(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise CalibrationError(
        f"{SELF!r}: the model's tokenizer has neither a BOS nor an EOS token for a text to begin "
        "with; calibrate on another source"
    )


def _sample(request: SampleRequest, sampler: Sampler | None) -> tuple[Tensor, dict[str, Any]]:
    """Blocks that the model says, and what the manifest says of them."""
    if sampler is None:
        raise CalibrationError(
            f"{SELF!r} needs the runtime to sample text; use `qtool quantize`, or pass a sampler"
        )
    ids = sampler(request)
    assert ids.shape == (request.num_samples, request.seq_len)
    return ids, {
        "source": SELF,
        "sha256": hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
        "documents": request.num_samples,
        "whole": True,
        "chat_template": False,
    }


def _manifest(ids: Tensor, entries: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    import tokenizers
    import transformers

    return {
        "sources": entries,
        "samples": ids.shape[0],
        "seq_len": ids.shape[1],
        "tokens": ids.numel(),
        "seed": seed,
        "versions": {
            # The built-in text is Python's.
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
