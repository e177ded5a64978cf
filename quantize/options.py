"""What a user can ask of a quantization run; the command line reads its defaults from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from qtool.calibration.sources import BUILTIN
from qtool.errors import UsageError
from qtool.formats.kv_plan import AUTO, CHOICES, FP8, KEYS_BY_TOKEN
from qtool.formats.registry import DEFAULT_FORMAT, writer_of
from qtool.formats.scheme import PORTABLE_BITS, Strategy, fp8_scheme, w8a8_scheme
from qtool.quantize.methods import METHODS
from qtool.quantize.schemes import (
    GRANULARITIES,
    GroupSize,
    IntegerWeights,
    SchemeAsked,
    SchemesAsked,
    parse_override,
)

# Shortest samples on which forms of the cache differ: a query sees its own page as it is.
SWEEP_SEQ_LEN = 256

# What a cache may cost unasked, in nats per token: a tenth of what the best 4-bit weights of
# SmolLM2-135M cost (docs/quality.md).
KV_CACHE_LOSS = 0.005

STORED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """A checked set of options.

    Attributes:
        method: name in :data:`qtool.quantize.methods.METHODS`; ``none`` asks for ``kv_cache``
            alone, and takes nothing that says something about weights.
        bits, group_size, symmetric: of methods that quantize weights alone; see
            :class:`~qtool.quantize.schemes.IntegerWeights`. ``None`` is 4, ``auto``, and asymmetric
            at 4 bits, but symmetric where a format is ``gptq``. ``auto`` takes the largest of 128,
            64 and 32 that divides every row, ``row`` is one scale a row.
        activations: of SmoothQuant: ``dynamic`` (a scale a token) if ``None``, or ``static``.
        granularity: of ``fp8``: what shares a scale; ``channel`` if ``None``, or ``block`` where a
            format is ``fp8``. See :func:`~qtool.formats.scheme.fp8_scheme`.
        weight_only: of ``fp8``: leave inputs in 16 bits.
        layers: ``PATTERN=SCHEME`` overrides; see :mod:`qtool.quantize.schemes`.
        lm_head: bits of the head's weight, in groups of ``group_size``; ``None`` leaves it in 16
            bits.
        kv_cache: how the cache of keys and values is to be stored, one of
            :data:`~qtool.formats.kv_plan.CHOICES`; ``None`` says nothing of it.
        kv_cache_loss: of ``kv_cache`` auto: what the cache may cost, as KL divergence from the same
            weights with a cache in the compute dtype, in nats per token; :data:`KV_CACHE_LOSS` if
            ``None``.
        ignore: patterns of linears that stay as they are; see :mod:`qtool.formats.patterns`.
        skip_first, skip_last: blocks at either end that stay as they are.
        calibration: text sources, each perhaps with ``=WEIGHT``; see
            :mod:`qtool.calibration.sources`.
        samples, seq_len: calibration blocks and their length in tokens.
        seed: chooses the blocks.
        dtype: dtype of scales and of tensors that are not quantized; ``auto`` is the source's.
        device: where blocks are computed; ``auto`` is a GPU if there is one.
        formats: of the result; the first lies at the output folder, others beside it. Names of
            :data:`qtool.formats.registry.WRITERS`.
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
    bits: int | None = None
    group_size: GroupSize | None = None
    symmetric: bool | None = None
    activations: str | None = None
    granularity: Strategy | None = None
    weight_only: bool = False
    layers: tuple[str, ...] = ()
    lm_head: int | None = None
    kv_cache: str | None = None
    kv_cache_loss: float | None = None
    ignore: tuple[str, ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    calibration: tuple[str, ...] = (BUILTIN,)
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    formats: tuple[str, ...] = (DEFAULT_FORMAT,)
    overwrite: bool = False
    eval_windows: int = 4
    eval_text: str = BUILTIN
    strict: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        _require_choice("method", self.method, METHODS)
        _require_choice("dtype", self.dtype, ("auto", *STORED_DTYPES))
        _require_choice("device", self.device, ("auto", "cpu", "cuda"))
        self._refuse_foreign()
        self._refuse_nothing()
        self._check_formats()
        if self.activations not in (None, "dynamic", "static"):
            raise UsageError(f"activations={self.activations!r}: choose dynamic or static")
        if self.granularity not in (None, *GRANULARITIES):
            raise UsageError(
                f"granularity={self.granularity!r}: choose one of {', '.join(GRANULARITIES)}"
            )
        if self.lm_head not in (None, *PORTABLE_BITS):
            raise UsageError(f"lm_head={self.lm_head}: choose 4 or 8 bits, or leave it out")
        if min(self.skip_first, self.skip_last) < 0:
            raise UsageError("skip_first and skip_last are numbers of blocks: 0 or more")
        self._check_cache()
        _ = self.schemes  # refuses overrides that are none
        if self.samples < 1:
            raise UsageError(f"samples={self.samples}: calibration needs at least one block")
        if self.seq_len < 2:
            raise UsageError(f"seq_len={self.seq_len}: a block has at least two tokens")
        if self.eval_windows < 0:
            raise UsageError(f"eval_windows={self.eval_windows}: give a number of windows, or 0")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device='cuda': PyTorch sees no GPU here; use auto or cpu")

    def _check_cache(self) -> None:
        if self.kv_cache is not None:
            _require_choice("kv_cache", self.kv_cache, CHOICES)
        if self.kv_cache_loss is None and self.kv_cache != AUTO:
            return
        if self.kv_cache != AUTO:
            raise UsageError(
                f"kv_cache_loss={self.kv_cache_loss}: has no meaning without kv_cache auto, which "
                "looks for the smallest cache that costs no more"
            )
        if self.kv_cache_loss is not None and not 0 < self.kv_cache_loss < math.inf:
            raise UsageError(
                f"kv_cache_loss={self.kv_cache_loss}: a KL divergence in nats per token, above 0"
            )
        if self.seq_len < SWEEP_SEQ_LEN:
            raise UsageError(
                f"seq_len={self.seq_len}: kv_cache auto measures on calibration samples, of at "
                f"least {SWEEP_SEQ_LEN} tokens, as int4 stores whole pages of 64"
            )

    def _check_formats(self) -> None:
        for name in self.formats:
            writer_of(name)
        if not self.formats or len(set(self.formats)) < len(self.formats):
            raise UsageError(f"formats={self.formats!r}: give at least one, each of them once")

    def _refuse_foreign(self) -> None:
        """An option of another method has no meaning."""
        recipe = METHODS[self.method].recipe
        takes = ", ".join(recipe.scheme_options)
        own = f"takes {takes}" if takes else "leaves weights as they are"
        unset = {field.name: field.default for field in fields(self)}
        for name in recipe.foreign_options:
            if (value := getattr(self, name)) != unset[name]:
                raise UsageError(
                    f"{name}={value!r}: has no meaning for method {self.method}, which {own}; "
                    "leave it out"
                )

    def _refuse_nothing(self) -> None:
        """Weights as they are, in the files they come in, and something to say of the cache."""
        if METHODS[self.method].recipe.family is not None:
            return
        if self.kv_cache is None:
            raise UsageError(
                f"method={self.method!r}: leaves weights as they are, so without kv_cache there is "
                f"nothing to do; ask for one of {', '.join(CHOICES)}, or for another method"
            )
        if self.formats != (DEFAULT_FORMAT,):
            raise UsageError(
                f"formats={self.formats!r}: are layouts of quantized weights, and method "
                f"{self.method} leaves weights as they are; leave format out"
            )

    @property
    def schemes(self) -> SchemesAsked:
        """What is asked for, linear by linear.

        Raises:
            UsageError: an override that is none.
        """
        return SchemesAsked(
            default=self._default_scheme(),
            overrides=tuple(parse_override(text) for text in self.layers),
            ignore=self.ignore,
            skip_first=self.skip_first,
            skip_last=self.skip_last,
            head=self._head_scheme(),
        )

    def _head_scheme(self) -> IntegerWeights | None:
        """The head's groups are those asked for; its grid too, but 8 bits stay symmetric."""
        if self.lm_head is None:
            return None
        same = self.lm_head == (self.bits or 4)
        asked = self.symmetric if self.symmetric or same else None
        grid = self._usual_grid if asked is None else asked
        return IntegerWeights(self.lm_head, grid, self.group_size or "auto")

    def _default_scheme(self) -> SchemeAsked | None:
        family = METHODS[self.method].recipe.family
        if family is None:
            return None
        if family == "w8a8":
            return w8a8_scheme(static=self.activations == "static")
        if family == "fp8":
            usual: Strategy = "block" if "fp8" in self.formats else "channel"
            return fp8_scheme(self.granularity or usual, weight_only=self.weight_only)
        return IntegerWeights(
            4 if self.bits is None else self.bits,
            self._usual_grid if self.symmetric is None else self.symmetric,
            "auto" if self.group_size is None else self.group_size,
        )

    @property
    def _usual_grid(self) -> bool | None:
        """Whether a grid is symmetric that nothing is said of; ``None`` leaves it to the bits."""
        # Engines take symmetric GPTQ files alone.
        return True if "gptq" in self.formats else None

    @property
    def needs_calibration(self) -> bool:
        """Whether the run looks at data."""
        cache = self.kv_cache == FP8 or self.smooths_keys
        return cache or METHODS[self.method].needs_calibration or self.schemes.has_static_inputs

    @property
    def smooths_keys(self) -> bool:
        """Whether the plan of the cache has factors for keys, from the calibration samples."""
        return self.kv_cache in (AUTO, *KEYS_BY_TOKEN)

    @property
    def cache_budget(self) -> float:
        """What ``kv_cache`` auto may cost, in nats per token."""
        return KV_CACHE_LOSS if self.kv_cache_loss is None else self.kv_cache_loss

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
