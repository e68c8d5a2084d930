"""Which tokens run next. Pure: see scheduler.py, which also says what each file is for."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
