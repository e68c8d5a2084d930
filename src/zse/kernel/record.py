"""Classes that only hold values, without the module dataclasses: it takes a starting engine 3 ms to import, 10 with the
inspect that it brings, and 0.5 more for each class, because it compiles their methods from text."""

from typing import Any, dataclass_transform


@dataclass_transform()
class Record:
    """A subclass's annotations are its fields, values of the class their defaults; two are equal if all fields are. Not to be
    changed once it is in a set or a key."""

    _fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(cls.__annotations__)

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = self._fields
        given = dict(zip(fields, values)) | named
        if len(given) < len(values) + len(named) or not given.keys() <= set(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}, each once")
        missing = [name for name in fields if name not in given and not hasattr(type(self), name)]
        if missing:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
        for name in fields:
            if name not in given:
                default = getattr(type(self), name)
                given[name] = dict(default) if isinstance(default, dict) else default
        self.__dict__.update(given)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in self._fields)

    def __hash__(self) -> int:
        return hash((type(self), getattr(self, self._fields[0])))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"
