"""A reply of an LLM: what its caller gets of it, at once or as it is made."""

from collections import deque
from typing import Any, NamedTuple

import msgspec

from zse.tokenizer import detokenize


class Output(NamedTuple):
    """A finished reply. text: without stop string and control tokens. token_ids: to the end token or a stop string's last.
    finish_reason: "stop" or "length". logprobs: a TokenLogprob (logprob, top) for each token, when asked for.
    cached_tokens: of the prompt, that were in the prefix cache. prompt_logprobs: of each token of the prompt, None for
    the first, when asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: "list | None"
    prompt_token_ids: list[int]
    cached_tokens: int = 0
    prompt_logprobs: "list | None" = None


class Delta(NamedTuple):
    """What a step added to a reply. text may be "" while a character or a possible stop string is incomplete.
    finish_reason: None until the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: "list | None" = None


class Reply:
    """One request: its tokens and text so far. take() turns the engine's outputs into deltas."""

    def __init__(self, llm: Any, prompt: list[int], params, options):
        self._llm, self._params, self._prompt, self.id = llm, params, prompt, llm._next_id
        if llm._template is not None and llm._loaded.model_config.has_state:
            options = msgspec.structs.replace(options, state_points=llm._template.message_points(prompt))
        llm._engine.submit(self.id, prompt, params, options)
        llm._next_id += 1
        llm._streams[self.id] = deque()
        self.finish_reason: str | None = None
        self._tokens: list[int] = []
        self._logprobs: list | None = None if params.logprobs is None else []
        self._text: list[str] = []
        self._detokenizer: Any = None
        self._cached_tokens = 0

    def take(self) -> list[Delta]:
        """Deltas of the outputs that came since last time. Raises RequestError when the request failed."""
        deltas = []
        waiting = self._llm._streams.get(self.id)
        while waiting and self.finish_reason is None:
            deltas.append(self._delta(waiting.popleft()))
        return deltas

    def _delta(self, output) -> Delta:
        if output.error is not None:
            raise output.error
        if self._detokenizer is None:  # here, not at submission: text may be wanted of token ids without a tokenizer
            self._detokenizer = detokenize.IncrementalDetokenizer(
                self._llm.tokenizer, stop=self._params.stop, min_tokens=self._params.min_tokens
            )
        detokenizer, text, tokens, logprobs = self._detokenizer, "", output.tokens, output.logprobs
        # The token that ended the reply is no part of its text.
        for token in tokens[:-1] if output.finish == "stop" else tokens:
            text += detokenizer.push(token)
        if detokenizer.stopped:
            self.finish_reason = "stop"
            self._llm._engine.cancel(self.id)
            used = detokenizer.num_tokens - len(self._tokens)  # drafts that the step accepted behind are no part of it
            tokens, logprobs = tokens[:used], logprobs and logprobs[:used]
        elif output.finish:
            text += detokenizer.finish()
            self.finish_reason = "stop" if detokenizer.stopped else output.finish
        self._tokens += tokens
        self._cached_tokens += output.cached_tokens
        if self._logprobs is not None and logprobs:
            self._logprobs += logprobs
        self._text.append(text)
        return Delta(text, tokens, self.finish_reason, logprobs)

    def output(self) -> Output:
        return Output(
            "".join(self._text),
            self._tokens,
            self.finish_reason or "stop",
            self._logprobs,
            self._prompt,
            self._cached_tokens,
        )

    def close(self) -> None:
        """Forget the request, stopping it if it still runs."""
        if self._llm._streams.pop(self.id, None) is not None and self.finish_reason is None:
            self._llm._engine.cancel(self.id)
