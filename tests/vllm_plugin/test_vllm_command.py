"""kvcompress serve: vLLM's server is started, answers, and ends by signals with all its processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import alone

import kvcompress

ROOT = Path(__file__).parents[2]
CACHE = "pruned,pruner=snapkv,window=16,keep=64"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # the example has none of its own


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port, path, body=None):
    """(status, the answer)"""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def below(pid):
    """A process's children and theirs."""
    children = [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [x for child in children for x in below(child)]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def starts(server, port, log):
    while server.poll() is None:
        try:
            if ask(port, "/health")[0] == 200:
                return True
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text())


# half a minute each: vLLM is imported in two processes
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_stop(told, tmp_path):
    port, log = free_port(), tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [
        sys.executable, "-m", "kvcompress", "serve", "--cache", CACHE, "--memory", "64MiB", "--port", str(port),
        "--max_model_len=512", "--enforce-eager", "--chat-template", TEMPLATE,
    ]  # fmt: skip
    with log.open("w") as out, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as server:
        try:
            assert starts(server, port, log)
            text = "import os\n" * 20
            wanted = bytes(alone(kvcompress.load_example_model()[0], CACHE, [list(text.encode())], 8)[0]).decode()
            more = {"model": "example", "max_tokens": 8, "temperature": 0}
            status, answer = ask(port, "/v1/completions", {"prompt": text, **more})
            assert (status, json.loads(answer)["choices"][0]["text"]) == (200, wanted)
            chat = {"messages": [{"role": "user", "content": text}], **more}
            status, answer = ask(port, "/v1/chat/completions", chat)
            assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, wanted)
            assert ask(port, "/v1/completions", {"prompt": text * 5, **more})[0] == 400  # more than 512
            held = below(server.pid)
            assert held
            server.send_signal(told)
            assert server.wait(60) == 0
            end = time.monotonic() + 20  # multiprocessing's own notices by itself that nobody is there
            while left := [pid for pid in held if runs(pid)]:
                assert time.monotonic() < end, left
                time.sleep(0.1)
        finally:
            server.kill()
    said = log.read_text()
    lines = said.splitlines()
    assert lines[0] == "model    example: float32, at most 512 tokens of a prompt and its answer"
    assert lines[1] == f"cache    {CACHE}: 64.0 MiB, in blocks of 64 tokens"
    assert "Compressed KV cache: " + CACHE in said and "Found duplicate keys" not in said


def test_an_option_that_vllm_does_not_have_is_its_own_to_refuse():
    command = [sys.executable, "-m", "kvcompress", "serve", "--memory", "64MiB", "--no-such-option", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unrecognized arguments: --no-such-option" in done.stderr
