"""What models see with: how an image becomes tokens (`config`), and the towers that make their embeddings."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
