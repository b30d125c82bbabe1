"""Is this text an answer?"""

import pytest

from agent.core.smoke import check_answer, contains, degenerate
from agent.core.spec import SmokePrompt

SUM = SmokePrompt(ask="What is 7 * 13?", expect="91")

SOUND = [
    "91",
    "4",
    "Yes.",
    "7 \u00d7 13 = 91.",
    "The answer is **91**.",
    "1000000000000",
    "0.3333333333333333",
    "0.142857142857142857142857142857142857",
    "3.14159265358979323846264338327950288",
    "-----\n# Title\n-----\nText under a rule.",
    "Hmmmmm, let me think about that: it is 91!!!",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
    "[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]",
    "- eggs\n- milk\n- bread\n- yes\n- yes\n- no",
    "| a | b |\n|---|---|\n| 0 | 0 |\n| 0 | 0 |\n| 0 | 0 |\n| 0 | 0 |",
    "| Name | Value |\n|--------------------|--------------------|\n| x | 1 |",
    "def f(x):\n    if x:\n        return {\n            'a': [1, 2],\n        }\n    return None\n",
    "for (int i = 0; i < n; i++) { a[i] = 0; b[i] = 0; c[i] = 0; }",
    "# ==============================================================\n# Setup\nx = 1",
    "7 x 1 = 7\n7 x 2 = 14\n7 x 3 = 21\n7 x 4 = 28\n7 x 5 = 35\n7 x 6 = 42\n7 x 7 = 49\n7 x 8 = 56\n7 x 9 = 63",
    "七乘以十三等于九十一。",
    "答えは91です。計算は 7 \u00d7 13 = 91 となります。",
    "저는 잘 지냅니다. 감사합니다.",
    "السلام عليكم ورحمة الله",
    "哈哈哈,很好。",
    "Row, row, row your boat, gently down the stream. Merrily, merrily, merrily, merrily, life is but a dream.",
    "👍",
    "<think>\nSeven times ten is 70, seven times three is 21.\n</think>\n91",
]

NONSENSE = [
    ("", "empty"),
    (" \n\t ", "empty"),
    ("!!!!!!!", "'!' makes 7 of 7"),
    ("! ! ! ! ! ! !", "'!' makes"),
    ("!!!!!!!!!!!!!!!!!!?", "'!' makes"),
    ("....", "'.' makes"),
    ("aaaaaaaaaaaa", "'a' makes"),
    ("0" * 40, "'0' makes"),
    ("的的的的的的的的的的", "'的' makes"),
    ("The answer is" + "!" * 60, "'!' makes 60"),
    ("The answer is of course to be found in any book on arithmetic, so here" + "!" * 60, "at the end"),
    ("the " * 30, "'the' is repeated 30 times"),
    (
        "The sum is the sum is the sum is the sum is the sum is the sum is the sum is the sum is the sum is",
        "repeated",
    ),
    ("你好" * 20, "repeated"),
    ("Well, I am not sure. " + "I do not know. " * 12 + "I do", "repeated"),
    ("I think that the\n" * 20, "repeated"),
    ("\ufffd\ufffd\ufffd\ufffd", "control or replacement"),
    ("\x00\x01\x02 ok \x03\x04", "control or replacement"),
    ("a\ufffdb\ufffdc\ufffd", "control or replacement"),
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_text_is_not_called_degenerate(text):
    assert degenerate(text) == ""


@pytest.mark.parametrize(("text", "said"), NONSENSE)
def test_P8_degenerate_text_is_found_and_named(text, said):
    assert said in degenerate(text)


def test_a_long_text_is_looked_at_in_bounded_time_and_its_loop_found():
    assert "repeated" in degenerate("Once upon a time. " + "and then the end " * 20_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("91", "91"),
        ("It is 91.", "91"),
        ("=91", "91"),
        ("**91**", "91"),
        ("\\boxed{91}", "91"),
        ("91, of course", "91"),
        ("The answer is...91", "91"),
        ("答案是91。", "91"),
        ("\uff19\uff11", "91"),
        ("法国的首都是巴黎。", "巴黎"),
        ("It is paris.", "Paris"),
        ("forty\n  two", "forty two"),
        ("x = a+b;", "a+b"),
        ("anything", " "),
    ],
)
def test_the_expected_text_is_found_where_it_stands_alone(text, expected):
    assert contains(text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1910", "91"),
        ("191", "91"),
        ("It is 910.", "91"),
        ("9,191", "91"),
        ("91,000", "91"),
        ("91.5", "91"),
        ("0.91", "91"),
        ("-91", "91"),
        ("\u221291", "91"),
        ("91a", "91"),
        ("comparison", "Paris"),
        ("Parisian", "Paris"),
        ("", "91"),
    ],
)
def test_the_expected_text_is_not_found_inside_another_word_or_number(text, expected):
    assert not contains(text, expected)


@pytest.mark.parametrize(
    ("text", "tokens", "finish", "said"),
    [
        ("!!!!!!!", 7, "length", "'!' makes 7 of 7 characters"),
        (
            "The seven seas were crossed in 1910 by brave sailors.",
            12,
            "stop",
            "expected '91' in the answer: 'The seven",
        ),
        ("Let me think about this", 5, "length", "(cut off after 5 tokens)"),
        ("", 0, "stop", "no generated tokens"),
        ("", 12, "stop", "empty answer"),
        ("91", 0, "stop", "no generated tokens"),
        ("91", 1, "abort", "finish_reason abort"),
    ],
)
def test_P8_a_wrong_answer_says_what_was_expected_and_what_came(text, tokens, finish, said):
    problem = check_answer(SUM, text, tokens, finish)
    assert said in problem
    assert "What is 7 * 13?" in problem


def test_a_right_answer_is_accepted():
    assert check_answer(SUM, "7 * 13 = 91", 8, "stop") == ""
    assert check_answer(SUM, "7 * 13 = 91, because", 8, "length") == ""
    assert check_answer(SmokePrompt(ask="Say hi"), "hi", 1, "stop") == ""


def test_a_regular_expression_may_be_expected():
    prompt = SmokePrompt(ask="Name a colour", expect_regex=r"(?i)\b(red|blue)\b")
    assert check_answer(prompt, "Blue.", 2, "stop") == ""
    assert "expected a match of" in check_answer(prompt, "Seven.", 2, "stop")
    assert "not a regular expression" in check_answer(SmokePrompt(ask="x", expect_regex="("), "x", 1, "stop")
