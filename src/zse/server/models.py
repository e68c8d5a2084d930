"""A served model as the server sees it: text ↔ token ids, and the chat template. The weights are the engine's."""

import logging
import os

from zse.errors import FormatError
from zse.formats import opening, recommended
from zse.sampling.params import recommended_params
from zse.tokenizer import chat_template, detokenize
from zse.tokenizer import load as tokenizer_load

log = logging.getLogger("zse.server")
QWEN3_RERANKER = "qwen3_reranker"  # a method of zse.server.relevance
RANK_POOLING = 4  # `pooling_type` of GGUF metadata: of rerankers


def trained_for(path: str, metadata: dict) -> str | None:
    """The method of a reranker among language models: its files are named as its authors named them, or its GGUF
    metadata say what it is for. A cross-encoder tells by its classifier."""
    if metadata.get("general.architecture") == "qwen3" and metadata.get("qwen3.pooling_type") == RANK_POOLING:
        return QWEN3_RERANKER
    names = os.path.basename(os.path.normpath(path)), str(metadata.get("general.name", "")).replace(" ", "-")
    return QWEN3_RERANKER if any(name.lower().startswith("qwen3-reranker") for name in names) else None


class ServedModel:
    """Tokenizer and chat template (or None) of one model; constant, used from several threads. sampling: the values of
    sampling fields that its authors recommend. prompts: that an embedding model is asked with, by name. method: of
    relevance.METHODS that it was trained for, where its files tell; None: they do not. refused: why its chat template
    is not used, "": it is, or there is none."""

    def __init__(
        self,
        tokenizer,
        template,
        detokenizer: type,
        name: str,
        sampling: dict[str, float],
        prompts: dict[str, str] | None = None,
        method: str | None = None,
        refused: str = "",
    ):
        self.sampling, self.prompts, self.method = sampling, prompts or {}, method
        self._tokenizer, self._template, self._detokenizer, self._name = tokenizer, template, detokenizer, name
        self.vocab_size: int = tokenizer.vocab_size
        self.has_chat_template, self.template_refused = template is not None, refused
        self.template_source: str | None = None if template is None else template.source

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with BOS where the model wants one; control tokens in it are plain text."""
        return self._tokenizer.encode(text)

    def encode_part(self, text: str, control: bool = False) -> list[int]:
        """Token ids of text that follows other text: without BOS. control: control tokens in it are such."""
        return self._tokenizer.encode(text, special=control, add_bos=False)

    def encode_pair(self, one: str, other: str, most: int | None = None) -> tuple[list[int], int]:
        """(token ids, where the second text begins) of a pair as a cross-encoder reads it. most: tokens; the second
        text is cut to fit, the first one where that is not enough."""
        tokenizer = self._tokenizer
        first, second = (tokenizer.encode(text, add_bos=False) for text in (one, other))
        if most is not None:
            over = len(tokenizer.join_pair(first, second)[0]) - most
            cut = min(max(over, 0), len(second))
            second = second[: len(second) - cut]
            first = first[: max(len(first) - max(over - cut, 0), 0)]
        return tokenizer.join_pair(first, second)

    def cut(self, ids: list[int], most: int) -> list[int]:
        """The first `most` tokens of what encode_text() gave, with its end where it has one."""
        if len(ids) <= most:
            return ids
        end = self._tokenizer.join_pair([], [])[0][-1:] if self._tokenizer.adds_eos else []
        return ids[: most - len(end)] + end

    def encode_chat(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        variables: dict | None = None,
        images: "chat_template.ImageText | None" = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Control tokens that stand in a
        message stay plain text. variables: what else the template reads, such as enable_thinking. images: how those of the
        messages stand in the prompt. Raises RequestError when the model has no template or the template refuses."""
        if self._template is None:
            raise chat_template.no_chat_template(self._name, self.template_refused)
        return self._template.encode(messages, tools=tools, images=images, **(variables or {}))

    def message_points(self, prompt: list[int]) -> tuple[int, ...]:
        """Behind how many tokens of a chat's prompt its last messages begin; () where that is not known."""
        return () if self._template is None else self._template.message_points(prompt)

    @property
    def spare_control(self) -> str:
        """The text of a control token that stands in no prompt, of padding or of what is unknown; "": there is none."""
        ids = self._tokenizer.pad_id, self._tokenizer.unknown_id
        texts = (self._tokenizer.text_of(id) for id in ids if id is not None and self._tokenizer.is_special(id))
        return next((text for text in texts if self.control_id(text) is not None), "")

    def control_id(self, text: str) -> int | None:
        """Id of the control token whose text this is, or None."""
        id = self._tokenizer.find(text)
        return id if id is not None and self._tokenizer.is_special(id) else None

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to a text; nothing for the rows that pad a model's embedding past its vocabulary."""
        return self._tokenizer.token_bytes(id) if id < self.vocab_size else b""

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def prompt_pieces(self, ids: list[int], is_text: bool) -> list[str]:
        """What each token adds to the text of a completion's prompt; the last has what an unfinished character is shown as.
        is_text: it was sent as text, to which the tokenizer added the control tokens that are there, and a space before it."""
        show = self._detokenizer(self._tokenizer, skip_special=is_text, continuation=False)
        pieces = [show.push(id) for id in ids]
        pieces[-1] += show.finish()
        return pieces

    def detokenizer(
        self, stop: tuple[str, ...], keep: tuple[str, ...] = (), skip_special: bool = True, min_tokens: int = 0
    ):
        """An incremental detokenizer: push(token) → text, finish() → text, stopped. keep: control tokens to show; all,
        unless skip_special."""
        return self._detokenizer(
            self._tokenizer, stop=stop, keep=keep, skip_special=skip_special, min_tokens=min_tokens
        )


def load(path: str, name: str, generation_config: str = "auto") -> ServedModel:
    """Read tokenizer, template and, unless generation_config is "none", the recommended sampling of a model file or
    folder; `name` for messages. A chat template that is refused leaves completions. Raises FormatError or
    UnsupportedError."""
    template, refused = None, ""
    with opening.open_model(path) as file:
        tokenizer = tokenizer_load.load_tokenizer(file)
        try:
            template = chat_template.load_chat_template(file, tokenizer)
        except FormatError as error:
            refused = error.reason.removesuffix(chat_template.WITHOUT)
            log.warning("%s: no chat, the chat template is refused: %s", name, refused)
        sampling = {} if generation_config == "none" else recommended_params(recommended.recommended(file)[0])
        beside = (file.hf_config or {}).get("sentence_transformers") or {}
        method = trained_for(path, file.metadata)
        more = beside.get("prompts"), method, refused
        return ServedModel(tokenizer, template, detokenize.IncrementalDetokenizer, name, sampling, *more)
