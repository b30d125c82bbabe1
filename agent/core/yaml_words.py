"""PyYAML's errors in plain words: what was found, what was expected."""

_WORDS = (
    (
        "mapping values are not allowed",
        'found ":" where no key can stand, expected quotes around text that contains ": "',
    ),
    ("could not find expected ':'", 'found text without ":", expected "key: value"'),
    ("character '\\t'", "found a tab, expected spaces: YAML does not indent with tabs"),
    ("character '%'", 'found "%" at the start of a value, expected quotes around it'),
    ("character '@'", 'found "@" at the start of a value, expected quotes around it'),
    ("character '`'", 'found "`" at the start of a value, expected quotes around it'),
    (
        "unexpected end of stream",
        "found the end of the file inside a quoted text, expected the closing quote",
    ),
    (
        "unexpected document separator",
        "found a document separator inside a quoted text, expected the closing quote",
    ),
    ("expected ',' or ']'", 'found something else inside a list, expected "," or the closing "]"'),
    ("expected ',' or '}'", 'found something else inside a mapping, expected "," or the closing "}"'),
    (
        "expected <block end>",
        "found a line that fits no open level, expected the indentation of the lines around it",
    ),
    ("block sequence entries are not allowed", 'found "- " here, expected a list item on a line of its own'),
    ("block mapping keys are not allowed", "found a key here, expected it on a line of its own"),
    (
        "unknown escape character",
        "found an unknown escape in a double-quoted text, expected single quotes or a doubled backslash",
    ),
    (
        "escape sequence of",
        "found an incomplete escape in a double-quoted text, expected its hexadecimal digits",
    ),
    ("undefined tag handle", "found a tag, expected the plain value: tags are not read"),
    ("tag", "found a tag, expected the plain value: tags are not read"),
    (
        "alphabetic or numeric character",
        'found "&" or "*" at the start of a value, expected quotes around it',
    ),
    ("duplicate anchor", "found an anchor, expected the plain value: anchors are not read"),
    ("node content", "found the end of a value before it began, expected a value"),
    ("document start", "found text after the end of the document, expected nothing more"),
    ("incompatible YAML document", "found another YAML version, expected version 1.2"),
    ("YAML directive", "found a second version line, expected one"),
    (
        "indentation indicator",
        "found a wrong block indicator, expected | or > with at most one digit from 1 to 9",
    ),
    ("comment or a line break", "found text after | or >, expected the text on the lines below"),
)


def say_yaml_error(error: Exception) -> str:
    """One clause pair for any error of PyYAML's scanner and parser; never a traceback, never a value."""
    problem = " ".join(str(getattr(error, name, None) or "") for name in ("problem", "context"))
    for part, words in _WORDS:
        if part in problem:
            return words
    return "found text that is not YAML, expected YAML 1.2"
