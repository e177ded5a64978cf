"""What a user can ask of a quantization run; the command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qtool.calibration.sources import BUILTIN
from qtool.errors import UsageError
from qtool.quantize.methods import METHODS
from qtool.quantize.plan import GroupSize

STORED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """A checked set of options.

    Attributes:
        method: name in :data:`qtool.quantize.methods.METHODS`.
        bits: 4 or 8.
        group_size: weights that share a scale; ``auto`` takes the largest of 128, 64 and 32
            that divides every row, ``row`` is one scale a row.
        symmetric: ``None`` is asymmetric at 4 bits and symmetric at 8, where formats want it.
        ignore: patterns of linears that stay as they are; see :mod:`qtool.formats.patterns`.
        calibration: text sources, each perhaps with ``=WEIGHT``; see
            :mod:`qtool.calibration.sources`.
        samples, seq_len: calibration blocks and their length in tokens.
        seed: chooses the blocks.
        dtype: dtype of scales and of tensors that are not quantized; ``auto`` is the source's.
        device: where blocks are computed; ``auto`` is a GPU if there is one.
        overwrite: replace a checkpoint at the output folder.
        eval_windows: windows of held-out text on which the result is compared with the original;
            0 leaves the comparison out.
        eval_text: where they come from; the built-in text has a part nothing is calibrated on.
        strict: a module that does not get what was asked fails the run.
        restart: discard what an earlier, unfinished run has done.

    Raises:
        UsageError: a value that cannot be used.
    """

    method: str = "awq"
    bits: int = 4
    group_size: GroupSize = "auto"
    symmetric: bool | None = None
    ignore: tuple[str, ...] = ()
    calibration: tuple[str, ...] = (BUILTIN,)
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    overwrite: bool = False
    eval_windows: int = 4
    eval_text: str = BUILTIN
    strict: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        _require_choice("method", self.method, METHODS)
        _require_choice("dtype", self.dtype, ("auto", *STORED_DTYPES))
        _require_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.samples < 1:
            raise UsageError(f"samples={self.samples}: calibration needs at least one block")
        if self.seq_len < 2:
            raise UsageError(f"seq_len={self.seq_len}: a block has at least two tokens")
        if self.eval_windows < 0:
            raise UsageError(f"eval_windows={self.eval_windows}: give a number of windows, or 0")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device='cuda': PyTorch sees no GPU here; use auto or cpu")

    @property
    def needs_calibration(self) -> bool:
        """Whether the method looks at data."""
        return METHODS[self.method].needs_calibration

    @property
    def grid_is_symmetric(self) -> bool:
        """``symmetric`` with its default filled in."""
        return self.bits == 8 if self.symmetric is None else self.symmetric

    @property
    def torch_device(self) -> torch.device:
        """``device`` with ``auto`` filled in."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def stored_dtype(self, source: torch.dtype) -> torch.dtype:
        """``dtype`` with ``auto`` filled in from the source's dtype.

        Raises:
            UsageError: the source has a dtype that cannot be the result's.
        """
        if self.dtype != "auto":
            return STORED_DTYPES[self.dtype]
        if source not in STORED_DTYPES.values():
            raise UsageError(
                f"the source's weights are {source}, which cannot hold scales; choose --dtype "
                f"{', '.join(STORED_DTYPES)}"
            )
        return source


def _require_choice(name: str, value: str, choices: object) -> None:
    known = [str(choice) for choice in choices]  # type: ignore[attr-defined]
    if value not in known:
        raise UsageError(f"{name}={value!r}: choose one of {', '.join(known)}")
