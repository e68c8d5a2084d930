"""POST /v1/chat/completions and /v1/completions: OpenAI's answers, whole or streamed."""

import functools

import msgspec

from zse.server.answering import CompletionRun, answer
from zse.server.generation import Choice, ChoiceDelta, chat_logprobs, completion_logprobs
from zse.server.prompt_scores import echoed_logprobs, prompt_logprobs
from zse.server.requests.completions import read_chat, read_completions
from zse.server.tools.chat import deltas, message

_encode = msgspec.json.encode


class _Writer:
    """What both routes have in common. A stream: deltas, one finish_reason per choice, usage if asked, [DONE]."""

    prefix, kind, chunk = "cmpl-", "text_completion", "text_completion"

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
        return _encode(body | self.of_prompt())

    def usage(self) -> dict:
        usage = self.job.usage
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }

    def of_prompt(self) -> dict:
        """What the body of a whole answer has beside its choices."""
        return {}

    def content(self, choice: Choice) -> dict:
        """What is the route's own of a whole choice."""
        raise NotImplementedError

    def part(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """A chunk for each piece, scores in the first, the finish reason in one of its own."""
        raise NotImplementedError

    def chunks(self, choice: Choice, contents: list[dict], delta: ChoiceDelta, logprobs, last: dict) -> bytes:
        """Chunks of one event. contents: what each has of its own; logprobs: makes them of scores; last: the content of the
        chunk that has the finish reason."""
        if contents and self.job.completion.params.logprobs is not None:
            contents[0]["logprobs"] = logprobs(delta.scores, self.job.model.token_bytes)
        if delta.finish_reason is not None:
            contents.append(last | {"finish_reason": delta.finish_reason})
        return b"".join([self.chunk_of(choice, content) for content in contents])

    def chunk_of(self, choice: Choice, content: dict) -> bytes:
        part = {"logprobs": None, "finish_reason": None} | content | {"index": choice.index}
        return b"data: " + _encode(self._envelope | {"choices": [part]}) + b"\n\n"

    def last(self) -> bytes:
        data = b"data: [DONE]\n\n"
        if self.job.completion.include_usage:
            data = b"data: " + _encode(self._envelope | {"choices": [], "usage": self.usage()}) + b"\n\n" + data
        return data


class _Chat(_Writer):
    """Messages; a stream says the role first."""

    prefix, kind, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def content(self, choice: Choice) -> dict:
        out: dict = {"message": message(choice)}
        if self.job.completion.params.logprobs is not None:
            out["logprobs"] = chat_logprobs(choice.scores, self.job.model.token_bytes)
        return out

    def of_prompt(self) -> dict:
        job = self.job
        if job.completion.params.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(job.prompts[0], job.measured[0], job.model.token_bytes)}

    def usage(self) -> dict:
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": self.job.usage.reasoning}}

    def first(self, choice: Choice) -> bytes:
        return self.chunk_of(choice, {"delta": {"role": "assistant", "content": ""}})

    def part(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        contents: list[dict] = [{"delta": words} for words in deltas(delta)]
        if delta.scores and not contents:
            contents = [{"delta": {"content": ""}}]
        return self.chunks(choice, contents, delta, chat_logprobs, {"delta": {}})


class _Text(_Writer):
    """Texts; with `echo` behind their prompts."""

    def content(self, choice: Choice) -> dict:
        job, echo, scores = self.job, self._echo(choice), None
        prompt = choice.index // job.completion.best_of
        if job.completion.params.logprobs is not None:
            scores = completion_logprobs(choice.scores, job.model.token_bytes)
            if echo:
                scores = self._echoed(choice, choice.scores, len(echo))
        out: dict = {"text": echo + choice.text, "logprobs": scores}
        if job.completion.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(job.prompts[prompt], job.measured[prompt], job.model.token_bytes)
        return out

    def first(self, choice: Choice) -> bytes:
        echo, scores = self._echo(choice), None
        if not echo:
            return b""
        if self.job.completion.params.logprobs is not None:
            scores = self._echoed(choice, [], len(echo))
        return self.chunk_of(choice, {"text": echo, "logprobs": scores})

    def part(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        contents: list[dict] = [{"text": delta.text}] if delta.text or delta.scores else []
        return self.chunks(choice, contents, delta, completion_logprobs, {"text": ""})

    def _echo(self, choice: Choice) -> str:
        """The choice's prompt, where it is to be repeated."""
        if not self.job.completion.echo:
            return ""
        given = self.job.completion.prompts[choice.index // self.job.completion.best_of]
        return given if type(given) is str else self.job.model.decode(given)

    def _echoed(self, choice: Choice, scores: list, num_chars: int) -> dict:
        job, prompt = self.job, choice.index // self.job.completion.best_of
        return echoed_logprobs(job.prompts[prompt], job.measured[prompt], scores, num_chars, job.model.token_bytes)


# POST /v1/chat/completions and POST /v1/completions
chat = functools.partial(answer, read=lambda body: (read_chat(body), _Chat))
text = functools.partial(answer, read=lambda body: (read_completions(body), _Text))
