"""What is written is held against the rules of other loaders before anybody sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.errors import CheckpointError
from qtool.quantize.verify import verify_loads
from support.drafts import make_draft


def test_a_fault_is_named_with_whom_it_stops(tmp_path: Path) -> None:
    draft = make_draft("gptq")
    draft.block["desc_act"] = True
    with pytest.raises(CheckpointError, match=r"vllm: config.json.*desc_act true"):
        verify_loads(draft.write(tmp_path))


def test_a_format_that_another_engine_does_not_run_may_be_chosen(tmp_path: Path) -> None:
    draft = make_draft("gptq")
    draft.block.update(sym=False, checkpoint_format="gptq_v2")
    verify_loads(draft.write(tmp_path))


def test_what_qtool_itself_does_not_run_is_not_published(tmp_path: Path) -> None:
    draft = make_draft("pack-quantized")
    draft.weights["num_bits"] = 16
    with pytest.raises(CheckpointError, match="qtool runs weights of 4 and 8 bits"):
        verify_loads(draft.write(tmp_path))
