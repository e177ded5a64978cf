"""What splits over devices, against sizes worked out by hand."""

from __future__ import annotations

from qtool.formats.scheme import WeightScheme
from qtool.formats.tensor_parallel import obstacles

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2}
O_PROJ, UP, DOWN = (
    f"model.layers.0.{n}" for n in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
)


SHAPES = {O_PROJ: (512, 512), UP: (768, 512), DOWN: (512, 768)}


def _found(scheme: WeightScheme, size: int) -> list[str]:
    return obstacles(SHAPES, CONFIG, dict.fromkeys((O_PROJ, UP, DOWN), scheme), size)


def test_groups_must_stay_whole_on_every_device() -> None:
    group = WeightScheme(4, False, "group", 128)
    assert _found(group, 1) == _found(group, 2) == []
    (problem,) = _found(group, 4)  # 768 / 4 = 192 is one group and a half; 512 / 4 = 128 is one
    assert problem.startswith(f"{DOWN}: 192 inputs a device")
    assert [line.split(":")[0] for line in _found(group, 8)] == [O_PROJ, DOWN]


def test_one_scale_a_row_serves_every_part_of_the_row() -> None:
    assert _found(WeightScheme(8, True, "channel", None), 8) == []


def test_heads_are_split_or_copied() -> None:
    row = {UP: WeightScheme(8, True, "channel", None)}
    three = {"num_attention_heads": 9, "num_key_value_heads": 3}
    assert obstacles(SHAPES, three, row, 1) == []
    assert len(obstacles(SHAPES, three, row, 2)) == 2
    assert obstacles(SHAPES, CONFIG, row, 4) == [], "two key-value heads, each on two devices"
