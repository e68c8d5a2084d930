"""A served model as the server sees it: text ↔ token ids, and the chat template. The weights are the engine's."""

from zse.errors import ZSEError
from zse.server.errors import APIError


class ServedModel:
    """Tokenizer and chat template of one model; constant, used from several threads."""

    def __init__(self, tokenizer, template):
        self._tokenizer, self._template = tokenizer, template
        self.vocab_size: int = tokenizer.vocab_size
        self.token_bytes = tokenizer.token_bytes
        self.has_chat_template = template is not None

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with BOS where the model wants one; control tokens in it are plain text."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Control tokens that stand in a
        message stay plain text. Raises APIError when the model has no template or the template refuses."""
        if self._template is None:
            raise APIError("chat_template_missing", "This model has no chat template; use /v1/completions.", "messages")
        try:
            rendered = self._template.render(messages, add_generation_prompt=True)
        except ZSEError as error:
            raise APIError("chat_template_failed", f"The chat template refused the messages: {error}",
                           "messages") from None
        return self._tokenizer.encode(rendered.text, special=True, add_bos=False, barriers=rendered.barriers)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def detokenizer(self, stop: tuple[str, ...]):
        """An incremental detokenizer: push(token) → text, finish() → text, stopped."""
        from zse.tokenizer.detokenize import IncrementalDetokenizer
        return IncrementalDetokenizer(self._tokenizer, stop=stop)


def load(path: str) -> ServedModel:
    """Read tokenizer and template of a model file or folder. Raises FormatError or UnsupportedError."""
    from zse.formats.source import open_model
    from zse.tokenizer.load import load_tokenizer
    with open_model(path) as source:
        tokenizer = load_tokenizer(source)
        if source.chat_template is None:
            return ServedModel(tokenizer, None)
        from zse.tokenizer.chat_template import ChatTemplate
        return ServedModel(tokenizer, ChatTemplate(source.chat_template, tokenizer))
