"""Text in, token blocks out: seeded, never padded, with a manifest that says what was used.

A SOURCE is ``builtin`` or a UTF-8 text file. ``builtin`` is real English that every CPython
installation carries, the help topics of ``pydoc_data``, split by topic into disjoint
calibration and held-out parts. A text file serves both ends; bring two files to keep them apart.

Documents (topics, or the paragraphs of a file with the blank lines that follow them) are
tokenized one by one and laid end to end; the stream is cut into blocks. So a long document is
cut, short ones are packed, the order of the text is kept, and no block holds padding. Only the
tail that fills no block is unused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = "builtin"

# Share of the built-in characters kept for evaluation. With SmolLM2's tokenizer it leaves
# more than the 128 x 512 calibration tokens of the default on the other side.
HELD_OUT_SHARE = 0.3

_BLANK_LINES = re.compile(r"(?<=\n)(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Text:
    """Named documents; joined with nothing between them they are the whole text.

    ``name`` never holds a path, because it is written into checkpoints.
    """

    name: str
    documents: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the UTF-8 text, in hex."""
        return hashlib.sha256("".join(self.documents).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlocks:
    """Calibration samples.

    Attributes:
        ids: int64 [num_samples, seq_len], every entry a real token.
        manifest: what makes the same blocks again: source, fingerprint, counts, seed, versions.
    """

    ids: Tensor
    manifest: dict[str, Any]


def calibration_text(source: str) -> Text:
    """The documents to calibrate on.

    Raises:
        CalibrationError: the file is missing, empty or not UTF-8 text.
    """
    return _builtin_text(held_out=False) if source == BUILTIN else _file_text(Path(source))


def held_out_text(source: str) -> Text:
    """The documents to evaluate on; for ``builtin`` none of them is a calibration document.

    Raises:
        CalibrationError: the file is missing, empty or not UTF-8 text.
    """
    return _builtin_text(held_out=True) if source == BUILTIN else _file_text(Path(source))


def _builtin_text(*, held_out: bool) -> Text:
    from pydoc_data.topics import topics

    kept: list[str] = []
    seen = held = 0
    for name in sorted(topics):
        # Greedy, so that the share holds for any Python version's set of topics.
        to_held_out = held < HELD_OUT_SHARE * seen
        seen += len(topics[name])
        held += len(topics[name]) if to_held_out else 0
        if to_held_out == held_out:
            kept.append(f"{topics[name].strip()}\n\n")
    return Text(f"{BUILTIN}-{'held-out' if held_out else 'calibration'}", tuple(kept))


def _file_text(path: Path) -> Text:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise CalibrationError(
            f"{path} does not exist; a text source is {BUILTIN!r} or a UTF-8 text file"
        ) from None
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8 first"
        ) from None
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be read: {error.strerror}; give a text file"
        ) from None
    if not text.strip():
        raise CalibrationError(f"{path} holds no text; give a file with some")
    ends = [match.end() for match in _BLANK_LINES.finditer(text)] + [len(text)]
    starts = [0, *ends[:-1]]
    documents = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return Text(path.name, tuple(document for document in documents if document))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        CalibrationError: the folder has none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{folder} has no tokenizer that loads ({error}); copy the model's tokenizer files"
        ) from None
    return tokenizer


def token_blocks(
    text: Text, tokenizer: PreTrainedTokenizerBase, seq_len: int, num_samples: int, seed: int
) -> TokenBlocks:
    """A seeded choice of ``num_samples`` distinct blocks of ``seq_len`` tokens.

    A tokenizer that puts a BOS token before a text gets one as the first token of every block.

    Raises:
        CalibrationError: the text has too few tokens.
    """
    encoded = tokenizer(list(text.documents), add_special_tokens=False, verbose=False).input_ids
    stream = torch.tensor([token for ids in encoded for token in ids], dtype=torch.int64)
    blocks = _cut(stream, seq_len, _leading_bos(tokenizer))
    _require_blocks(text, stream, blocks, num_samples, seq_len)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(blocks.shape[0], generator=generator)[:num_samples]
    ids = blocks[chosen.sort().values]
    return TokenBlocks(ids, _manifest(text, ids, seed))


def evaluation_windows(
    text: Text, tokenizer: PreTrainedTokenizerBase, seq_len: int, num_windows: int
) -> Tensor:
    """The first ``num_windows`` windows of the text as it is, int64 [num_windows, seq_len].

    The text is tokenized in one piece and cut without overlap. A tokenizer that puts a BOS
    token before a text gets one as the first token of every window.

    Raises:
        CalibrationError: the text has too few tokens.
    """
    encoded = tokenizer("".join(text.documents), add_special_tokens=False, verbose=False).input_ids
    stream = torch.tensor(encoded, dtype=torch.int64)
    windows = _cut(stream, seq_len, _leading_bos(tokenizer))
    _require_blocks(text, stream, windows, num_windows, seq_len)
    return windows[:num_windows]


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS id if the tokenizer puts one before a text."""
    first: int = tokenizer("a").input_ids[0]
    return first if first == tokenizer.bos_token_id else None


def _cut(stream: Tensor, seq_len: int, bos: int | None) -> Tensor:
    """Blocks [n, seq_len] of a stream [tokens], each starting with ``bos`` if there is one."""
    fresh = seq_len if bos is None else seq_len - 1
    count = stream.numel() // fresh
    blocks = stream[: count * fresh].reshape(count, fresh)
    return blocks if bos is None else torch.nn.functional.pad(blocks, (1, 0), value=bos)


def _require_blocks(
    text: Text, stream: Tensor, blocks: Tensor, num_blocks: int, seq_len: int
) -> None:
    if blocks.shape[0] < num_blocks:
        raise CalibrationError(
            f"{text.name} has {stream.numel()} tokens: {num_blocks} blocks of {seq_len} need "
            f"{num_blocks * seq_len}; give a longer text, or ask for fewer or shorter blocks "
            f"({blocks.shape[0]} of this length fit)"
        )


def _manifest(text: Text, ids: Tensor, seed: int) -> dict[str, Any]:
    import tokenizers
    import transformers

    return {
        "source": text.name,
        "sha256": text.fingerprint,
        "samples": ids.shape[0],
        "seq_len": ids.shape[1],
        "tokens": ids.numel(),
        "chat_template": False,
        "seed": seed,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
