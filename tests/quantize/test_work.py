"""A work folder holds whole blocks of one run, and notices what is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qtool.calibration.walk import WalkState
from qtool.errors import CheckpointError, UsageError
from qtool.quantize.work import WorkFolder

FINGERPRINT = {"source": "abc", "--method": "awq", "--ignore": ("head",)}


def _fill(out: Path, blocks: int) -> None:
    with WorkFolder(out, FINGERPRINT) as work:
        for index in range(len(work.blocks), blocks):
            tensors = {f"{index}.w": torch.full((3,), float(index)), f"{index}.n": torch.ones(2)}
            state = WalkState(index + 1, torch.full((2, 2), float(index)), torch.ones(1, 2))
            work.commit(tensors, {"records": [{"name": str(index)}]}, state)


def _files(out: Path) -> set[str]:
    return {path.name for path in out.with_name("q.work").iterdir()}


def test_committed_blocks_and_the_last_state_come_back(tmp_path: Path) -> None:
    _fill(tmp_path / "q", 3)
    assert len(_files(tmp_path / "q")) == 8  # run.json, three blocks of two files, one state
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        assert [block.facts["records"][0]["name"] for block in work.blocks] == ["0", "1", "2"]
        tensors = {n: s.read() for b in work.blocks for n, s in b.sources().items()}
        assert work.state is not None and work.state.index == 3
        assert torch.equal(work.state.hidden, torch.full((2, 2), 2.0))
        assert torch.equal(work.state.held_out, torch.ones(1, 2))
    assert torch.equal(tensors["1.w"], torch.full((3,), 1.0)) and len(tensors) == 6
    assert work.notes == []


def test_a_folder_without_a_block_is_removed(tmp_path: Path) -> None:
    _fill(tmp_path / "q", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "blocks", "note"),
    [
        ("block-00002.json", 0, "state-00002.safetensors is damaged or gone"),
        ("block-00001.safetensors", 0, "block-00001.safetensors is damaged"),
        ("state-00003.safetensors", 0, "state-00003.safetensors is damaged or gone"),
        ("run.json", 0, "run.json is damaged or gone"),
    ],
)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_damage_costs_blocks_and_never_gives_wrong_ones(
    name: str, blocks: int, note: str, damage: str, tmp_path: Path
) -> None:
    _fill(tmp_path / "q", 3)
    path = tmp_path / "q.work" / name
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-3])
    elif damage == "flipped":
        data[-2] ^= 4
        path.write_bytes(data)
    else:
        path.unlink()
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        assert len(work.blocks) == blocks and work.state is None
        assert note in " ".join(work.notes)
        assert {path.name for path in work.folder.iterdir()} <= {"run.json"}


def test_without_a_state_a_damaged_block_keeps_those_before_it(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        for index in range(3):
            work.commit({f"{index}": torch.ones(2)}, {}, None)
    (tmp_path / "q.work" / "block-00001.safetensors").write_bytes(b"")
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        assert len(work.blocks) == 1
        assert _files(tmp_path / "q") == {"run.json", "block-00000.json", "block-00000.safetensors"}


def test_another_run_is_refused_by_what_differs_and_restart_discards_it(tmp_path: Path) -> None:
    _fill(tmp_path / "q", 2)
    other = {**FINGERPRINT, "--method": "rtn"}
    with pytest.raises(UsageError, match=r"--method: awq there, rtn now.*--restart"):
        WorkFolder(tmp_path / "q", other)
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        assert len(work.blocks) == 2, "a refusal changes nothing"
    with WorkFolder(tmp_path / "q", other, restart=True) as work:
        assert work.blocks == [] and _files(tmp_path / "q") == {"run.json"}


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "q.work").mkdir()
    (tmp_path / "q.work" / "thesis.tex").write_text("x")
    for restart in (False, True):
        with pytest.raises(CheckpointError, match=r"holds thesis\.tex"):
            WorkFolder(tmp_path / "q", FINGERPRINT, restart=restart)
    assert (tmp_path / "q.work" / "thesis.tex").read_text() == "x"


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    with (
        WorkFolder(tmp_path / "q", FINGERPRINT) as work,
        pytest.raises(CheckpointError, match="in use by another qtool"),
    ):
        work.commit({"w": torch.ones(1)}, {}, None)
        WorkFolder(tmp_path / "q", FINGERPRINT)
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        assert len(work.blocks) == 1


def test_figures_come_back_exactly(tmp_path: Path) -> None:
    facts = {"records": [{"error": 0.1 + 0.2, "tiny": 5e-324, "name": "ü"}]}
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        work.commit({"w": torch.ones(1)}, facts, None)
    with WorkFolder(tmp_path / "q", FINGERPRINT) as work:
        assert work.blocks[0].facts == facts == json.loads(json.dumps(facts))
