"""What the simulated inference server answers, and how it is written as OpenAI's interface has it."""

import json
import os
import signal
import time
from typing import Any

from agent.sim.server_config import Config
from agent.sim.server_http import Connection

DEFAULT_LENGTH = 128  # tokens of an ignore_eos request without max_tokens
BROKEN_LENGTH = 200  # most tokens of an answer that is one character over and over
NONSENSE_LENGTH = 40
_WORDS = [
    "river",
    "amber",
    "lantern",
    "quiet",
    "meadow",
    "copper",
    "winter",
    "basket",
    "harbour",
    "velvet",
    "orchard",
    "thunder",
    "pebble",
    "market",
    "silver",
    "canyon",
    "feather",
    "morning",
    "engine",
    "cedar",
    "window",
    "marble",
    "garden",
    "compass",
    "island",
    "shadow",
    "ribbon",
    "valley",
    "hammer",
    "cotton",
    "bridge",
    "maple",
    "kettle",
    "prairie",
    "saddle",
    "mirror",
    "timber",
    "ocean",
    "candle",
    "granite",
    "willow",
    "tunnel",
    "beacon",
    "walnut",
    "summit",
    "anchor",
    "glacier",
    "tulip",
]


def _filler(count: int) -> list[bytes]:
    """Varied words that no test for repeated text takes for a loop; the same ones at every start."""
    state, words = 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        words.append(b" " + _WORDS[(state >> 16) % len(_WORDS)].encode())
    return words


FILLER = _filler(4096)


