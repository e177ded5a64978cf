"""What was asked of each module, what it got, and what that cost.

Nothing here depends on the clock or on a path, so the same run writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from qtool.formats.registry import DEFAULT_FORMAT
from qtool.formats.tensor import QuantizedTensor

# Where the report lies inside a checkpoint; a sub-folder, because other engines load every
# weight file they find at the top.
REPORT_PATH = "qtool/report.json"

# How weights lie that nobody has quantized, where the config says nothing of the cache either.
PLAIN = "safetensors"

# A quarter of float16's range: prompts unlike the measured text reach further (chat templates
# alone were seen to double a maximum), and from here on float16 is a risk.
FLOAT16_SAFE = 16384.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord:
    """One quantized linear.

    Attributes:
        name: full module name.
        asked: scheme and method of the plan, as ``W4 asym g64 awq``.
        used: what the module got; differs from ``asked`` only with a ``fallback``.
        weight_error: ``|dequantized - weight| / |weight|``, Frobenius norms.
        output_error: the same of the module's output on calibration tokens, or ``None``
            without calibration. Errors are against the weights after smoothing; of a method that
            solves, against the weights it aims at (:func:`qtool.quantize.gptq.retarget`).
        tokens: calibration tokens the module has seen.
        awq_ratio: exponent of the smoothing scale on the module's input; 0 is no smoothing.
        smoothquant_strength: exponent of SmoothQuant's scale on the module's input; 0 is none.
        regularization: what the GPTQ solve needed beyond its usual damping.
        bits_per_weight: stored bits, scales and zeros included.
        num_weights: weights of the module.
        fallback: why ``used`` differs from ``asked``.
    """

    name: str
    asked: str
    used: str
    weight_error: float
    output_error: float | None = None
    tokens: int = 0
    awq_ratio: float | None = None
    smoothquant_strength: float | None = None
    regularization: str | None = None
    bits_per_weight: float
    num_weights: int
    fallback: str | None = None

    @property
    def fell_back(self) -> bool:
        """Whether the module did not get what was asked."""
        return self.fallback is not None or self.used != self.asked


def module_record(
    name: str, method: str, weight: Tensor, quantized: QuantizedTensor
) -> ModuleRecord:
    """Record of a module that got what was asked, with the error against ``weight`` [N, K]."""
    done = f"{quantized.scheme.describe()} {method}"
    difference = (quantized.dequantize() - weight).norm()
    # An all-zero weight is met exactly; its error is 0, not 0/0.
    relative = float(difference / weight.norm()) if difference > 0 else 0.0
    return ModuleRecord(
        name=name,
        asked=done,
        used=done,
        weight_error=relative,
        bits_per_weight=quantized.scheme.bits_per_weight(
            quantized.shape, quantized.scales.element_size() * 8
        ),
        num_weights=weight.numel(),
    )


@dataclass(frozen=True, slots=True)
class SkippedPair:
    """A smoothing pair that is not searched, and why."""

    source: str
    targets: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The finished checkpoint against the original, on text it was not made from.

    Who calibrates on it all the same is told (:attr:`Report.calibrated_on_held_out`).

    Attributes:
        engine: what ran the checkpoint, and in which dtype.
        text, text_sha256, windows, seq_len: what both have read.
        quality: perplexities, KL divergence and top-1 agreement.
    """

    engine: str
    text: str
    text_sha256: str
    windows: int
    seq_len: int
    quality: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run: ``qtool/report.json``.

    Attributes:
        method: name of the method.
        scheme: ``WeightScheme.to_dict`` of most modules' scheme; ``None`` where none is quantized.
        dtype: dtype of scales and of everything that is not quantized.
        calibration: manifest of the token blocks, or ``None`` without calibration.
        modules: one record a quantized linear, in model order; none where weights are as they were.
        qtool_version: version that wrote it.
        base_model: what was quantized, by a name without a path.
        command: the command line that does it again.
        num_parameters: of the original, a tied head not counted twice.
        total_bytes: of all tensors of the result.
        verified_tensors: tensors read back from disk and found as memory held them.
        activation_peaks: largest \\|input\\| of each linear of the original on the held-out text.
        format: how the weights are written.
        evaluation: what quantized weights cost, or ``None`` where it was not measured.
        kv_cache: the plan of the cache (:class:`~qtool.formats.kv_plan.KVPlan`), and what it costs
            beside the weights; ``None`` where none was asked for.
        skipped_pairs: smoothing pairs that the method left out.
    """

    method: str
    scheme: dict[str, Any] | None
    dtype: str
    calibration: dict[str, Any] | None
    modules: tuple[ModuleRecord, ...]
    qtool_version: str
    base_model: str = ""
    command: str = ""
    num_parameters: int = 0
    total_bytes: int = 0
    verified_tensors: int = 0
    activation_peaks: Mapping[str, float] = field(default_factory=dict)
    format: str = DEFAULT_FORMAT
    evaluation: Evaluation | None = None
    kv_cache: Mapping[str, Any] | None = None
    skipped_pairs: tuple[SkippedPair, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per quantized weight, over all modules; without any, per parameter."""
        if not self.modules:
            return self.bits_per_parameter
        weights = sum(record.num_weights for record in self.modules)
        return sum(r.bits_per_weight * r.num_weights for r in self.modules) / weights

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits per parameter of the whole model: embeddings, norms and head included."""
        return 8 * self.total_bytes / self.num_parameters if self.num_parameters else 0.0

    @property
    def fallbacks(self) -> tuple[ModuleRecord, ...]:
        """Modules that did not get what was asked."""
        return tuple(record for record in self.modules if record.fell_back)

    @property
    def calibrated_on_held_out(self) -> bool:
        """Whether the text of the comparison is one that was calibrated on."""
        if self.evaluation is None or self.calibration is None:
            return False
        return self.evaluation.text_sha256 in {s["sha256"] for s in self.calibration["sources"]}

    @property
    def float16_risks(self) -> dict[str, float]:
        """Modules whose input comes too near to the end of float16's range."""
        return {name: peak for name, peak in self.activation_peaks.items() if peak > FLOAT16_SAFE}

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            **asdict(self),
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
            "fallbacks": [record.name for record in self.fallbacks],
            "float16_risks": sorted(self.float16_risks),
        }


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """All modules of one kind, for a table.

    ``weight_error`` and ``output_error`` are means over ``count`` modules, ``worst`` is the full
    name of the one with the largest error, ``fallbacks`` counts those that got something else.
    """

    kind: str
    count: int
    scheme: str
    weight_error: float
    output_error: float | None
    worst: str
    fallbacks: int


def summary_rows(report: Report) -> list[SummaryRow]:
    """One row for every kind of module (``q_proj``, ...), in the order of first appearance."""
    kinds: dict[str, list[ModuleRecord]] = {}
    for record in report.modules:
        kinds.setdefault(record.name.rpartition(".")[2], []).append(record)
    return [_summary_row(kind, records) for kind, records in kinds.items()]


def _summary_row(kind: str, records: list[ModuleRecord]) -> SummaryRow:
    outputs = [r.output_error for r in records if r.output_error is not None]
    worst = max(records, key=lambda r: r.weight_error if r.output_error is None else r.output_error)
    return SummaryRow(
        kind=kind,
        count=len(records),
        scheme=", ".join(dict.fromkeys(r.used for r in records)),
        weight_error=sum(r.weight_error for r in records) / len(records),
        output_error=sum(outputs) / len(outputs) if outputs else None,
        worst=worst.name,
        fallbacks=sum(r.fell_back for r in records),
    )
