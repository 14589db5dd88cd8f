"""kvcompress serve: bodies of requests that are wrong, hostile or too long."""

import asyncio
import http.client
import json
import threading

import pytest
from helpers import attached
from test_serve_server import Client, text_of, tokenizer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from kvcompress.serve import bodies
from kvcompress.serve.max_body import MaxBody

PROMPT = text_of([3, 4, 5])
POOL = {
    "text": "x", "number": 2.5, "huge": 10**40, "negative": -1, "array": [1], "object": {"a": 1}, "flag": True,
    "half a pair": "\ud800", "no number": float("nan"), "empty": "",
}  # fmt: skip
MESSAGES = [{"role": "user", "content": PROMPT}]
# what a request has, the fields that may be given, and the one that sets its length
ENDPOINTS = {
    "/v1/completions": ({"prompt": PROMPT}, bodies.COMPLETION, "max_tokens"),
    "/v1/chat/completions": ({"messages": MESSAGES}, bodies.CHAT, "max_tokens"),
    "/v1/responses": ({"input": PROMPT, "stream": False}, bodies.RESPONSE, "max_output_tokens"),
}
# of which kinds of the pool a field may be; all others are wrong
RIGHT = {
    "prompt": ("text", "empty"), "input": ("text", "empty"), "instructions": ("text", "empty"), "stream": ("flag",),
    "temperature": ("number",), "seed": ("negative",), "user": ("text", "empty"), "metadata": ("object",),
    "safety_identifier": ("text", "empty"), "prompt_cache_key": ("text", "empty"),
    "chat_template_kwargs": ("object",),
    "stop": ("text",), "parallel_tool_calls": ("flag",),
}  # fmt: skip


@pytest.fixture(scope="module")
def client():
    with Client(attached(), pages=400, requests=4, batch_tokens=64) as client:
        yield client