def filler(start: int, count: int) -> list[bytes]:
    """``count`` tokens, different ones for each ``start``, the first of which says what this is."""
    skip = start * 977 % len(FILLER)
    words = (FILLER * (count // len(FILLER) + 2))[skip : skip + count]
    return [b"Simulated:", *words[1:]] if count else []


class BadRequestError(Exception):
    """What is wrong with a request, for HTTP 400."""


class Asked:
    """The body of a completion request to a server whose cache holds ``capacity`` tokens. Raises ``BadRequestError``."""

    def __init__(self, body: bytes, capacity: int, *, chat: bool) -> None:
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise BadRequestError("the body is not a JSON object")
        self.chat = chat
        self.prompt = _chat_text(data.get("messages")) if chat else _plain_text(data.get("prompt"))
        self.limit = data.get("max_tokens")
        if self.limit is None:
            self.limit = data.get("max_completion_tokens")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise BadRequestError(f"max_tokens: expected an integer from 1, not {self.limit!r}")
        self.prompt_tokens = max(1, len(self.prompt.split()))
        if self.prompt_tokens + (self.limit or 0) > capacity:
            raise BadRequestError(f"prompt and max_tokens exceed the cache's {capacity} tokens")
        self.ignore_eos = data.get("ignore_eos") is True
        self.stream = data.get("stream") is True
        options = data.get("stream_options")
        options = options if isinstance(options, dict) else {}
        self.last_usage = options.get("include_usage") is True
        self.running_usage = options.get("continuous_usage_stats") is True


def _chat_text(messages: object) -> str:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequestError("messages: expected a list of objects with role and content")
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [
            part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
    return "\n".join(texts)


def _plain_text(prompt: object) -> str:
    if isinstance(prompt, list):
        return " ".join(map(str, prompt))
    if not isinstance(prompt, str):
        raise BadRequestError("prompt: expected a string or a list")
    return prompt


class Answer:
    """What a completion says: one piece of text, escaped for JSON, per token."""

    def __init__(self, pieces: list[bytes], finish: str, fault: str) -> None:
        self.pieces = pieces
        self.finish = finish
        self.usage = fault != "no-usage"
        self.dies = fault == "die-half-way"


def compose(config: Config, asked: Asked, fault: str, number: int) -> Answer:
    """The answer to a request under a fault. ``number`` varies the filler."""
    if fault == "no-tokens":
        return Answer([], "stop", fault)
    exact = asked.limit or DEFAULT_LENGTH
    if fault == "exclaim":
        return Answer([b"!"] * (exact if asked.ignore_eos else min(exact, BROKEN_LENGTH)), "length", fault)
    if asked.ignore_eos:
        pieces, finish = filler(number, exact), "length"
    elif fault == "nonsense":
        pieces, finish = _cut(filler(number, NONSENSE_LENGTH), asked.limit)
    else:
        text = next(
            (answer for match, answer in config.answers if match in asked.prompt), config.default_answer
        )
        words = [json.dumps(word)[1:-1].encode() for word in text.split(" ")]
        pieces, finish = _cut([words[0], *(b" " + word for word in words[1:])], asked.limit)
    return Answer([b""] * len(pieces) if fault == "empty" else pieces, finish, fault)


def _cut(pieces: list[bytes], limit: int | None) -> tuple[list[bytes], str]:
    return (pieces, "stop") if limit is None or len(pieces) <= limit else (pieces[:limit], "length")


class Completion:
    """One running request: what it says, how far it is, and how that is written to its client."""

    def __init__(self, number: int, asked: Asked, answer: Answer, model: str, client: Connection) -> None:
        self.number = number
        self.end_level = self.first_due = 0.0
        self.started = self.overdue = False
        self._first_level = 0.0
        self._shown = 0
        self._asked = asked
        self._answer = answer
        self._client = client
        self._prompt_tokens = asked.prompt_tokens
        self._id = f"sim-{number}"
        self._created = int(time.time())
        self._model = model
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        about = {**self._about(kind), "choices": [{"index": 0}]}
        # A chunk is put together from bytes: one json.dumps for each would be most of this process's work.
        self._open = b"data: " + json.dumps(about).encode()[:-3] + b", "

    def begin(self, level: float, first_due: float) -> None:
        self.end_level = level + len(self._answer.pieces)
        self.first_due = first_due
        if self._asked.stream:
            self._client.begin_stream()

    def show(self, level: float) -> None:
        """Send what is due at this level, all but the last token.

        The speeds are those of whole requests, time to first token included. So the tokens are spread over the time
        that is left after the first one.
        """
        count = len(self._answer.pieces)
        if not self.started:
            self.started, self._first_level = True, level
            shown = min(1, count - 1)
        else:
            left = self.end_level - self._first_level
            share = min(1.0, (level - self._first_level) / left) if left > 0 else 1.0
            shown = min(1 + int((count - 1) * share), count - 1)
        if self._asked.stream and shown > self._shown:
            self._client.send_events(self._chunk(shown))
        self._shown = max(self._shown, shown)
        if self._answer.dies and self._shown * 2 >= count - 1:
            # As SGLang's launcher does when one of its processes crashes.
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        if self._answer.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._asked.stream:
            self._client.finish_stream(self._last_chunks())
        else:
            self._client.reply(200, self._whole())

    def _about(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": "simulated",
        }

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _event(self, choice: bytes, tokens: int) -> bytes:
        usage = b""
        if self._asked.running_usage and self._answer.usage:
            prompt = self._prompt_tokens
            usage = b', "usage": {"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}' % (
                prompt,
                tokens,
                prompt + tokens,
            )
        return b"%s%s}]%s}\n\n" % (self._open, choice, usage)

    def _chunk(self, shown: int) -> bytes:
        text = b"".join(self._answer.pieces[self._shown : shown])
        if not self._asked.chat:
            return self._event(b'"text": "%s", "finish_reason": null' % text, shown)
        role = b"" if self._shown else b'"role": "assistant", '
        return self._event(b'"delta": {%s"content": "%s"}, "finish_reason": null' % (role, text), shown)

    def _last_chunks(self) -> bytes:
        count = len(self._answer.pieces)
        nothing = b'"delta": {}' if self._asked.chat else b'"text": ""'
        events = [self._chunk(count)] if count else []
        events.append(
            self._event(b'%s, "finish_reason": "%s"' % (nothing, self._answer.finish.encode()), count)
        )
        if self._asked.last_usage and self._answer.usage:
            kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
            last = {**self._about(kind), "choices": [], "usage": self._usage(count)}
            events.append(b"data: " + json.dumps(last).encode() + b"\n\n")
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def _whole(self) -> dict[str, Any]:
        text = json.loads(b'"' + b"".join(self._answer.pieces) + b'"')
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._answer.finish}
        if self._asked.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        document = {
            **self._about("chat.completion" if self._asked.chat else "text_completion"),
            "choices": [choice],
        }
        if self._answer.usage:
            document["usage"] = self._usage(len(self._answer.pieces))
        return document
