"""How keys and values are stored: one row a scheme, read by everybody who asks. No torch here.

A scheme says of keys and of values how many bits an element has, and what shares a scale. What has
elements of 4 bits is stored page by page: it has pages of a fixed size, and keeps the page that a
sequence is writing in the compute dtype until it is full. Keys by channel cannot be written before;
values could be, but a query's nearest tokens are those whose rounding costs most
(``docs/kv-cache.md``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qtool.errors import UsageError

Sharing = Literal["checkpoint", "head", "group", "channel"]

# Tokens of a block where a scheme leaves it open.
BLOCK_SIZE = 16
# Tokens of a page that is stored as a whole.
PAGE_SIZE = 64
# Values of a token and head that share a scale.
GROUP_SIZE = 64
# A scale is float16; where the grid is asymmetric a float16 minimum lies beside it.
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """How keys, or values, are stored.

    Attributes:
        bits: of an element.
        type: ``int`` codes, or ``float``: e4m3fn.
        sharing: what shares a scale: ``head``: a token's elements of one head; ``group``: each
            :data:`GROUP_SIZE` of them; ``channel``: a channel of a head in one page; ``checkpoint``
            has scales of its own, and the cache none.
    """

    bits: int
    type: Literal["int", "float"]
    sharing: Sharing

    @property
    def symmetric(self) -> bool:
        """Whether a scale alone makes the grid: with 4 bits a minimum pays."""
        return self.bits == 8

    def page_bytes(self, num_tokens: int, head_dim: int) -> int:
        """Bytes of one head's elements of a page, scales included."""
        grid = SCALE_BYTES if self.symmetric else 2 * SCALE_BYTES
        grids = {
            "checkpoint": 0,
            "head": num_tokens,
            "group": num_tokens * (head_dim // group_size(head_dim)),
            "channel": head_dim,
        }
        return num_tokens * head_dim * self.bits // 8 + grid * grids[self.sharing]


@dataclass(frozen=True, slots=True)
class KVScheme:
    """One way to store keys and values.

    Attributes:
        name: as options and the prefix cache call it.
        keys, values: ``None`` is the compute dtype.
        summary: for people, what follows the name.
    """

    name: str
    keys: Stored | None
    values: Stored | None
    summary: str

    @property
    def has_tails(self) -> bool:
        """Whether pages are stored when they are full, and kept in the compute dtype until then."""
        return any(part is not None and part.bits == 4 for part in self._parts)

    def block_size(self, asked: int | None) -> int:
        """Tokens of a block: what was asked for, or what the scheme needs.

        Raises:
            UsageError: they differ.
        """
        if not self.has_tails:
            return BLOCK_SIZE if asked is None else asked
        if asked not in (None, PAGE_SIZE):
            raise UsageError(
                f"block_size={asked}: the {self.name} cache is stored in pages of {PAGE_SIZE} "
                "tokens; leave it out"
            )
        return PAGE_SIZE

    def page_bytes(self, num_tokens: int, num_heads: int, head_dim: int, wide: int) -> int:
        """Bytes of one layer's block, all included but the tail pages.

        Args:
            wide: bytes of an element of the compute dtype.
        """
        plain = num_tokens * head_dim * wide
        sizes = (plain if p is None else p.page_bytes(num_tokens, head_dim) for p in self._parts)
        return num_heads * sum(sizes)

    @property
    def _parts(self) -> tuple[Stored | None, Stored | None]:
        return self.keys, self.values


_INT8_HEAD, _FP8_HEAD = Stored(8, "int", "head"), Stored(8, "float", "head")
_FP8_STATIC, _INT4_GROUP = Stored(8, "float", "checkpoint"), Stored(4, "int", "group")
_INT4_CHANNEL = Stored(4, "int", "channel")

WIDE = KVScheme("wide", None, None, "the compute dtype")
FP8 = KVScheme("fp8", _FP8_HEAD, _FP8_HEAD, "e4m3, a scale a token and head")
# Not asked for by name: what fp8 is where the checkpoint brings scales for every layer.
FP8_STATIC = KVScheme("fp8 static", _FP8_STATIC, _FP8_STATIC, "e4m3, scales of the checkpoint")
INT8 = KVScheme("int8", _INT8_HEAD, _INT8_HEAD, "a scale a token and head")
K8V4 = KVScheme(
    "k8v4",
    _INT8_HEAD,
    _INT4_GROUP,
    f"8-bit keys, a scale a token and head; 4-bit values in groups of {GROUP_SIZE}",
)
INT4 = KVScheme(
    "int4",
    _INT4_CHANNEL,
    _INT4_GROUP,
    f"keys by channel in pages of {PAGE_SIZE} tokens, values in groups of {GROUP_SIZE}",
)

SCHEMES = {scheme.name: scheme for scheme in (WIDE, FP8, INT8, K8V4, INT4)}

# Asked for: the checkpoint's own plan, or the compute dtype where it has none.
FOLLOW = "auto"
# What kv_cache_dtype takes.
KV_CACHE_DTYPES = (FOLLOW, *SCHEMES)


@dataclass(frozen=True, slots=True)
class LayerSchemes:
    """How each layer of a model stores keys and values.

    Attributes:
        name: of the one scheme of all layers, or of what chose them.
        layers: a scheme each.

    Raises:
        ValueError: there are no layers.
    """

    name: str
    layers: tuple[KVScheme, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a cache of no layers")

    @classmethod
    def uniform(cls, scheme: KVScheme, num_layers: int) -> LayerSchemes:
        """The same scheme in all layers."""
        return cls(scheme.name, (scheme,) * num_layers)

    @classmethod
    def of(cls, names: Sequence[str]) -> LayerSchemes:
        """The schemes of a plan by their names, one a layer.

        Raises:
            UsageError: there is none of a name.
        """
        schemes = tuple(map(kv_scheme, names))
        return cls(names[0] if len(set(names)) == 1 else "plan", schemes)

    @property
    def is_wide(self) -> bool:
        """Whether every layer has the compute dtype."""
        return all(scheme is WIDE for scheme in self.layers)

    @property
    def has_tails(self) -> bool:
        """Whether any layer keeps unfinished pages aside."""
        return any(scheme.has_tails for scheme in self.layers)

    @property
    def description(self) -> str:
        """For people: what lies in how many layers."""
        if len(set(self.layers)) == 1:
            return f"{self.name} ({self.layers[0].summary})"
        counts = Counter("16-bit" if s is WIDE else s.name for s in self.layers)
        parts = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        return f"{self.name} (layers: {parts})"

    def block_size(self, asked: int | None) -> int:
        """Tokens of a block: what was asked for, or what the layers need.

        Raises:
            UsageError: they differ.
        """
        return max(scheme.block_size(asked) for scheme in self.layers)

    def page_bytes(self, num_tokens: int, num_heads: int, head_dim: int, wide: int) -> int:
        """Bytes of a block, all layers; see :meth:`KVScheme.page_bytes`."""
        return sum(s.page_bytes(num_tokens, num_heads, head_dim, wide) for s in self.layers)

    def tail_bytes(self, num_heads: int, head_dim: int, wide: int) -> int:
        """Bytes of a tail page: the layers that keep one; or 0."""
        kept = sum(scheme.has_tails for scheme in self.layers)
        return kept * WIDE.page_bytes(PAGE_SIZE, num_heads, head_dim, wide)


def group_size(head_dim: int) -> int:
    """Values that share a scale: a whole head's where :data:`GROUP_SIZE` does not divide it."""
    return GROUP_SIZE if head_dim % GROUP_SIZE == 0 else head_dim


def kv_scheme(name: str) -> KVScheme:
    """The scheme of an option.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in SCHEMES:
        raise UsageError(f"kv_cache_dtype={name!r}: use one of {', '.join(SCHEMES)}")
    return SCHEMES[name]
