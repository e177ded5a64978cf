"""Text in, token blocks out: seeded, never padded.

``builtin`` is real English that every CPython installation carries, the help topics of
``pydoc_data``, split by topic into disjoint calibration and held-out parts. All other sources
(see :mod:`qtool.calibration.sources`) serve both ends; bring two to keep them apart.

Documents are tokenized one by one and laid end to end; the stream is cut into blocks. So a long
document is cut, short ones are packed, the order of the text is kept, and no block holds padding.
Only the tail that fills no block is unused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtool.calibration.documents import Documents, Text, leading_bos
from qtool.calibration.hub import read_dataset
from qtool.calibration.records import read_file
from qtool.calibration.sources import BUILTIN, SELF, HubDataset, Source, parse_source
from qtool.errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Share of the built-in characters kept for evaluation. With SmolLM2's tokenizer it leaves
# more than the 128 x 512 calibration tokens of the default on the other side.
HELD_OUT_SHARE = 0.3


def calibration_documents(source: Source) -> Documents:
    """The documents to calibrate on, of any source but ``self``.

    Raises:
        CalibrationError: the source cannot be read, holds no text, or something else.
    """
    return _read(source, held_out=False)


def held_out_documents(spec: str) -> Documents:
    """The documents to evaluate on; for ``builtin`` none of them is a calibration document.

    Raises:
        CalibrationError: ``spec`` is no source; see :func:`calibration_documents`.
    """
    source = parse_source(spec)
    if source.place == SELF:
        raise CalibrationError(
            f"{SELF!r} is text that the model makes, which says little about its quality; evaluate "
            "on another source"
        )
    return _read(source, held_out=True)


def held_out_builtin() -> Text:
    """The part of the built-in text that is never calibrated on."""
    return _builtin_text(held_out=True)


def _read(source: Source, *, held_out: bool) -> Documents:
    if isinstance(source.place, Path):
        return read_file(source.place, source.column)
    if isinstance(source.place, HubDataset):
        return read_dataset(source.place, source.column)
    return _builtin_text(held_out=held_out)


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
) -> Tensor:
    """A seeded choice of ``num_samples`` distinct blocks, int64 [num_samples, seq_len].

    Every entry is a real token. A tokenizer that puts a BOS token before a text gets
    one as the first token of every block.

    Raises:
        CalibrationError: the text has too few tokens.
    """
    encoded = tokenizer(list(text.documents), add_special_tokens=False, verbose=False).input_ids
    stream = torch.tensor([token for ids in encoded for token in ids], dtype=torch.int64)
    blocks = _cut(stream, seq_len, leading_bos(tokenizer))
    _require_blocks(text, stream, blocks, num_samples, seq_len)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(blocks.shape[0], generator=generator)[:num_samples]
    return blocks[chosen.sort().values]


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
    windows = _cut(stream, seq_len, leading_bos(tokenizer))
    _require_blocks(text, stream, windows, num_windows, seq_len)
    return windows[:num_windows]


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


def canonical_order(ids: Tensor) -> Tensor:
    """Samples [num_samples, seq_len] sorted by their tokens.

    Searches look at some of the tokens; sorted, the same ones in whatever order samples came.
    """
    rows = sorted(range(ids.shape[0]), key=lambda row: ids[row].tolist())
    return ids[rows]
