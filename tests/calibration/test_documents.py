"""Conversations become texts through the model's own template, with one BOS."""

from __future__ import annotations

import pytest

from qtool.calibration.data import evaluation_windows, token_blocks
from qtool.calibration.documents import Conversations, Text
from qtool.errors import CalibrationError
from support.models import make_tokenizer

CHATS = Conversations(
    "chats.jsonl:messages",
    tuple(
        (
            f"line {number}",
            (
                {"role": "user", "content": f"Say {number}."},
                {"role": "assistant", "content": f"{number}!"},
            ),
        )
        for number in range(1, 9)
    ),
)


def test_a_conversation_is_the_template_of_its_messages() -> None:
    text = CHATS.render(make_tokenizer())
    assert text.name == CHATS.name and text.chat_template
    assert text.documents[1] == (
        "<|im_start|>user\nSay 2.<|im_end|>\n<|im_start|>assistant\n2!<|im_end|>\n"
    )


def test_marks_of_the_template_are_the_models_own_tokens() -> None:
    tokenizer = make_tokenizer()
    ids = token_blocks(CHATS.render(tokenizer), tokenizer, 16, 4, seed=0)
    mark = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert (ids == mark).sum() > 4


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_bos_of_the_template_is_not_doubled(add_bos: bool) -> None:
    tokenizer = make_tokenizer(add_bos=add_bos)
    tokenizer.chat_template = "<s>" + tokenizer.chat_template
    text = CHATS.render(tokenizer)
    bos = tokenizer.bos_token_id
    for ids in (
        token_blocks(text, tokenizer, 16, 4, 0),
        evaluation_windows(text, tokenizer, 16, 4),
    ):
        assert ((ids == bos).sum(1) <= 1).all()
    assert (evaluation_windows(text, tokenizer, 16, 1)[0, 0] == bos).all()


def test_a_model_without_a_template_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(
        CalibrationError, match=r"chats\.jsonl:messages holds conversations.*chat m"
    ):
        CHATS.render(tokenizer)


def test_a_template_that_raises_names_the_conversation() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if '3' in m['content'] %}"
        "{{ raise_exception('no threes') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(CalibrationError, match=r"line 3: the chat template refuses.*no threes"):
        CHATS.render(tokenizer)


def test_a_text_is_the_same_for_every_model() -> None:
    text = Text("a", ("b",))
    assert text.render(make_tokenizer()) is text
