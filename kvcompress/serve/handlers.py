"""What requests of OpenAI's three ways to ask go through before and after transformers generates."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

from fastapi import Response
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from .bodies import CHAT, COMPLETION, RESPONSE, Check, FieldError, check_body

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class _Strict(BaseHandler):
    """In place of what transformers' handlers do before they generate: what would change an answer, and does not here,
    is refused and not dropped, and prompts are tokenised while others are answered."""

    fields: ClassVar[Mapping[str, Check]]
    prompt: ClassVar[str]  # the field that must be given
    streams = False  # where nothing is said
    _tokenizing = threading.Lock()  # which tokenizers do not promise to do for several at once

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        body = check_body(body, self.fields, self.prompt) | {"stream": body.get("stream", self.streams)}
        name, model, tokenizer = self._resolve_model(body)
        manager = self.generation_state.get_manager(name, use_cb=True)
        inputs = await asyncio.to_thread(self._tokenized, tokenizer, body)
        try:
            config = self._build_generation_config(body, model.generation_config, use_cb=True)
        except ValueError as error:  # settings that are right each by itself
            raise FieldError("generation_config", f"be one that transformers takes: {error}") from None
        manager.init_cb(model, config)
        given = (request_id, model, tokenizer, name, *self._also(body), inputs, config)
        if body["stream"]:
            return self._to_the_end(self._streaming(*given, gen_manager=manager))
        answer: Response = await self._non_streaming(*given, gen_manager=manager)
        return answer

    def _tokenized(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        with self._tokenizing:
            return self._inputs(tokenizer, body)

    def _inputs(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _also(self, body: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments of transformers' _streaming beside those of all."""
        return ()

    def _to_the_end(self, response: StreamingResponse) -> StreamingResponse:
        """As clients of OpenAI's API know it, who wait for it."""
        pieces = response.body_iterator

        async def ended() -> AsyncGenerator[Any, None]:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
            yield "data: [DONE]\n\n"

        response.body_iterator = ended()
        return response

    def _chat(self, tokenizer: Any, messages: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
        """Tokens of a chat. settings: of the template alone."""
        known = inspect.signature(tokenizer.apply_chat_template).parameters
        if taken := sorted({"messages", *known} & {*settings}):
            raise FieldError(f"chat_template_kwargs.{taken[0]}", "not be given: it is the server's")
        said = [{"role": message["role"], "content": message["content"]} for message in messages]  # else is empty
        turns = self.get_processor_inputs_from_messages(said, Modality.LLM)
        try:
            return tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=True, **settings
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise FieldError(self.prompt, f"be as the model's chat template has them: {error}") from None

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> GenerationConfig:
        config: GenerationConfig = super()._build_generation_config(body, *args, **kwargs)
        if all(body.get(name) is None for name in (*_LENGTHS, "generation_config")):
            config.max_new_tokens = None  # then as many as fit, at most as this server gives
        return config


class Chat(_Strict, ChatCompletionHandler):
    fields, prompt = CHAT, "messages"

    def _inputs(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        return self._chat(tokenizer, body["messages"], body.get("chat_template_kwargs", {}))


class Completion(_Strict, CompletionHandler):
    fields, prompt = COMPLETION, "prompt"

    def _inputs(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        return tokenizer(body["prompt"])


class Responses(_Strict, ResponseHandler):
    fields, prompt, streams = RESPONSE, "input", True  # as transformers' has it

    def _inputs(self, tokenizer: Any, body: dict[str, Any]) -> Any:
        return self._chat(tokenizer, self._normalize_input(body), {})

    def _also(self, body: dict[str, Any]) -> tuple[Any, ...]:
        return (body,)

    def _to_the_end(self, response: StreamingResponse) -> StreamingResponse:
        return response  # whose last event says so
