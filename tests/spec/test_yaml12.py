import pytest

from agent.core.problem import say_path
from agent.core.yaml12 import MAX_BYTES, MAX_DEPTH, parse, resolve

PLAIN = [
    ("0000:41:00.0", "0000:41:00.0"),
    ("2460:0", "2460:0"),
    ("12:30:45", "12:30:45"),
    ("off", "off"),
    ("yes", "yes"),
    ("No", "No"),
    ("y", "y"),
    ("true", True),
    ("False", False),
    ("tRUE", "tRUE"),
    ("null", None),
    ("~", None),
    ("", None),
    ("none", "none"),
    ("12", 12),
    ("-12", -12),
    ("+12", 12),
    ("010", 10),
    ("0o10", 8),
    ("0xfF", 255),
    ("-0x1", "-0x1"),
    ("0b1", "0b1"),
    ("1_000", "1_000"),
    ("1.5", 1.5),
    (".5", 0.5),
    ("5.", 5.0),
    ("1e3", 1000.0),
    ("1e", "1e"),
    ("2026-01-02", "2026-01-02"),
    ("590.48.01", "590.48.01"),
    ("=", "="),
]


@pytest.mark.parametrize(("text", "value"), PLAIN)
def test_plain_scalars_follow_the_core_schema_of_yaml_1_2(text, value):
    found = resolve(text)
    assert found == value
    assert type(found) is type(value)


def test_B15_an_unquoted_pci_address_is_read_as_the_address():
    document = parse("select: [0000:41:00.0, 0000:e1:00.0]\nnext: 0000:41:00.0\n")
    assert document.value == {"select": ["0000:41:00.0", "0000:e1:00.0"], "next": "0000:41:00.0"}


def test_quoted_scalars_are_text():
    assert parse("a: '1'\nb: \"true\"\nc: |\n  x\n  y\n").value == {"a": "1", "b": "true", "c": "x\ny\n"}


def test_every_value_and_key_has_its_line_and_column():
    document = parse("a:\n  b: [x, {c: 1}]\n  d:\n    - 2\n")
    assert document.where(("a", "b", 0)) == (2, 7)
    assert document.where(("a", "b", 1, "c")) == (2, 14)
    assert document.where(("a", "b", 1, "c"), at_key=True) == (2, 11)
    assert document.where(("a", "b")) == (2, 3)
    assert document.where(("a", "d", 0)) == (4, 7)
    assert document.where(("a", "missing")) == (1, 1)


REFUSED = [
    ("a: 1\nb: 2\na: 3\n", (3, 1), "a", "found this key again (first on line 1)"),
    ("x: {a: 1, 'a': 2}\n", (1, 11), "x.a", "found this key again"),
    ("a: &x 1\nb: 2\n", (1, 4), "a", "found an anchor"),
    ("b: *s3cret\n", (1, 4), "b", "found an alias"),
    ("a: !!str 5\n", (1, 4), "a", "found a tag"),
    ("a: !python/object:os.system x\n", (1, 4), "a", "found a tag"),
    ("<<: {a: 1}\n", (1, 1), "<<", "found a merge key"),
    ("1: x\n", (1, 1), "(document)", "found 1 as a key, expected text"),
    ("true: x\n", (1, 1), "(document)", "found true as a key, expected text"),
    ("~: x\n", (1, 1), "(document)", "found ~ as a key"),
    ("? [a]\n: x\n", (1, 3), "(document)", "found a list as a key"),
    ("a: {{ port }}\n", (1, 5), "a", "found a mapping as a key"),
    ("a: 1\n---\nb: 2\n", (2, 1), "(document)", "found a second document"),
    ("", (1, 1), "(document)", "found an empty file"),
    ("# nothing\n", (1, 1), "(document)", "found an empty file"),
    ("a: x\x07y\n", (1, 5), "(document)", "found the control character U+0007"),
    ('a: "x\\u001by"\n', (1, 4), "a", "found the control character U+001B"),
    ('a: "\\ud800"\n', (1, 4), "a", "found the control character U+D800"),
    ('a: "\\U00110000"\n', None, "a", "found text that is not YAML"),
    ("a: \u2028x\n", (1, 4), "(document)", "found the control character U+2028"),
    ("a:\n\tb: 1\n", (2, 1), "a", "found a tab, expected spaces"),
    ("a: b: c\n", (1, 5), "(document)", 'found ":" where no key can stand'),
    ("a: 'x\n", (2, 1), "a", "expected the closing quote"),
    ("a: [1, 2\nb: 3\n", None, "a[2]", 'expected "," or the closing "]"'),
    ("a: 1\n b: 2\n", (2, 3), "(document)", 'found ":" where'),
    ("a: @x\n", (1, 4), "a", 'found "@" at the start of a value'),
    ("a: 1e999\n", (1, 4), "a", "found a number out of range"),
    ("a: .inf\n", (1, 4), "a", "found a number out of range"),
    ("a: " + "9" * 5000 + "\n", (1, 4), "a", "found a number out of range"),
    ("%YAML " + "9" * 5000 + ".1\n---\na: 1\n", None, "(document)", "found text that is not YAML"),
]


@pytest.mark.parametrize(("text", "mark", "path", "words"), REFUSED)
def test_what_a_spec_never_needs_is_refused_at_its_place(text, mark, path, words):
    problem = parse(text).problems[0]
    assert words in problem.text
    assert "s3cret" not in problem.text
    assert say_path(problem.path) == path
    assert mark is None or problem.mark == mark


def test_all_structural_problems_are_found_at_once():
    document = parse("a: &x 1\nb: *x\nc: !!int 3\nc: 4\nd: 5\n")
    assert [problem.mark for problem in document.problems] == [(1, 4), (2, 4), (3, 4), (4, 1)]
    assert document.value == {"a": 1, "b": None, "c": 3, "d": 5}


def test_whole_number_keys_are_read_only_where_they_are_wanted():
    document = parse("a: {1: x}\nb: {1: x}\n", lambda path: path == ("a",))
    assert document.value == {"a": {"1": "x"}, "b": {}}
    assert len(document.problems) == 1


def test_the_number_and_the_text_of_a_key_are_the_same_key():
    assert "again" in parse("{1: x, '1': y}\n", lambda _: True).problems[0].text


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: "])
def test_deep_nesting_is_refused_and_exhausts_nothing(opening):
    text = opening * (MAX_BYTES // len(opening))
    problem = parse(text).problems[-1]
    assert f"more than {MAX_DEPTH} levels" in problem.text


def test_a_large_file_is_refused_before_it_is_read():
    assert parse("a: " + "x" * MAX_BYTES).problems[0].text.startswith(f"found {MAX_BYTES + 3} bytes")
    assert parse("a: " + "x" * (MAX_BYTES - 3)).problems == ()
    assert parse("#" + "\u20ac" * (MAX_BYTES // 3)).problems[0].text.startswith("found")


@pytest.mark.parametrize(
    "text",
    ["[" * 60000, "{" * 60000, "a: " + "[]," * 20000, "'" * 60001, "- " * 30000, "? " * 30000, "a:\n" * 20000, "!" * 60000, "&a " * 20000, '"\\' * 30000, "%" * 60000, "a: |99\n" + " \n" * 30000],
)  # fmt: skip
def test_hostile_text_gives_problems_and_nothing_else(text):
    assert parse(text).problems
