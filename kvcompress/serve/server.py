"""transformers' OpenAI-compatible server for one model, whose requests' caches are compressed; and /metrics."""

# ruff: noqa: E402  who has not what serves is told so before it is imported

from __future__ import annotations

from ..extras import need_packages

need_packages("kvcompress.serve.server", "fastapi", "openai", "uvicorn")

import contextlib
import copy
import inspect
import math
import sys
from types import FrameType
from typing import Any

import uvicorn
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import (
    CBGenerateManager,
    GenerationState,
    get_response_template,
)

from ..caches.base import UNLIMITED, trained_length_of
from .batching import Batching
from .bodies import FieldError, error_body
from .capacity import start_lines
from .departures import Departures, when_over
from .handlers import Chat, Completion, Responses
from .max_body import MAX_BODY, MaxBody
from .scheduler import PagesError
from .stopping import Stopping

NEW = (
    1024  # tokens of an answer whose request says nothing, as transformers' server has it; or as the model's config has
)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "repetition_penalty": 1.0}  # what changes nothing


class _OneModel(ModelManager):
    """The model that the server was started with, and no other."""

    def __init__(self, name: str, model: Any, tokenizer: Any, requests: _Requests) -> None:
        super().__init__()
        self.force_model, self._held, self._requests = name, (model, tokenizer), requests

    def shutdown(self) -> None:
        """The server stops, while those who wait for answers can still be told."""
        self._requests.stop()

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._held

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "owned_by": "kvcompress"}]


class _Requests(CBGenerateManager):
    """Refuses, before it is read, what a request asks and a server of continuous batching would not do."""

    _cb: Any

    def __init__(self, serving: Batching, sampling: GenerationConfig, length: int) -> None:
        super().__init__(ContinuousBatchingConfig())
        self.serving, self.sampling, self.length = serving, sampling, length
        self._owners: dict[str, object] = {}  # by request, who has settled it last

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        ours, theirs = self.sampling, gen_config
        greedy = not ours.do_sample or ours.temperature == 0
        if greedy and theirs.temperature not in (None, 0, ours.temperature):
            raise _unlike("temperature", 0, theirs.temperature)
        for name in SAMPLING:
            wanted, got = _or_neutral(ours, name), _or_neutral(theirs, name)
            if wanted != got and not (name == "temperature" and greedy):
                raise _unlike(name, wanted, got)
        super().init_cb(model, self.sampling)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **kwargs: Any
    ) -> Any:
        self._settle(gen_config, len(inputs["input_ids"]), request_id)
        stops = _stops(gen_config)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, **kwargs)
        self._deliver_early()
        if not stops:
            return queue, streamer

        def stopped(pieces: int) -> None:
            streamer.cancel()
            streamer.put = lambda output: None
            # tokens that were on their way do not count; fewer than all say that a stop string was the reason
            streamer.total_tokens = min(pieces, gen_config.max_new_tokens - 1)

        return Stopping(queue, stops, stopped), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        if _stops(gen_config):
            return await self._up_to_stop(model, processor, inputs, gen_config, request_id)
        self._settle(gen_config, len(inputs["input_ids"]), request_id)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    async def _up_to_stop(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        if get_response_template(processor, model) is not None:
            raise HTTPException(
                status_code=400, detail="stop needs stream=true for this model, whose answers are parsed"
            )
        queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        text = ""
        while (piece := await queue.get()) is not None:
            if not isinstance(piece, str):
                raise RuntimeError(piece.msg)
            text += piece
        # tokens are counted, and not read
        return text, len(inputs["input_ids"]), [0] * streamer.total_tokens

    def _deliver_early(self) -> None:
        """Hands over the end of a request that came before its handler was there; what came before the end is in it."""
        router = self._cb.output_router
        for _ in range(router.output_queue.qsize()):
            output = router.output_queue.get_nowait()
            if output.is_finished() and output.request_id in router.result_handlers:
                router.deliver(output)

    def _settle(self, config: GenerationConfig, tokens: int, request: str) -> None:
        """How many tokens the answer to a prompt of so many may have; and that its request ends with its client's.
        Refuses what is too long."""
        if tokens == 0:
            raise HTTPException(status_code=400, detail="prompt must have at least one token, got none")
        asked, left = config.max_new_tokens, self.length - tokens
        if left < (asked or 1):
            raise HTTPException(
                status_code=400,
                detail=f"prompt and answer must have at most {self.length} tokens together, got a prompt of {tokens} "
                f"and max_tokens {asked or 'not given'}",
            )
        config.max_new_tokens = asked or min(max(NEW, self.sampling.max_new_tokens or 0), left)
        self.serving.check_prompt(tokens)
        if self._runs(request):
            raise HTTPException(409, f"x-request-id must be of no request that runs, got {request}")
        self._owners[request] = owner = object()
        when_over(lambda: self._leave(request, owner))

    def _runs(self, request: str) -> bool:
        return self._cb is not None and request in self._cb.output_router.result_handlers

    def _leave(self, request: str, owner: object) -> None:
        """The HTTP request that settled it is over; another may have come under the same id since."""
        if self._owners.get(request) is not owner:
            return
        del self._owners[request]
        if self._runs(request):  # who is answered does not
            self._cb.cancel_request(request)

    def stop(self) -> None:
        manager, self._cb = self._cb, None
        if manager is not None:
            manager.stop(block=True, hard_stop=True)


def _or_neutral(config: GenerationConfig, name: str) -> Any:
    value = getattr(config, name)
    return SAMPLING[name] if value is None else value


def _unlike(name: str, wanted: Any, got: Any) -> HTTPException:
    return HTTPException(
        status_code=400,
        detail=f"{name} must be {wanted}, as this server was started with, got {got}: one pass serves all requests, "
        "and samples alike for all",
    )


def _stops(config: GenerationConfig) -> list[str]:
    stops = config.stop_strings or []
    return [stops] if isinstance(stops, str) else list(stops)


class _State(GenerationState):
    """One manager for all requests."""

    def __init__(self, manager: _Requests) -> None:
        super().__init__(continuous_batching=True)
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Requests:
        return self.manager

    def shutdown(self) -> None:
        self.manager.stop()

    def is_cb_alive(self) -> bool:
        return self.manager.is_alive()


class _Refused:
    """An endpoint that cannot be had here."""

    def __init__(self, why: str, status: int = 501) -> None:
        self.why, self.status = why, status

    async def handle_request(self, *args: Any) -> None:
        raise HTTPException(status_code=self.status, detail=self.why)


def _answer(status: int, message: str, field: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, field), status_code=status)


