"""Answers from likelihoods: which counts, how sure the share is, where a continuation starts."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.errors import CalibrationError, UsageError
from qtool.runtime.tasks import (
    Continuation,
    Likelihood,
    Question,
    Task,
    continuations,
    encode_pair,
    judge,
    standard_error,
)
from qtool.runtime.tokenizer import Tokenizer
from support.models import TRAINING_TEXT, make_tokenizer

PLAIN, WITH_BOS = Tokenizer(make_tokenizer()), Tokenizer(make_tokenizer(add_bos=True))


def _choice_task(*choices: str, answer: int = 0, count: int = 1) -> Task:
    questions = [Question("It is", choices, answer, f"line {i + 1}") for i in range(count)]
    return Task("choice", tuple(questions), "0" * 64)


def _cloze_task(count: int) -> Task:
    questions = [Question("It is", ("red",), 0, f"line {i + 1}") for i in range(count)]
    return Task("cloze", tuple(questions), "0" * 64)


def _of(*logprobs: float) -> list[Likelihood]:
    return [Likelihood(value, greedy=False) for value in logprobs]


def test_the_likeliest_choice_is_the_answer_and_the_first_of_equals_counts() -> None:
    task = _choice_task("red", "blue", answer=1, count=3)
    result = judge(task, _of(-2, -1, -1, -2, -1, -1))
    assert result.answers == (1, 0, 0)
    assert result.right == (True, False, False)
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.mean_logprob == pytest.approx(-4 / 3)
    assert result.perplexity is None


def test_normalized_answers_divide_by_bytes_and_not_by_characters() -> None:
    # 9 and 3 bytes: by character (3 each) the second would win with -5/3 against -6/3.
    task = _choice_task("一二三", "abc")
    result = judge(task, _of(-6, -5))
    assert (result.accuracy, result.acc_norm) == (0, 1)


def test_the_space_before_a_choice_is_not_part_of_its_length() -> None:
    # By length with the space -4/2 = -2 loses to -5.7/3 = -1.9; without it -4 loses to -2.85.
    assert judge(_choice_task("a", "bc", answer=1), _of(-4, -5.7)).acc_norm == 1
    # With the space -3.6/2 = -1.8 would beat -5.7/3; without it -3.6 loses.
    assert judge(_choice_task("a", "bc", answer=1), _of(-3.6, -5.7)).acc_norm == 1


def test_a_cloze_question_is_right_where_greedy_decoding_writes_its_target() -> None:
    result = judge(_cloze_task(4), [Likelihood(-1.0, True), *_of(-2.0, -3.0), Likelihood(-4, True)])
    assert result.right == (True, False, False, True)
    assert (result.accuracy, result.acc_norm) == (0.5, None)
    assert result.perplexity == pytest.approx(math.exp(2.5))


@given(st.lists(st.booleans(), min_size=2, max_size=60))
def test_the_standard_error_is_that_of_a_mean(right: list[bool]) -> None:
    values = [float(value) for value in right]
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert standard_error(statistics.mean(values), len(values)) == pytest.approx(expected)


def test_one_question_has_no_standard_error() -> None:
    assert standard_error(1.0, 1) is None
    assert judge(_cloze_task(1), _of(-1)).to_dict()["accuracy_stderr"] is None


def test_models_agree_where_they_give_the_same_answer_also_a_wrong_one() -> None:
    task = _choice_task("a", "b", "c", count=4)
    mine = judge(task, _of(-1, -2, -3, -3, -1, -2, -3, -2, -1, -2, -1, -3))
    theirs = judge(task, _of(-1, -2, -3, -3, -1, -2, -3, -1, -2, -1, -2, -3))
    assert (mine.answers, theirs.answers) == ((0, 1, 2, 1), (0, 1, 1, 0))
    assert mine.agreement(theirs) == theirs.agreement(mine) == 0.5


def test_a_task_is_cut_to_its_first_questions() -> None:
    task = _cloze_task(5)
    assert task.first(2).questions == task.questions[:2]
    assert task.first(None).questions == task.first(9).questions == task.questions
    with pytest.raises(UsageError, match="limit=0"):
        task.first(0)


class TestPairs:
    @pytest.mark.parametrize("tokenizer", [PLAIN, WITH_BOS], ids=["plain", "bos"])
    @given(st.data())
    def test_both_texts_are_tokenized_as_one(
        self, tokenizer: Tokenizer, data: st.DataObject
    ) -> None:
        text = data.draw(st.sampled_from(TRAINING_TEXT))
        cut = data.draw(st.integers(1, len(text) - 1))
        pair = encode_pair(tokenizer, text[:cut], text[cut:])
        before, scored = pair.token_ids[: pair.start], pair.token_ids[pair.start :]
        ids = tokenizer.encode(text)
        # Where the first token holds both, nothing of the text stands before it.
        assert list(pair.token_ids) in (ids, [0, *ids])
        assert before and scored
        assert text[:cut].startswith(tokenizer.decode(before).rstrip("\ufffd"))

    def test_exactly_one_bos_comes_first(self) -> None:
        for context in ("The fox", "<s>The fox", ""):
            pair = encode_pair(WITH_BOS, context, " jumps")
            assert pair.token_ids[0] == WITH_BOS.bos_token_id
            assert pair.token_ids.count(0) == 1

    def test_spaces_before_the_continuation_are_scored_with_it(self) -> None:
        joined = encode_pair(PLAIN, "The quick", " brown")
        assert encode_pair(PLAIN, "The quick ", "brown") == joined
        assert PLAIN.decode(joined.token_ids[joined.start :]) == " brown"

    def test_an_empty_context_is_the_token_a_text_begins_with(self) -> None:
        pair = encode_pair(PLAIN, "", "The fox")
        expected = (PLAIN.bos_token_id, *PLAIN.encode("The fox"))
        assert (pair.token_ids, pair.start) == (expected, 1)

    def test_without_bos_the_end_of_sequence_stands_for_it(self) -> None:
        tokenizer = make_tokenizer()
        tokenizer.bos_token = None
        assert encode_pair(Tokenizer(tokenizer), "", "x").token_ids[0] == 1
        tokenizer.eos_token = None
        with pytest.raises(UsageError, match="neither BOS nor EOS"):
            encode_pair(Tokenizer(tokenizer), "", "x")

    def test_shortening_keeps_the_end_and_a_token_to_predict_from(self) -> None:
        pair = Continuation((1, 2, 3, 4, 5), 3)
        assert pair.last(9) == pair.last(5) == pair
        assert pair.last(3) == Continuation((3, 4, 5), 1)
        assert pair.last(2) == Continuation((4, 5), 1)


def test_choices_are_asked_for_in_order_after_the_delimiter() -> None:
    first = Question("The", ("quick", "lazy"), 0, "line 1")
    second = Question("你好，", ("世界", "读取"), 0, "line 2", delimiter="")
    asked = continuations(Task("t", (first, second), ""), PLAIN, 255)
    texts = [PLAIN.decode(pair.token_ids) for pair in asked]
    assert texts == ["The quick", "The lazy", "你好，世界", "你好，读取"]


def test_a_question_too_long_for_the_model_is_named_and_not_cut() -> None:
    task = _choice_task("red", "blue " * 50)
    with pytest.raises(CalibrationError, match="line 1: has .* tokens .* can score 20; shorten"):
        continuations(task, PLAIN, 20)
