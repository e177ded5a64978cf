"""One BOS everywhere, every end of sequence, bytes of every token, errors that help."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qtool.errors import CheckpointError, RequestError
from qtool.runtime.sampling_params import SamplingParams
from qtool.runtime.tokenizer import Tokenizer
from support.models import make_tokenizer
from support.text import make_byte_fallback_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
BOS, EOS, IM_END = 0, 1, 3


def _byte_level(add_bos: bool = False, template: str | None = None) -> Tokenizer:
    tokenizer = make_tokenizer(add_bos=add_bos)
    if template is not None:
        tokenizer.chat_template = template
    return Tokenizer(tokenizer)


def _byte_fallback() -> Tokenizer:
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=make_byte_fallback_tokenizer(),
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
        )
    )


BYTE_LEVEL, BYTE_FALLBACK = _byte_level(), _byte_fallback()


def _folder(path: Path, **files: Any) -> Path:
    """A model folder with a tokenizer and these JSON files, named without their ending."""
    make_tokenizer(add_bos=True).save_pretrained(path)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("make", [lambda: _byte_level(add_bos=True), _byte_fallback])
def test_a_text_that_begins_with_bos_gets_no_second_one(make: Any) -> None:
    tokenizer = make()
    bos = tokenizer.bos_token_id
    for text in ("hello", "<s>hello", "", "<s>"):
        ids = tokenizer.encode(text)
        assert ids[0] == bos and ids.count(bos) == 1, (text, ids)
    assert tokenizer.encode("hello", add_special_tokens=False).count(bos) == 0
    assert tokenizer.encode("<s>hello", add_special_tokens=False).count(bos) == 1


def test_a_chat_has_the_bos_of_its_template_only() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = _byte_level(add_bos=True, template=template)
    assert tokenizer.render_chat(HELLO) == tokenizer.encode("hello")
    plain = _byte_level(add_bos=True, template="{{ messages[0].content }}")
    assert BOS not in plain.render_chat(HELLO)


def test_a_chat_ends_with_the_prompt_for_an_answer_or_with_what_is_to_be_continued() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "I am"}]

    def text(**settings: Any) -> str:
        ids = BYTE_LEVEL.render_chat(chat, **settings)
        return BYTE_LEVEL.decode(ids, skip_special_tokens=False)

    closed = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI am<|im_end|>\n"
    assert text() == closed + "<|im_start|>assistant\n"
    assert text(add_generation_prompt=False) == closed
    continued = text(add_generation_prompt=False, continue_final_message=True)
    assert continued == closed.removesuffix("<|im_end|>\n")
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        text(continue_final_message=True)


def test_a_template_of_the_caller_and_its_variables_are_used() -> None:
    template = "{{ messages[0].content }}{{ mood }}"
    ids = BYTE_LEVEL.render_chat(HELLO, chat_template=template, template_kwargs={"mood": "!"})
    assert BYTE_LEVEL.decode(ids) == "hello!"
    assert not BYTE_FALLBACK.has_chat_template
    ids = BYTE_FALLBACK.render_chat(HELLO, chat_template=template, template_kwargs={"mood": "?"})
    assert BYTE_FALLBACK.decode(ids) == "hello?"


def test_without_a_template_the_error_says_how_to_go_on() -> None:
    with pytest.raises(RequestError, match=r"/v1/completions.*chat_template") as caught:
        BYTE_FALLBACK.render_chat(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + missing }}", "missing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{% for m in messages %}", "endfor"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.clear() }}", "messages"),
    ],
)
def test_what_a_template_raises_reaches_the_client(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BYTE_LEVEL.render_chat(HELLO, chat_template=template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([*HELLO, {"role": "user"}], r"messages\[1\] has no content"),
    ],
)
def test_messages_without_content_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BYTE_LEVEL.render_chat(messages)


def test_a_call_of_a_tool_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    template = "{% for m in messages %}{{ m.content or 'call' }}{% endfor %}"
    ids = BYTE_LEVEL.render_chat([*HELLO, call], chat_template=template)
    assert BYTE_LEVEL.decode(ids) == "hellocall"


def test_half_a_surrogate_pair_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"character 2 .*U\+D83D"):
        BYTE_LEVEL.encode("ab\ud83d")
    with pytest.raises(RequestError, match="U\\+D83D"):
        BYTE_LEVEL.render_chat([{"role": "user", "content": "\ud83d"}])


@given(st.text())
@example("naïve 文字 🙂 e\u0301\n\t  x")
@example("▁<0x41>")
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
    ids = BYTE_FALLBACK.encode(text, add_special_tokens=False)
    spaced = f" {text.replace('▁', ' ')}" if text else ""
    assert b"".join(map(BYTE_FALLBACK.token_bytes, ids)) == spaced.encode()


def test_a_token_has_a_text_even_if_its_bytes_are_no_character() -> None:
    first, *_ = BYTE_LEVEL.encode("ż")
    assert BYTE_LEVEL.token_bytes(first) == b"\xc5"
    assert BYTE_LEVEL.token_text(first) == "\ufffd"
    newline = BYTE_FALLBACK.encode("\n", add_special_tokens=False)[-1]
    assert (BYTE_FALLBACK.token_bytes(newline), BYTE_FALLBACK.token_text(newline)) == (b"\n", "\n")
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.encode("x fox")[1]) == " fox"
    assert BYTE_LEVEL.token_text(IM_END) == "<|im_end|>"


def test_ids_that_only_pad_the_vocabulary_have_no_text() -> None:
    beyond = BYTE_LEVEL.vocab_size + 5
    assert (BYTE_LEVEL.token_bytes(beyond), BYTE_LEVEL.token_text(beyond)) == (b"", "")
    assert BYTE_LEVEL.decode([beyond, *BYTE_LEVEL.encode("a")]) == "a"


def test_special_tokens_are_left_out_of_the_text_unless_wanted() -> None:
    ids = [BOS, *BYTE_LEVEL.encode("hi ."), EOS]
    assert BYTE_LEVEL.decode(ids) == "hi ."
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<s>hi .</s>"


def test_bad_words_are_spelled_with_and_without_a_space_before_them() -> None:
    words = BYTE_LEVEL.bad_words_ids(["fox", " fox", "🙂"])
    assert [BYTE_LEVEL.decode(ids) for ids in words] == ["fox", " fox", "🙂", " 🙂"]
    assert BYTE_LEVEL.bad_words_ids([]) == []


def test_ends_of_sequence_are_those_of_all_files(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path,
        generation_config={"eos_token_id": [IM_END, 7]},
        config={"eos_token_id": 8, "text_config": {"eos_token_id": [9]}},
    )
    assert Tokenizer.load(folder).eos_token_ids == {EOS, IM_END, 7, 8, 9}


def test_a_folder_with_nothing_but_a_tokenizer_is_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_folder(tmp_path / "名前 with.dots"))
    assert tokenizer.eos_token_ids == {EOS}
    assert tokenizer.default_sampling == {}
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"
    assert tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, "temperature top_p top_k"),
        ({"do_sample": True, "min_p": 0.1, "max_new_tokens": 99}, "min_p max_tokens"),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temperature": None, "pad_token_id": 0}, ""),
    ],
)
def test_sampling_defaults_are_those_that_mean_something(
    generation: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    defaults = Tokenizer.load(_folder(tmp_path, generation_config=generation)).default_sampling
    assert list(defaults) == expected.split()
    assert set(defaults.values()) <= set(generation.values())
    SamplingParams(**defaults)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"top_p": 7}}, r"generation_config\.json: top_p=7"),
        ({"generation_config": {"temperature": "hot"}}, "generation_config"),
        ({"generation_config": "{"}, r"generation_config\.json: is no JSON"),
        ({"config": "[]"}, r"config\.json: holds no JSON object"),
        ({"config": "[" * 100_000}, r"config\.json: is no JSON"),
        ({"tokenizer": "{}"}, "tokenizer cannot be loaded"),
    ],
)
def test_damaged_files_are_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(_folder(tmp_path, **files))


def test_a_missing_tokenizer_is_an_error_that_says_what_to_copy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        Tokenizer.load(tmp_path / "missing")


def test_threads_may_share_a_tokenizer_whose_file_asks_for_truncation() -> None:
    wrapped = make_tokenizer()
    wrapped.backend_tokenizer.enable_truncation(4)
    wrapped.backend_tokenizer.enable_padding()
    tokenizer, text = Tokenizer(wrapped), "The quick brown fox 文字 " * 50
    # Clearing it later would raise "Already borrowed" while another thread encodes.
    assert wrapped.backend_tokenizer.truncation is wrapped.backend_tokenizer.padding is None

    def round_trip(_: int) -> str:
        return tokenizer.decode(tokenizer.encode(text))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(round_trip, range(200))) == {text}


def test_a_tokenizer_with_a_decoding_of_its_own_keeps_it() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    plain = make_tokenizer()
    ids = Tokenizer(plain).encode("the fox")
    own = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert (Tokenizer(plain).decode(ids), Tokenizer(own).decode(ids)) == ("the fox", "THE FOX")