def length_of(serving: Batching) -> int:
    """Tokens of a prompt and its answer together that a model was trained for; a streaming cache runs without end."""
    return UNLIMITED if serving.spec.kind == "streaming" else trained_length_of(serving.model.config)


def build_app(serving: Batching, name: str, tokenizer: Any, length: int | None = None, max_body: int = MAX_BODY) -> Any:
    """The FastAPI app. serving: the model's Batching. name: of the model, as clients give it. length: most tokens of a
    prompt and its answer, None = length_of. max_body: most bytes of a request's body. All requests are sampled as the
    model's generation config says.

    Beside transformers' routes there is /metrics, in the text format of Prometheus. A prompt that cannot fit into the
    pages is answered with 413, as is a body that is too long, a request that outgrows all of them with 507, a model
    that gives NaN with 500, a setting that cannot be had, a field that is wrong, or a length, with 400, and who waits
    when the server stops with 503. A client that goes away is no longer written for.
    """
    length = length_of(serving) if length is None else length
    state = _State(_Requests(serving, copy.deepcopy(serving.model.generation_config), length))
    models = _OneModel(name, serving.model, tokenizer, state.manager)
    given: dict[str, Any] = {"model_manager": models, "generation_state": state}
    refused: Any = _Refused
    chats: dict[str, Any] = {"chat_handler": Chat(**given), "response_handler": Responses(**given)}
    if getattr(tokenizer, "chat_template", None) is None:
        why = f"{name} has no chat template: use /v1/completions"
        chats = dict.fromkeys(chats, refused(why, 400))
    others = {"transcription_handler": "/v1/audio/transcriptions", "systemone_handler": "/v1/systemone"}
    known = inspect.signature(build_server).parameters  # transformers before 5.21 has no systemone
    unserved = {
        handler: refused(f"{path} is not served here; /v1/chat/completions is")
        for handler, path in others.items()
        if handler in known
    }
    app = build_server(completion_handler=Completion(**given), **unserved, **chats, **given)

    # of transformers' routes: models are not loaded here, and nobody ends the requests of others
    app.router.routes[:] = [x for x in app.router.routes if getattr(x, "path", "") not in ("/reset", "/load_model")]
    app.add_middleware(Departures)
    app.add_middleware(MaxBody, most=max_body)

    @app.exception_handler(AnyHTTPException)  # that of a path that is not there is no HTTPException of FastAPI's
    async def answered(request: Request, error: AnyHTTPException) -> JSONResponse:
        return _answer(error.status_code, str(error.detail))

    @app.exception_handler(FieldError)
    async def wrong(request: Request, error: FieldError) -> JSONResponse:
        return _answer(400, str(error), error.field)

    @app.exception_handler(RequestValidationError)
    async def no_object(request: Request, error: RequestValidationError) -> JSONResponse:
        said = "; ".join(str(x["msg"]) for x in error.errors())
        return _answer(422, f"body must be a JSON object: {said}")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return _answer(500, f"the server has failed: {type(error).__name__}: {error}")

    @app.exception_handler(RuntimeError)
    async def failed(request: Request, error: RuntimeError) -> JSONResponse:
        found = serving.failures.pop(request.state.request_id, error)
        status = found.status if isinstance(found, PagesError) else 500
        return _answer(status, str(found))

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        numbers = {name: x for name, x in serving.metrics().items() if math.isfinite(x)}
        return PlainTextResponse("".join(f"kvcompress_{name} {x:g}\n" for name, x in numbers.items()))

    return app


class _Server(uvicorn.Server):
    """Who is told twice to stop waits no longer for the requests that run."""

    _hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and not self._hurried:
            self._hurried = True
            for task in self.server_state.tasks:
                task.cancel()
        else:
            super().handle_exit(sig, frame)


def run_server(
    *, model: str, cache: str | None, pages: int, page_size: int, requests: int, batch_tokens: int, host: str,
    port: int, device: str, dtype: str, grace: float, temperature: float | None, length: int | None, max_body: int,
) -> None:  # fmt: skip
    """Serves until it is told to stop (SIGTERM, Ctrl-C); requests that run then have `grace` seconds. temperature: of
    all requests, 0 = greedy, None = as the model's generation config samples. length, max_body: as build_app takes
    them."""
    from ..write_text import load

    loaded, tokenizer = load(model, device, dtype)
    with Batching(loaded, cache, pages, page_size, requests, batch_tokens) as serving:
        if temperature is not None:
            loaded.generation_config.do_sample = temperature > 0
            loaded.generation_config.temperature = temperature or None
        length = length_of(serving) if length is None else length
        app = build_app(serving, model, tokenizer, length, max_body)
        print(*start_lines(serving, model, length), sep="\n", file=sys.stderr, flush=True)
        server = _Server(uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=math.ceil(grace)))
        with contextlib.suppress(KeyboardInterrupt):  # which it raises again at its end
            server.run()
    if not server.started:  # which has been said
        sys.exit(1)
