"""Method names, what each needs, and the stream of quantized blocks it makes of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qtool.calibration.weights import read_weight
from qtool.quantize.block import quantized_blocks
from qtool.quantize.job import Job, QuantizedBlock
from qtool.quantize.recipe import Recipe
from qtool.quantize.report import module_record
from qtool.quantize.rtn import quantize_rtn


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method, as its recipe."""

    recipe: Recipe

    @property
    def needs_calibration(self) -> bool:
        """Whether it cannot do without data."""
        return self.recipe.needs_calibration

    def run(self, job: Job) -> Iterator[QuantizedBlock]:
        """All blocks of a job, in order. Without calibration tokens there is no forward pass."""
        if self.recipe.family is None:
            return _kept_blocks(job)
        blocks = _rounded_blocks if job.ids is None else quantized_blocks
        return blocks(job, self.recipe)


def _rounded_blocks(job: Job, recipe: Recipe) -> Iterator[QuantizedBlock]:
    """All blocks of a job, rounded as they are."""
    assert not recipe.needs_calibration
    for prefix in job.prefixes():
        weights, records = {}, []
        for name in (f"{prefix}.{linear}" for linear in job.schemes_of(prefix)):
            weight = read_weight(job.reader, f"{name}.weight", job.device)
            weights[name] = quantize_rtn(weight, job.schemes[name], job.dtype)
            records.append(module_record(name, recipe.name, weight, weights[name]))
        job.reader.close()  # a memory map counts as memory as far as it was read
        yield QuantizedBlock(weights, tuple(records))


def _kept_blocks(job: Job) -> Iterator[QuantizedBlock]:
    """All blocks of a job as they are; samples pass through them where the cache is calibrated."""
    for _ in job.prefixes() if job.ids is None else job.blocks():
        yield QuantizedBlock({}, ())


_RECIPES = (
    Recipe(name="rtn"),
    Recipe(name="rtn+clip", clip=True),
    Recipe(name="gptq", solve=True),
    Recipe(name="awq", smoothing="awq", clip=True),
    Recipe(name="awq+gptq", smoothing="awq", clip=True, solve=True),
    Recipe(name="smoothquant", smoothing="smoothquant", family="w8a8"),
    Recipe(name="smoothquant+gptq", smoothing="smoothquant", solve=True, family="w8a8"),
    Recipe(name="fp8", family="fp8"),
    Recipe(name="fp8+gptq", solve=True, family="fp8"),
    Recipe(name="none", family=None),
)

METHODS: Mapping[str, Method] = {recipe.name: Method(recipe) for recipe in _RECIPES}
