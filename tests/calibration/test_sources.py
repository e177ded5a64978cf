"""The grammar of a SOURCE."""

from __future__ import annotations

from pathlib import Path

import pytest

from qtool.calibration.sources import HubDataset, Source, parse_mix, parse_source
from qtool.errors import CalibrationError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("builtin", Source("builtin")),
        ("self", Source("self")),
        ("a.txt", Source(Path("a.txt"))),
        ("a.jsonl:body", Source(Path("a.jsonl"), "body")),
        ("a.jsonl:", Source(Path("a.jsonl"))),
        ("中文 dir/a b.jsonl:my text", Source(Path("中文 dir/a b.jsonl"), "my text")),
        ("org/name", Source(HubDataset("org/name", None, "train"))),
        ("org/name:body", Source(HubDataset("org/name", None, "train"), "body")),
        ("org/na.me/v-1.0@test:body", Source(HubDataset("org/na.me", "v-1.0", "test"), "body")),
        ("org/name@test", Source(HubDataset("org/name", None, "test"))),
    ],
)
def test_every_form_says_where_the_text_lies(spec: str, source: Source, here: Path) -> None:
    (here / "中文 dir").mkdir()
    for name in ("a.txt", "a.jsonl", "中文 dir/a b.jsonl"):
        (here / name).touch()
    assert parse_source(spec) == source


def test_what_lies_on_disk_wins_over_every_other_meaning(here: Path) -> None:
    (here / "org").mkdir()
    for name in ("org/name", "a:b", "c=3"):
        (here / name).touch()
        assert parse_mix([name]) == (Source(Path(name)),)
    assert parse_mix(["a:b=2"]) == (Source(Path("a:b"), None, 2.0),)


def test_weights_follow_each_source(here: Path) -> None:
    (here / "a.csv").touch()
    mix = parse_mix(["builtin=2", "a.csv:text=0.5", "org/name@test=1e1", "self"])
    assert [source.weight for source in mix] == [2.0, 0.5, 10.0, 1.0]
    assert mix[1].column == "text"


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([""], "an empty name does not exist; a text source is 'builtin'"),
        (["nowhere"], "nowhere does not exist"),
        (["nowhere.txt"], "nowhere.txt does not exist"),
        # A file's ending: the hub is not asked for a mistyped path.
        (["data/nowhere.jsonl:text"], "data/nowhere.jsonl does not exist"),
        (["/a/b/c"], "/a/b/c does not exist"),
        (["a/b/c/d"], "does not exist"),
        (["builtin:text"], "builtin has no columns"),
        (["builtin=0"], "builtin=0: the weight must be a positive number"),
        (["builtin=-1"], "positive"),
        (["builtin=nan"], "positive"),
        (["builtin=inf"], "positive"),
        (["builtin=much"], "builtin=much does not exist"),
        (["=1"], "an empty name does not exist"),
        ([], "no text source is given"),
        (["builtin", "self", "builtin=3"], "builtin=3 comes twice"),
    ],
)
def test_what_is_no_source_is_refused(specs: list[str], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        parse_mix(specs)
