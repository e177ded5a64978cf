"""Layers in groups, each with block tables of its own. No torch here.

Where some layers see everything and others a window, one table for all would keep every block for
the sake of the former. So layers of one window share a table, and their blocks are given back when
the window has passed. All groups take their blocks from one memory: a block is ``depth`` layers
deep, and a group has as many layers, or fewer. So nothing has to be divided beforehand, and however
long sequences are, no group runs out while another has room.

Where there are more sliding layers than others, they make several groups. A group that is not full
wastes the rest of its blocks. So the depth is chosen by what a sequence of ``longest`` tokens takes
(:func:`group_layers`):

    depth * sum over groups of min(ceil(longest / block_size), most_held(window))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from qtool.runtime.kv_schemes import LayerSchemes

# A table a group has to be kept, and copied to the device, in every step.
MAX_GROUPS = 8
# Of a long sequence's memory. Short ones may take more than in one group: blocks with empty places.
LEAST_SAVED = 1 / 8


def first_seen(position: int, window: int | None, block_size: int) -> int:
    """The first logical block that a token at ``position`` sees, itself the window's last."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def most_held(window: int | None, chunk: int, block_size: int) -> int:
    """Most blocks that a sequence holds of a group while it computes ``chunk`` tokens at a time.

    These are the chunk, what its first token sees, and the rest of the two blocks at the ends.
    """
    if window is None:
        return sys.maxsize
    return -(-(window - 1 + chunk + block_size - 1) // block_size)


def longest_table(bounds: Sequence[int], num_blocks: int) -> int:
    """Blocks up to which tables may grow that share ``num_blocks``; no end where all have bounds.

    Args:
        bounds: of each table, blocks that it holds at most.
    """
    rest, growing = num_blocks, len(bounds)
    for bound in sorted(bounds):
        if bound * growing > rest:
            return rest // growing
        rest, growing = rest - bound, growing - 1
    return sys.maxsize


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which layers share a block table.

    Attributes:
        windows: tokens that layers of each group see at most, or ``None`` for all.
        places: of each layer its group, and its place in the group's blocks.
        obstacle: why there is one group where several would take less; or empty.
    """

    windows: tuple[int | None, ...]
    places: tuple[tuple[int, int], ...]
    obstacle: str = ""

    @classmethod
    def single(cls, windows: Sequence[int | None], obstacle: str = "") -> LayerGroups:
        """All layers in one group, which sees as much as any of them."""
        sizes = [window for window in windows if window is not None]
        widest = max(sizes) if len(sizes) == len(windows) else None
        return cls((widest,), tuple((0, layer) for layer in range(len(windows))), obstacle)

    @property
    def depth(self) -> int:
        """Layers of a block."""
        return 1 + max(place for _, place in self.places)

    def slot_bytes(self, bytes_per_token: int) -> int:
        """What a block has for each token, of the bytes that all layers take for one."""
        return -(-bytes_per_token * self.depth // len(self.places))

    def blocks(self, num_tokens: int, block_size: int, chunk: int = 1) -> int:
        """Most blocks that a sequence of so many tokens holds, which come ``chunk`` at a time."""
        filled = -(-num_tokens // block_size)
        return sum(min(filled, most_held(w, chunk, block_size)) for w in self.windows)

    def longest(self, num_blocks: int, block_size: int, chunk: int) -> int:
        """Tokens of the longest sequence that fits so many blocks, ``chunk`` tokens at a time."""
        bounds = [most_held(window, chunk, block_size) for window in self.windows]
        return longest_table(bounds, num_blocks) * block_size

    def first_of_place(self) -> list[int]:
        """For each place in a block the first layer that has it."""
        layers = {place: layer for layer, (_, place) in reversed(list(enumerate(self.places)))}
        return [layers[place] for place in range(self.depth)]


def group_layers(windows: Sequence[int | None], block_size: int, longest: int) -> LayerGroups:
    """Groups with which a sequence of ``longest`` tokens takes the least memory.

    Args:
        windows: of each layer, in tokens, itself the last; ``None`` for all.

    Returns:
        One group, unless several take less by :data:`LEAST_SAVED`.
    """

    def taken(groups: LayerGroups) -> int:
        return groups.depth * groups.blocks(longest, block_size)

    single = LayerGroups.single(windows)
    cuts = (_cut(windows, depth) for depth in range(1, len(windows)))
    found = [groups for groups in cuts if len(groups.windows) <= MAX_GROUPS]
    best = min(found, key=lambda g: (taken(g), len(g.windows)), default=single)
    return best if taken(best) <= (1 - LEAST_SAVED) * taken(single) else single


def choose_groups(
    windows: Sequence[int | None],
    schemes: LayerSchemes,
    block_size: int,
    longest: int,
    *,
    evicts: bool,
) -> LayerGroups:
    """:func:`group_layers`, but one group where layers cannot have blocks of their own."""
    found = group_layers(windows, block_size, longest)
    if len(found.windows) == 1:
        return found
    if evicts:
        return LayerGroups.single(windows, "eviction drops the same tokens from all layers")
    if len(set(schemes.layers)) > 1:
        return LayerGroups.single(windows, "layers keep keys and values in different forms")
    return found


def _cut(windows: Sequence[int | None], depth: int) -> LayerGroups:
    """Layers of each window, in order, cut into groups of ``depth``; first those that see most."""
    places: dict[int, tuple[int, int]] = {}
    groups: list[int | None] = []
    for window in sorted(set(windows), key=lambda size: -(size or sys.maxsize)):
        layers = [layer for layer, own in enumerate(windows) if own == window]
        for number, layer in enumerate(layers):
            places[layer] = len(groups) + number // depth, number % depth
        groups += [window] * -(-len(layers) // depth)
    return LayerGroups(tuple(groups), tuple(places[layer] for layer in range(len(windows))))
