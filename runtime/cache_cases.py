"""Ways to keep keys and values, side by side on one decoder's weights.

The same code runs all of them, so that nothing but what the cache holds differs: what the engine
runs, or where eviction is among them, which native kernels do not count votes for, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from qtool.runtime.eviction import EvictionRule, eviction_rule
from qtool.runtime.kv_schemes import LayerSchemes
from qtool.runtime.loaded_model import LoadedModel, choose_cache
from qtool.runtime.model import Decoder
from qtool.runtime.window_run import WindowRun


@dataclass(frozen=True, slots=True)
class CacheCase:
    """One way.

    Attributes:
        name: of the form, and how many tokens are kept if not all are.
        eviction: what is kept of a sequence; everything if ``None``.
        notes: what was not as asked.
    """

    name: str
    decoder: Decoder
    eviction: EvictionRule | None = None
    notes: tuple[str, ...] = ()

    def run(self, window: list[int]) -> WindowRun:
        """A window, with a cache of its own."""
        return WindowRun(self.decoder, window, self.eviction)


def cache_cases(
    model: LoadedModel,
    forms: Sequence[str | LayerSchemes],
    budget: int | None = None,
    longest: int = 0,
) -> list[CacheCase]:
    """Forms by name; and again with eviction, where there is a budget.

    Args:
        forms: what ``kv_cache_dtype`` takes, or a scheme for each layer.
        budget: tokens that a sequence keeps.
        longest: tokens of the longest window.

    Raises:
        UsageError: no form of a name, or a budget that :func:`eviction_rule` refuses.
    """
    evicts = budget is not None
    plain = layer_by_layer(model.decoder) if evicts else model.decoder
    cases = list[CacheCase]()
    for asked in forms:
        form, notes = choose_cache(asked, model.kv_scales, model.decoder, model.kv_plan)
        name = asked if isinstance(asked, str) else asked.name
        decoder = replace(plain, kv=replace(form, counts_votes=evicts))
        cases.append(CacheCase(name, decoder, notes=notes))
    if budget is None:
        return cases
    return cases + [_evicting(case, budget, longest) for case in cases]


def _evicting(case: CacheCase, budget: int, longest: int) -> CacheCase:
    config, size = case.decoder.config, case.decoder.block_size()
    rule = eviction_rule("heavy-hitter", budget, size, config.windows, longest)
    assert rule is not None
    return replace(case, name=f"{case.name}, {rule.max_tokens} kept", eviction=rule)


def layer_by_layer(decoder: Decoder) -> Decoder:
    """The same weights without the native step."""
    return Decoder(**{field.name: getattr(decoder, field.name) for field in fields(Decoder)})
