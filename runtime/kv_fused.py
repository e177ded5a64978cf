"""A layer whose back end keeps pages of its own: it rotates, stores and attends to them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qtool.runtime.kernels.backend import (
    AttentionScope,
    Backend,
    FusedCache,
    PageCodes,
    PagedBatch,
    PageForm,
)
from qtool.runtime.kv_schemes import KVScheme, LayerSchemes, Sharing, Stored
from qtool.runtime.rotary import RotaryRows

_CODES: Mapping[tuple[int, str, Sharing], PageCodes] = {
    (8, "int", "head"): "int8",
    (8, "float", "head"): "fp8",
    (8, "float", "checkpoint"): "fp8",
    (4, "int", "channel"): "int4",
    (4, "int", "group"): "int4",
}


class FusedLayer:
    """See the module's text.

    Attributes:
        pools: tensors [num_blocks, ...]; a block's share is its entry in each.
    """

    def __init__(self, cache: FusedCache) -> None:
        self._cache, self.pools = cache, cache.pools

    def beside(self, tails: Tensor | None, scales: tuple[Tensor, Tensor] | None) -> FusedLayer:
        """Another layer of the same form, in other blocks of the same pools.

        Args:
            tails, scales: the other's, where the form has them.
        """
        return FusedLayer(self._cache.beside(tails, scales))

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        scope: AttentionScope,
        rotary: RotaryRows | None,
    ) -> Tensor:
        """Rotate and store the batch's rows, and let its queries see what is stored.

        Args:
            q: [T, num_heads, head_dim], not rotated.
            keys, values: [T, num_kv_heads, head_dim].
            rotary: the batch's rows of the layer's rotary table, if it has one.

        Returns:
            [T, num_heads, head_dim].
        """
        rows = None if rotary is None else (rotary.cos, rotary.sin)
        return self._cache.attend(q, keys, values, rows, batch, scope)


def fused_layer(
    scheme: KVScheme,
    backend: Backend,
    shape: tuple[int, int, int, int],
    tails: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
) -> FusedLayer | None:
    """A layer in the back end's pages, or ``None`` where it has none for it.

    Args:
        shape: (num_blocks, block_size, num_kv_heads, head_dim).
        tails, scales: where the scheme has them.
    """
    form = page_form(scheme)
    if form is None or why_not_fused(scheme, backend, shape[3], shape[1]) is not None:
        return None
    return FusedLayer(backend.fused_cache(form, shape, tails=tails, scales=scales))


def page_form(scheme: KVScheme) -> PageForm | None:
    """The scheme as back ends know it; ``None`` for one that none of them has."""
    keys, values = _codes(scheme.keys), _codes(scheme.values)
    swapped = _sharing(scheme.keys) == "group" or _sharing(scheme.values) == "channel"
    if keys is None or values is None or swapped:
        return None
    return PageForm(keys, values, is_static=_sharing(scheme.keys) == "checkpoint")


def _codes(stored: Stored | None) -> PageCodes | None:
    if stored is None:
        return "wide"
    return _CODES.get((stored.bits, stored.type, stored.sharing))


def _sharing(stored: Stored | None) -> Sharing | None:
    return None if stored is None else stored.sharing


def why_not_fused(scheme: KVScheme, backend: Backend, head_dim: int, block_size: int) -> str | None:
    """What keeps layers of a scheme from the back end's own pages, or ``None``."""
    form = page_form(scheme)
    if form is None:
        return f"no kernel reads keys and values of the {scheme.name} form"
    return backend.why_not_fused(form, head_dim, block_size)


def fallback_notes(schemes: LayerSchemes, backend: Backend, head_dim: int) -> tuple[str, ...]:
    """Where a back end that has pages of its own does without them."""
    if not backend.fused_kernel:
        return ()
    size = schemes.block_size(backend.block_size)
    found = {
        reason: scheme
        for scheme in dict.fromkeys(schemes.layers)
        if (reason := why_not_fused(scheme, backend, head_dim, size)) is not None
    }
    return tuple(plain_note(reason) for reason in found)


def plain_note(reason: str) -> str:
    """That attention does without the back end's own pages."""
    return f"attention runs on plain torch, sequence by sequence, correct but slow: {reason}"


def block_size_of(schemes: LayerSchemes, backend: Backend, asked: int | None) -> int:
    """Tokens of a block: what was asked for, what schemes need, or what the back end wants."""
    return schemes.block_size(backend.block_size if asked is None else asked)
