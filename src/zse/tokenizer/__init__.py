"""Text <-> token ids, chat templates, incremental detokenization. Start with `zse.tokenizer.load.load_tokenizer`."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
