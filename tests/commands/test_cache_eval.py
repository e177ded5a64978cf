"""``qtool eval --kv-cache``: forms of the cache in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qtool.cli import main


def _eval(model: Path, *arguments: str) -> Result:
    sizes = ("--windows", "2", "--seq-len", "150", "--device", "cpu")
    return CliRunner().invoke(main, ["eval", str(model), *sizes, *arguments])


def test_the_json_has_every_form_after_the_compute_dtypes(tiny_model_folder: Path) -> None:
    result = _eval(tiny_model_folder, "--kv-cache", "int4,fp8", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    *notes, facts = map(json.loads, result.stdout.splitlines())
    caches = facts["caches"]
    assert [row["name"] for row in caches] == ["wide", "int4", "fp8"]
    assert caches[0]["kl"] == 0.0 < caches[1]["kl"] and caches[1]["tail_bytes"] > 0
    assert [part["start"] for part in caches[2]["by_position"]] == [0, 128]
    assert facts["windows"] == 2 and facts["dtype"] == "float32"
    assert any("not calibrated" in str(note) for note in notes)


def test_the_table_names_forms_bytes_and_positions(tiny_model_folder: Path) -> None:
    result = _eval(tiny_model_folder, "--kv-cache", "wide,int8")
    assert result.exit_code == 0, result.output
    for text in ("bytes", "int8", "9.00", "0-127", "128-148"):
        assert text in result.stdout, text


def test_eviction_alone_is_compared_with_none_and_needles_have_every_cell(
    tiny_model_folder: Path,
) -> None:
    arguments = ["--kv-eviction", "heavy-hitter", "--kv-budget", "100", "--json", "--quiet"]
    arguments += ["--needle-lengths", "200,240", "--needle-depths", "2", "--needle-texts", "1"]
    result = _eval(tiny_model_folder, *arguments)
    assert result.exit_code == 0, result.output
    plain, evicting = json.loads(result.stdout.splitlines()[-1])["caches"]
    assert (plain["name"], evicting["name"]) == ("wide", "wide, 96 kept")
    assert (plain["kept"], evicting["kept"]) == (None, 96)
    assert plain["kl"] == 0.0 < evicting["kl"]
    for row in (plain, evicting):
        cells = [(cell["length"], cell["depth"]) for cell in row["needles"]]
        assert cells == [(200, 0.0), (200, 1.0), (240, 0.0), (240, 1.0)]
    # Of a model with random weights nothing is found; but what it sees differs.
    assert plain["needles"][0]["nll"] != evicting["needles"][0]["nll"]


def test_the_needles_table_has_forms_lengths_and_depths(tiny_model_folder: Path) -> None:
    sizes = ("--needle-lengths", "230", "--needle-depths", "3", "--needle-texts", "1")
    result = _eval(tiny_model_folder, "--kv-cache", "int8", *sizes)
    assert result.exit_code == 0, result.output
    for text in ("facts found by depth", "0%", "50%", "100%", "230"):
        assert text in result.stdout, text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-cache", "int3"), "use one of plan, wide, fp8, int8, k8v4, int4"),
        (("--kv-cache", "plan,int8"), "--kv-cache plan: the checkpoint declares none"),
        (("--kv-cache", "int8", "--needle-lengths", "1k"), "'1k' is no number of tokens"),
        (("--kv-cache", "int8", "--needle-depths", "0"), "needle_depths=0: must be 1 to 20"),
        (("--needle-lengths", "512"), "--needle-lengths has no meaning with perplexity"),
        (("--kv-eviction", "heavy-hitter"), "needs kv_budget"),
        (("--kv-cache", "int8", "--kv-cache-dtype", "int4"), "--kv-cache-dtype has no meaning"),
        (("--kv-cache", "int8", "--reference", "m"), "--reference has no meaning with --kv-cache"),
        (("--kv-cache", "int8", "--limit", "3"), "--limit has no meaning with --kv-cache"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tiny_model_folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _eval(tiny_model_folder, *arguments)
    assert result.exit_code == 2 and message in result.output
