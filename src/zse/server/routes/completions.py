"""POST /v1/chat/completions and /v1/completions: OpenAI's answers, whole or streamed."""

import functools
from abc import ABC, abstractmethod

import msgspec

from zse.server.answering import Choice, ChoiceDelta, CompletionRun, answer
from zse.server.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs, prompt_logprobs
from zse.server.requests.completions import read_chat, read_completions
from zse.server.tools.chat import message

_encode = msgspec.json.encode


class _Writer(ABC):
    """What both routes have in common. A stream: deltas, one finish_reason per choice, usage if asked, [DONE]."""

    prefix, kind, chunk = "cmpl-", "text_completion", "text_completion"
    nothing: dict = {"text": ""}  # a piece that says only what else is in it

    def __init__(self, job: CompletionRun):
        work, completion = job.work, job.completion
        self.job = job
        self._envelope = {
            "id": self.prefix + work.request.id.removeprefix("req_"),
            "object": self.chunk if completion.stream else self.kind,
            "created": job.created,
            "model": completion.model or work.served.name,
            "system_fingerprint": work.served.fingerprint,
        }
        if completion.service_tier:
            self._envelope["service_tier"] = "default"
        if completion.include_usage:
            self._envelope["usage"] = None

    def whole(self) -> bytes:
        choices, best_of, n = self.job.choices, self.job.completion.best_of, self.job.completion.n
        answers = []
        for prompt in range(len(self.job.prompts)):
            group = choices[prompt * best_of : (prompt + 1) * best_of]
            answers += sorted(group, key=lambda choice: choice.rank)[:n] if best_of > n else group
        body = self._envelope | {
            "choices": [
                {"index": index, "logprobs": None, "finish_reason": choice.finish_reason} | self.content(choice)
                for index, choice in enumerate(answers)
            ],
            "usage": self.usage(),
        }
        job = self.job
        if job.completion.extras.return_token_ids:
            for part, choice in zip(body["choices"], answers, strict=True):
                part |= {"token_ids": choice.tokens}
                (body if job.completion.messages is not None else part).update(self.prompt_ids(choice))
        if job.completion.messages is not None and job.completion.params.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(job.prompts[0], job.measured[0], job.model.token_bytes)
        if job.completion.extras.timings:
            body["timings"] = job.timings
        if job.grounding is not None:
            body["rag"] = job.grounding.shown
        return _encode(body)

    def usage(self) -> dict:
        usage = self.job.usage
        out: dict = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
        if self.job.completion.messages is not None:
            out["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
        return out

    @abstractmethod
    def content(self, choice: Choice) -> dict:
        """What is the route's own of a whole choice."""

    def part(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> bytes:
        """A chunk for each piece, the finish reason in one of its own."""
        out, pieces, envelope = b"", self.pieces(choice, delta, is_first), self._envelope
        if self.job.grounding is not None and is_first and not choice.index:
            envelope = envelope | {"rag": self.job.grounding.shown}
        if delta.tokens:
            pieces = pieces or [dict(self.nothing)]
            pieces[-1]["token_ids"] = delta.tokens
            if is_first:
                envelope = envelope | self.prompt_ids(choice)
        for piece in pieces:
            part = {"index": choice.index, "logprobs": None, "finish_reason": None} | piece
            out += b"data: " + _encode(envelope | {"choices": [part]}) + b"\n\n"
        return out

    def prompt_ids(self, choice: Choice) -> dict:
        return {"prompt_token_ids": self.job.prompts[choice.index // self.job.completion.best_of]}

    @abstractmethod
    def pieces(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> list[dict]:
        """What the chunks of one event hold of the choice; scores are in the first one that has text."""

    def last(self) -> bytes:
        data, completion, more = b"data: [DONE]\n\n", self.job.completion, {}
        if completion.include_usage:
            more["usage"] = self.usage()
        if completion.extras.timings:
            more["timings"] = self.job.timings
        return b"data: " + _encode(self._envelope | {"choices": []} | more) + b"\n\n" + data if more else data


class _Chat(_Writer):
    """Messages."""

    prefix, kind, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    nothing: dict = {"delta": {"content": ""}}

    def content(self, choice: Choice) -> dict:
        out: dict = {"message": message(choice)}
        if self.job.completion.params.logprobs is not None:
            out["logprobs"] = chat_logprobs(choice.scores, self.job.model.token_bytes)
        return out

    def pieces(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> list[dict]:
        """The role; reasoning, content, then for each call its id and name, then its arguments."""
        out: list[dict] = []
        if delta.reasoning:
            out.append({"delta": {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}})
        if delta.text or delta.scores and not delta.reasoning and not delta.calls:
            out.append({"delta": {"content": delta.text} | ({"citations": delta.citations} if delta.citations else {})})
        for index, call in delta.calls:
            if call.name:
                function = {"name": call.name, "arguments": ""}
                begun = {"index": index, "id": call.id, "type": "function", "function": function}
                out.append({"delta": {"tool_calls": [begun]}})
            if call.arguments:
                out.append({"delta": {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}})
        if out and self.job.completion.params.logprobs is not None:
            out[0]["logprobs"] = chat_logprobs(delta.scores, self.job.model.token_bytes)
        if delta.finish_reason is not None:
            out.append({"delta": {}, "finish_reason": delta.finish_reason})
        return [{"delta": {"role": "assistant", "content": ""}}, *out] if is_first else out


class _Text(_Writer):
    """Texts; with `echo` behind their prompts."""

    def __init__(self, job: CompletionRun):
        super().__init__(job)
        self._echoes: dict[int, str] = {}  # by prompt

    def content(self, choice: Choice) -> dict:
        job, echo, scores = self.job, self._echo(choice), None
        prompt = choice.index // job.completion.best_of
        if job.completion.params.logprobs is not None:
            scores = completion_logprobs(choice.scores, job.model.token_bytes)
            if echo:
                scores = self._echoed(choice, choice.scores)
        out: dict = {"text": echo + choice.text, "logprobs": scores}
        if job.completion.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(job.prompts[prompt], job.measured[prompt], job.model.token_bytes)
        return out

    def pieces(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> list[dict]:
        has_scores, out = self.job.completion.params.logprobs is not None, []
        echo = self._echo(choice)
        if echo and is_first:
            out.append({"text": echo, "logprobs": self._echoed(choice, []) if has_scores else None})
        if delta.text or delta.scores:
            placed = [score.moved(len(echo)) for score in delta.scores] if echo else delta.scores
            scores = completion_logprobs(placed, self.job.model.token_bytes) if has_scores else None
            out.append({"text": delta.text, "logprobs": scores})
        if delta.finish_reason is not None:
            out.append({"text": "", "finish_reason": delta.finish_reason})
        return out

    def _echo(self, choice: Choice) -> str:
        """The choice's prompt, where it is to be repeated: as it was sent, or what was kept of it."""
        completion, prompt = self.job.completion, choice.index // self.job.completion.best_of
        if not completion.echo:
            return ""
        if prompt not in self._echoes:
            given = completion.prompts[prompt]
            is_whole = type(given) is str and completion.extras.truncate_prompt_tokens is None
            self._echoes[prompt] = given if is_whole else "".join(self._prompt_pieces(prompt))
        return self._echoes[prompt]

    def _prompt_pieces(self, prompt: int) -> list[str]:
        return self.job.model.prompt_pieces(self.job.prompts[prompt], type(self.job.completion.prompts[prompt]) is str)

    def _echoed(self, choice: Choice, scores: list) -> dict:
        job, prompt, echo = self.job, choice.index // self.job.completion.best_of, self._echo(choice)
        ids, pieces = job.prompts[prompt], self._prompt_pieces(prompt)
        return echoed_logprobs(ids, job.measured[prompt], pieces, len(echo), scores, job.model.token_bytes)


chat_writer = _Chat
# POST /v1/chat/completions and POST /v1/completions
chat = functools.partial(answer, read=lambda body: (read_chat(body), _Chat))
text = functools.partial(answer, read=lambda body: (read_completions(body), _Text))