def post(client, path, content):
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def refused(client, path, body, status=400):
    """The field and the message of an error, as OpenAI's clients read it."""
    found, answer = post(client, path, body if isinstance(body, bytes) else json.dumps(body))
    assert found == status, (body, answer)
    assert answer["error"].keys() == {"message", "type", "param", "code"} and answer["error"]["code"] == status
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]["param"], answer["error"]["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_field_of_another_type_is_named(client, path):
    given, fields, most = ENDPOINTS[path]
    for field in fields:
        if field == "model":  # any other name is refused as such
            continue
        for kind, value in POOL.items():
            if kind not in RIGHT.get(field, ()):
                named, said = refused(client, path, {**given, most: 1, field: value})
                assert named.startswith(field) and said.startswith(f"{named} must "), (field, kind, said)
    assert client.ask(path, {**given, most: 1, **dict.fromkeys(fields.keys() - given.keys() - {most})})[0] == 200


def test_what_would_change_an_answer_is_refused_by_name(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    chats = [
        ({"tools": [tool]}, "tools"), ({"tool_choice": "required"}, "tool_choice"), ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"), ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"), ({"response_format": {"type": "json_object"}},
        "response_format"), ({"reasoning_effort": "high"}, "reasoning_effort"), ({"prediction": {}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"), ({"suffix": "x"}, "suffix"), ({"no such": 1}, "no such"),
        ({"generation_config": '{"num_beams": 4}'}, "generation_config.num_beams"),
        ({"generation_config": '{"max_new_tokens": "x"}'}, "generation_config.max_new_tokens"),
        ({"generation_config": '{"eos_token_id": [1, "x"]}'}, "generation_config.eos_token_id"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": ["x"] * 17}, "stop"), ({"stop": [""]}, "stop"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0].type"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [audio]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"), ({"messages": [{}]}, "messages[0].role"),
        ({"messages": []}, "messages"), ({"messages": [[]]}, "messages[0]"), ({"messages": None}, "messages"),
        ({"messages": [{**MESSAGES[0], "tool_calls": [tool]}]}, "messages[0].tool_calls"),
        ({"messages": [{**MESSAGES[0], "name": "somebody"}]}, "messages[0].name"),
    ]  # fmt: skip
    for wrong, field in chats:
        assert refused(client, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **wrong})[0] == field
    turn = {"role": "user", "content": PROMPT}
    for wrong, field in (
        ({"previous_response_id": "x"}, "previous_response_id"), ({"input": []}, "input"), ({"tools": [{}]}, "tools"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input[0].type"), ({"input": [3]}, "input[0]"),
        ({"input": [turn, {"type": "input_text", "text": "x"}]}, "input[1].role"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": ""}]}, "input[0].type"),
        ({"input": [turn | {"type": "reasoning"}]}, "input[0].type"),
    ):  # fmt: skip
        body = {"input": PROMPT, "max_output_tokens": 1, "stream": False, **wrong}
        assert refused(client, "/v1/responses", body)[0] == field
    spoken = [{**MESSAGES[0], "tool_calls": None, "annotations": []}]  # as clients send back what they got
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    for messages in (spoken, parts):
        body = {"messages": messages, "max_tokens": 1, "tools": [], "tool_choice": "none", "functions": None}
        assert client.ask("/v1/chat/completions", body)[0] == 200


def test_a_template_s_refusal_names_the_messages():
    with Client(attached(), pages=400, requests=4, batch_tokens=64) as client:
        client.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        field, said = refused(client, "/v1/chat/completions", {"messages": MESSAGES})
    assert field == "messages" and "roles must alternate" in said


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422), (b"{", 422), (b"null", 422), (b"[]", 422), (b'"text"', 422), (b"17", 422), (b"\xff\xfe", 422),
        (b'{"prompt": "\\x"}', 422), (nested(200_000), 400), (b'{"prompt": ' + nested(200_000) + b"}", 400),
        (b'{"prompt": ' + nested(500) + b"}", 400), (b'{"prompt": "w3", "metadata": ' + nested(500) + b"}", 400),
        (b'{"prompt": "w3", "max_tokens": 1' + b"0" * 5000 + b"}", 400), (b'{"max_tokens": 1}', 400), (b"{}", 400),
        (b'{"prompt": "w3", "generation_config": "' + nested(200_000) + b'"}', 400),
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_answered(client, content, status):
    refused(client, "/v1/completions", content, status)


def test_other_paths_are_answered_as_errors_of_the_api(client):
    for path in ("/reset", "/load_model", "/v1/nowhere"):
        assert refused(client, path, {}, 404) == (None, "Not Found")


def test_streams_end_as_clients_of_openai_wait_for_it(client):
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        events = client.ask(path, {**body, "max_tokens": 2, "stream": True})[1].split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and all(json.loads(event[6:]) for event in events[:-2])


def test_a_prompt_is_tokenized_while_others_are_answered():
    begun, go_on = threading.Event(), threading.Event()
    slow = tokenizer()

    class Slow(type(slow)):
        def __call__(self, *args, **kwargs):
            begun.set()
            assert go_on.wait(60)
            return super().__call__(*args, **kwargs)

    slow.__class__ = Slow
    with Client(attached(), pages=400, requests=4, batch_tokens=64, words=slow) as client:
        connection = client.post({"prompt": PROMPT, "max_tokens": 1})
        assert begun.wait(60)
        asked = http.client.HTTPConnection("127.0.0.1", client.port, timeout=5)
        try:
            asked.request("GET", "/health")
            assert asked.getresponse().status == 200
        finally:
            go_on.set()
        assert connection.getresponse().status == 200
        connection.close()
        asked.close()


# ---- too long ----


def ask(most, headers, messages):
    """(status, the error or None, messages that were not read)."""
    sent, reached, left = [], [], list(messages)

    async def app(scope, receive, send):
        reached.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return left.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(MaxBody(app, most)({"type": "http", "headers": headers}, receive, send))
    error = json.loads(sent[1]["body"])["error"]["message"] if len(sent) > 1 else None
    return sent[0]["status"] if sent else None, error, len(left), reached


def piece(body, more):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_is_too_long_is_not_read():
    told = [(b"content-length", b"11")]
    status, said, left, _ = ask(10, told, [piece(b"x" * 11, False)])
    assert (status, left) == (413, 1) and "at most 10 bytes" in said
    assert ask(10, [(b"content-length", b"9" * 30)], [piece(b"x", False)])[0] == 413
    status, _, left, reached = ask(10, [], [piece(b"x" * 6, True), piece(b"x" * 5, True), piece(b"x", False)])
    assert (status, left, reached) == (413, 1, [])  # of no told length: no more than is refused
    assert ask(10, [], [piece(b"x" * 6, True), piece(b"y" * 4, False)]) == (200, None, 0, [b"x" * 6 + b"y" * 4])
    assert ask(10, [], [piece(b"x", True), {"type": "http.disconnect"}])[0] is None


def test_the_server_refuses_a_body_that_is_too_long_and_serves_on():
    body = json.dumps({"prompt": PROMPT + " " * 2000, "max_tokens": 1}).encode()
    with Client(attached(), pages=400, requests=4, batch_tokens=64, max_body=1000) as client:
        assert "at most 1,000 bytes" in refused(client, "/v1/completions", body, 413)[1]
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        pieces = (body[i : i + 100] for i in range(0, len(body), 100))
        # sent at once: who still sends when the answer comes may lose it with the connection
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        connection.request("POST", "/v1/completions", chunks, headers)
        assert connection.getresponse().status == 413
        connection.close()
        assert client.complete([3, 4], 1)[0] == 200
