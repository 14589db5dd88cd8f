"""kvcompress serve: what clients get, one and many, and what goes wrong."""

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import attached, deciding_model
from test_serve_batching import alone
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

import kvcompress
from kvcompress.caches.base import UNLIMITED
from kvcompress.serve import batching
from kvcompress.serve.capacity import prompts_at_once, start_lines
from kvcompress.serve.departures import Departures
from kvcompress.serve.stopping import Stopping

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("openai")

ROOT = Path(__file__).parents[1]
WORDS = {"<unknown>": 0} | {f"w{i}": i for i in range(1, 97)}


def tokenizer(chats=True):
    """A word w12 is token 12. chats: it has a template for them."""
    from tokenizers.decoders import WordPiece
    from tokenizers.pre_tokenizers import Whitespace

    inner = Tokenizer(WordLevel(WORDS, unk_token="<unknown>"))
    inner.pre_tokenizer, inner.decoder = Whitespace(), WordPiece(prefix="##", cleanup=False)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unknown>")
    made.chat_template = None if not chats else "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def text_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


class Client:
    """A server in a thread, and requests to it."""

    def __init__(self, model, cache="dense", chats=True, words=None, max_body=2_000_000, **settings):
        from kvcompress.serve.server import build_app

        self.model, self.serving = model, batching(model, cache, **{"pages": 400, "page_size": 8, **settings})
        self.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.tokenizer = words or tokenizer(chats)
        self.app = build_app(self.serving, "tiny", self.tokenizer, max_body=max_body)
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        end = time.monotonic() + 60
        while not self.server.started:
            assert time.monotonic() < end and self.thread.is_alive()
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join()
        self.serving.close()

    def open(self, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def post(self, body, **headers):
        """A connection whose answer nobody has waited for."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers["Content-Type"] = "application/json"
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection

    def ask(self, path, body=None):
        """(status, what came)."""
        connection, response = self.open(path, body)
        content = response.read().decode()
        connection.close()
        return response.status, content

    def complete(self, prompt, new, **more):
        status, content = self.ask("/v1/completions", {"prompt": text_of(prompt), "max_tokens": new, **more})
        return status, json.loads(content)

    def metrics(self):
        lines = self.ask("/metrics")[1].splitlines()
        return {name.removeprefix("kvcompress_"): float(x) for name, x in (line.split() for line in lines)}

    def wait_until(self, done):
        end = time.monotonic() + 60
        while not done(self.metrics()):
            assert time.monotonic() < end, self.metrics()
            time.sleep(0.02)


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def test_clients_get_the_tokens_of_generate_alone_whole_and_as_a_stream():
    prompts = [prompt_of(length, length) for length in (9, 21, 14, 30)]
    found = {}
    with Client(attached(), "pruned,pruner=snapkv,window=4,budget=12", requests=3, batch_tokens=64) as client:
        wanted = [text_of(alone(client.model, str(client.serving.spec), prompt, 6)) for prompt in prompts]

        def ask(i):
            found[i] = client.complete(prompts[i], 6)

        askers = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert [(found[i][0], found[i][1]["choices"][0]["text"]) for i in range(4)] == [(200, x) for x in wanted]
        _, stream = client.ask("/v1/completions", {"prompt": text_of(prompts[1]), "max_tokens": 6, "stream": True})
        chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks).split() == wanted[1].split()
        assert len(chunks) >= 6 and chunks[-1]["choices"][0]["finish_reason"] == "length"
        words = wanted[1].split()
        stop = {"stop": ["none", f"{words[2]} {words[3]}"]}
        status, answer = client.complete(prompts[1], 6, **stop)
        before = wanted[1][: wanted[1].index(stop["stop"][1])]
        assert (status, answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (200, before, "stop")
        _, stream = client.ask(
            "/v1/completions", {"prompt": text_of(prompts[1]), "max_tokens": 6, "stream": True, **stop}
        )
        chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == before
        chat = {"messages": [{"role": "user", "content": text_of(prompts[0])}], "generation_config": "{}"}
        chat["generation_config"] = json.dumps({"max_new_tokens": 6, "do_sample": False})
        status, answer = client.ask("/v1/chat/completions", chat)
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == wanted[0]
        assert json.loads(client.ask("/v1/models")[1])["data"][0]["id"] == "tiny"
        client.wait_until(lambda x: x["pages_in_use"] == 0 and x["running"] == 0)
        numbers = client.metrics()
        assert numbers["pages"] == 400 and 1 <= numbers["peak_running"] <= 3 and numbers["tokens_per_second"] > 0


def test_what_cannot_be_done_is_answered_and_the_next_request_is_served():
    model = attached()
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = torch.nan
    with Client(model, pages=42, requests=4, batch_tokens=64) as client:
        prompt = [token % 90 + 3 for token in prompt_of(20)]
        status, answer = client.complete(prompt_of(60), 4)  # a prompt longer than all pages
        assert status == 413 and "needs 48 pages for its prompt of 60 tokens" in answer["error"]["message"]
        assert client.complete(prompt_of(60), 4, stream=True)[0] == 413
        status, answer = client.complete(prompt, 200)  # what follows it does not fit
        assert status == 507 and "needs more than all 42 pages after 56 tokens" in answer["error"]["message"]
        status, answer = client.complete([96, *prompt], 4)
        assert status == 500 and "NaN" in answer["error"]["message"]
        for field, value in (("temperature", 0.7), ("top_p", 0.5), ("stop", [""]), ("model", "another"), ("n", 2),
                             ("echo", True), ("logprobs", 0), ("presence_penalty", 0.5), ("frequency_penalty", 1.5),
                             ("max_tokens", 0)):  # fmt: skip
            status, answer = client.complete(prompt, 4, **{field: value})
            assert status == 400 and (field == "model" or field in str(answer)), field
        status, answer = client.complete(prompt, 4, temperature=1)
        assert status == 400 and answer["error"]["message"].startswith("temperature must be 0, as this server was")
        assert client.complete(prompt, 4, n=1, presence_penalty=0.0, echo=False, top_p=1, temperature=0)[0] == 200
        assert client.complete([], 4)[0] == 400 and client.complete([], 4, stream=True)[0] == 400
        assert client.complete(prompt, 4, temperature=0.0)[0] == 200  # which is how this server writes
        assert client.ask("/v1/systemone", {})[0] in (404, 501)  # 404: before transformers 5.21 there is none
        assert client.ask("/v1/audio/transcriptions", {})[0] == 501
        assert client.ask("/load_model", {"model": "x"})[0] == client.ask("/reset", {})[0] == 404
        status, answer = client.complete(prompt, 4)
        assert status == 200 and answer["choices"][0]["text"] == text_of(alone(model, "dense", prompt, 4))
        assert client.ask("/health")[0] == 200
        client.wait_until(lambda x: x["pages_in_use"] == 0)


def test_a_client_that_goes_away_and_a_server_that_stops_give_their_pages_back():
    model = attached(max_position_embeddings=1 << 16)
    with Client(model, pages=30000, requests=4, batch_tokens=64) as client:
        body = {"prompt": text_of(prompt_of(20)), "max_tokens": 30000, "stream": True}
        connection, response = client.open("/v1/completions", body)
        assert response.readline().startswith(b"data: ")
        assert client.metrics()["running"] == 1
        response.close()
        connection.close()
        client.wait_until(lambda x: x["running"] == 0 and x["pages_in_use"] == 0)
        for more in ({}, {"stop": ["none"]}):  # not streamed to, and the other way there
            connection = client.post({**body, "stream": False, **more}, **{"X-Request-ID": "a"})
            client.wait_until(lambda x: x["running"] == 1)
            second = client.post(body, **{"X-Request-ID": "a"})  # would take the first one's answer
            assert second.getresponse().status == 409
            second.close()
            assert client.metrics()["running"] == 1
            connection.close()
            client.wait_until(lambda x: x["running"] == 0 and x["pages_in_use"] == 0)
        assert not client.serving.processor.output_router.result_handlers
        streamed, response = client.open("/v1/completions", body)
        assert response.readline().startswith(b"data: ")
        whole = client.post({**body, "stream": False})
        client.wait_until(lambda x: x["running"] == 2)
        serving = client.serving
    assert not serving.processor.scheduler.active_requests and serving.served.pages_in_use() == 0
    events = response.read().split(b"\n\n")
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["message"] == "the server has stopped"
    answer = whole.getresponse()
    assert answer.status == 503 and json.loads(answer.read())["error"]["message"] == "the server has stopped"
    streamed.close()
    whole.close()


def test_a_client_that_leaves_before_its_stream_begins_leaves_nothing_running(monkeypatch):
    """At any turn of the loop, also that between its request's being queued and its stream's being read from."""
    body = json.dumps({"prompt": text_of(prompt_of(20)), "max_tokens": 30000, "stream": True}).encode()
    content = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": content}

    async def at_once(function, *given):  # a thread's turns could not be counted
        return function(*given)

    monkeypatch.setattr(asyncio, "to_thread", at_once)

    async def leave(app, turns):
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            if messages:
                return messages.pop()
            for _ in range(turns):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        await asyncio.gather(app({**scope, "state": {}}, receive, send), return_exceptions=True)

    async def leave_at_every_turn(client):
        queued = 0
        for turns in range(16):
            await leave(client.app, turns)
            if (manager := client.serving._last) is None:
                continue  # before it was queued
            queued += bool(manager.output_router.result_handlers)
            end = time.monotonic() + 60
            while manager.output_router.result_handlers:
                assert time.monotonic() < end, (turns, client.serving.metrics())
                await asyncio.sleep(0.01)
        return queued

    with Client(attached(max_position_embeddings=1 << 16), pages=30000, batch_tokens=64) as client:
        assert asyncio.run(leave_at_every_turn(client)) >= 10
        client.wait_until(lambda x: x["running"] == 0 and x["waiting"] == 0 and x["pages_in_use"] == 0)


def test_an_answer_that_is_still_read_ends_no_other_of_its_id():
    """A client reads the end of its answer while another one comes under the same X-Request-ID."""

    def asked(tokens):
        body = json.dumps({"prompt": text_of(prompt_of(20)), "max_tokens": tokens}).encode()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"same")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        return {**scope, "state": {}}, [{"type": "http.request", "body": body}]

    async def ask(app, tokens, said, read=None):
        scope, messages = asked(tokens)

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(3600)

        async def send(message):
            if read is not None and message["type"] == "http.response.body":
                await read.wait()
            said.append(message)

        await app(scope, receive, send)

    async def both(client):
        read, slow, other = asyncio.Event(), [], []
        first = asyncio.create_task(ask(client.app, 3, slow, read))
        end = time.monotonic() + 60
        while not slow or client.serving._last.output_router.result_handlers:  # its head is there, its end is not read
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        second = asyncio.create_task(ask(client.app, 200, other))
        while not client.serving._last.output_router.result_handlers:
            assert time.monotonic() < end
            await asyncio.sleep(0.001)
        read.set()
        await first
        await asyncio.wait_for(second, 60)
        return other[0]["status"]

    with Client(attached(max_position_embeddings=1 << 12), pages=3000, batch_tokens=64) as client:
        assert asyncio.run(both(client)) == 200


def test_an_answer_is_no_longer_than_the_model_reaches():
    with Client(attached(max_position_embeddings=32)) as client:
        prompt = prompt_of(28)
        status, answer = client.complete(prompt, 5)
        assert status == 400 and "at most 32 tokens together, got a prompt of 28 and max_tokens 5" in str(answer)
        assert client.complete(prompt_of(32), None)[0] == 400
        wanted = text_of(alone(client.model, "dense", prompt, 4))
        for new in (4, None):  # not given: what is left
            status, answer = client.complete(prompt, new)
            choice = answer["choices"][0]
            assert (status, choice["text"], choice["finish_reason"]) == (200, wanted, "length")
    with Client(attached(max_position_embeddings=32), "streaming,window_size=8,num_sink_tokens=2") as client:
        assert client.complete(prompt, 40)[1]["usage"]["completion_tokens"] == 40  # which runs without end


def test_a_server_says_what_it_holds():
    model = attached()
    with batching(model, "dense", pages=400, page_size=8, requests=8, batch_tokens=64) as serving:
        assert serving.metrics()["page_nbytes"] == 2 * 8 * 16 * 4 and prompts_at_once(serving, 60) == 8
        assert prompts_at_once(serving, 512) == 400 // (6 * 64)
        lines = "\n".join(start_lines(serving, "tiny", 512))
    assert "model    tiny: LlamaForCausalLM, float32, on cpu; at most 512 tokens" in lines
    assert "dense: 400 pages of 8 tokens of a KV head, 1.0 KiB each, 400.0 KiB in all" in lines
    assert lines.endswith("requests 8 at once; prompts that fit: 1 of 512 tokens")
    with batching(model, "streaming,window_size=8,num_sink_tokens=2", pages=1, requests=8) as serving:
        lines = "\n".join(start_lines(serving, "tiny", UNLIMITED))
    assert "any length" in lines and "beside pages" in lines and "8 of 65,536 tokens" in lines
    converted = deciding_model()
    with batching(converted, None, pages=600, page_size=8, requests=8, batch_tokens=64) as serving:
        assert "prompts that fit where nothing is merged or dropped: 1 of 512" in start_lines(serving, "t", 512)[2]


def test_chats_with_a_model_that_has_no_template_are_refused():
    with Client(attached(), chats=False) as client:
        asked = {"messages": [{"role": "user", "content": "w3 w4"}], "max_tokens": 3}
        status, answer = client.ask("/v1/chat/completions", asked)
        assert (
            status == 400 and "tiny has no chat template: use /v1/completions" in json.loads(answer)["error"]["message"]
        )
        assert client.complete(prompt_of(5), 3)[0] == 200


def test_a_converted_model_is_served_by_its_own_cache():
    model = deciding_model()
    kvcompress.attach(model)
    prompt = prompt_of(25)
    with Client(model, None, requests=4, batch_tokens=16) as client:
        assert str(client.serving.spec) == "dmc"
        status, answer = client.complete(prompt, 5)
        assert status == 200 and answer["choices"][0]["text"] == text_of(alone(model, "dmc", prompt, 5))


@pytest.mark.parametrize(
    ("pieces", "stops", "wanted", "stopped"),
    [
        (["ab", "cd", None], ["x"], ["ab", "cd", None], 0),
        (["ab", "cd", "ef", None], ["bce"], ["a", "bcd", "ef", None], 0),  # begun, and not gone on with
        (["ab", "cd", "ef"], ["de", "cdef"], ["ab", None], 3),
        (["aaab"], ["aab"], ["a", None], 1),
        (["a", "a", "a", "b"], ["aab"], ["a", None], 4),
        (["ab", 7, "c", None], ["bc"], ["a", "b", 7, "c", None], 0),  # what is no text stands between
        (["ab", None], ["bx"], ["a", "b", None], 0),
    ],
)
def test_text_ends_in_front_of_the_first_stop_string(pieces, stops, wanted, stopped):
    calls = []

    async def read():
        queue = asyncio.Queue()
        for piece in pieces:
            queue.put_nowait(piece)
        stopping, found = Stopping(queue, stops, calls.append), []
        while not found or found[-1] is not None:
            found.append(stopping.get_nowait() if len(found) % 2 else await stopping.get())
        with pytest.raises(asyncio.QueueEmpty):
            Stopping(asyncio.Queue(), stops, calls.append).get_nowait()
        return found

    assert asyncio.run(read()) == wanted and calls == ([stopped] if stopped else [])


def test_the_command_serves_until_it_is_told_to_stop():
    command = [sys.executable, "-m", "kvcompress", "serve", "--cache", "dense", "--pages", "400", "--port", "0"]
    command += ["--temperature", "0", "--grace", "60", "--requests", "4"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = next(
                int(found[1]) for line in server.stderr if (found := re.search(r"http://localhost:(\d+)", line))
            )
            body = json.dumps({"prompt": "def f(x):\n", "max_tokens": 2000, "stream": True})
            connection = http.client.HTTPConnection("localhost", port, timeout=120)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200 and response.readline().startswith(b"data: ")
            server.send_signal(signal.SIGINT)  # Ctrl-C, with a request that runs
            while "Waiting for connections" not in (line := server.stderr.readline()):
                assert line
            server.terminate()  # who is told again does not wait for it
            assert b"the server has stopped" in response.read()
            said = server.stderr.read()
            assert server.wait(60) == 0 and "Traceback" not in said and "Finished server process" in said, said
            connection.close()
        finally:
            server.kill()


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_only_a_stream_is_told_that_the_server_stops_once_its_answer_has_begun(kind):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
        await asyncio.sleep(60)

    async def stopped():
        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        answer = asyncio.create_task(Departures(app)({"type": "http"}, receive, send))
        await asyncio.sleep(0.05)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)

    asyncio.run(stopped())
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert bool(bodies) == (kind == "text/event-stream") and all(b"503" in body for body in bodies)
