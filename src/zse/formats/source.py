"""The one way to a model's data, whatever the file: `open_model(path)` -> `ModelSource`.

    source = open_model("SmolLM2-135M-Instruct.Q4_1.gguf")
    info = source.tensors["blk.0.attn_q.weight"]        # type Q4_1, shape (576, 576), offset, nbytes
    data = source.read(info)                            # or os.pread(source.fd(info), info.nbytes, info.offset)

Opening reads headers only, never numpy, and checks every number against the size of the real file. Tensor names are
the file's own; `source.naming` says whose they are ("gguf" or "hf"), which for a `.zse` is that of its origin.
"""

import os
from collections import namedtuple

from zse.errors import FormatError, UnsupportedError
from zse.formats.file import ModelFile
from zse.quant.scheme import AffineScheme, DenseScheme, parse_scheme

SUPPORTED_FILES = ("*.gguf", "*.safetensors", "*.zse", "a directory with config.json and *.safetensors")


class TensorInfo(namedtuple("TensorInfo", "name type shape file offset nbytes layout crc32", defaults=("rows", None))):
    """Where a tensor lies.

    type: "F32", "F16", "BF16", "Q4_1", ... (GGUF's and safetensors' names), or for layout r16 a scheme's name.
    shape: outermost first, so a weight is (outputs, inputs) and row-major; GGUF's reversed order is undone.
    file: the ModelFile; offset: absolute, in bytes; nbytes: exactly the tensor's bytes.
    layout: "rows" (dense, row-major), "ggml" (rows of quantized blocks) or "r16" (planes, zse.quant.scheme).
    crc32: of the nbytes, where the file has one (`.zse`).
    """

    __slots__ = ()

    @property
    def fd(self) -> int:
        return self.file.fd

    @property
    def scheme(self) -> AffineScheme | DenseScheme:
        """The scheme that the tensor has (r16) or takes in memory without being quantized anew (the others).
        UnsupportedError for element types that are no weights, such as I64."""
        if self.layout == "r16":
            return parse_scheme(self.type)
        if self.layout == "ggml":
            from zse.formats.gguf import AFFINE
            return AFFINE[self.type]
        return DenseScheme(self.type.lower())

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class TokenizerSource:
    """What a model says about its tokenizer, unparsed.

    kind "gguf": `fields` is the `tokenizer.*` part of the GGUF metadata under its full keys: strings, numbers, and
    StringArray / ScalarArray (zse.formats.arrays: `.raw`, `.count`) for tokenizer.ggml.tokens, merges, scores and
    token_type.
    kind "hf": `json` is the content of tokenizer.json; `config` of tokenizer_config.json; `special_tokens` of
    special_tokens_map.json (dicts, empty where the file is absent).
    """

    __slots__ = ("kind", "fields", "config", "special_tokens", "_read_json")

    def __init__(self, kind: str, fields: dict | None = None, read_json=None, config: dict | None = None,
                 special_tokens: dict | None = None):
        self.kind, self.fields, self._read_json = kind, fields or {}, read_json
        self.config, self.special_tokens = config or {}, special_tokens or {}

    @property
    def json(self) -> bytes:
        """tokenizer.json, read at every access."""
        if self._read_json is None:
            raise ValueError(f"a {self.kind} tokenizer has no tokenizer.json")
        return self._read_json()


class ModelSource:
    """An open model.

    kind: "gguf", "safetensors" or "zse". path: what was opened. naming: "gguf" or "hf".
    metadata: GGUF's key -> value (naming "gguf"; big arrays are lazy), or the safetensors headers' own key -> text.
    hf_config, generation_config: dicts (naming "hf"), else None.
    tensors: name -> TensorInfo, in file order. tokenizer: TokenizerSource or None. chat_template: str or None.
    interleaved_rope: Q and K rows are in GGUF's llama order (see gguf.rope_row_order); a converted `.zse` never is.
    provenance: dict of where a `.zse` comes from, else {}.
    """

    def __init__(self, kind: str, path: str, naming: str, files: list[ModelFile], tensors: dict[str, TensorInfo], *,
                 metadata: dict | None = None, hf_config: dict | None = None, generation_config: dict | None = None,
                 tokenizer: TokenizerSource | None = None, chat_template: str | None = None,
                 interleaved_rope: bool = False, provenance: dict | None = None):
        self.kind, self.path, self.naming, self.files, self.tensors = kind, path, naming, files, tensors
        self.metadata = metadata or {}
        self.hf_config, self.generation_config = hf_config, generation_config
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.interleaved_rope, self.provenance = interleaved_rope, provenance or {}

    @property
    def architecture(self) -> str:
        """GGUF's `general.architecture` ("llama") or the first of config.json's `architectures` ("LlamaForCausalLM"),
        "" if it says none."""
        if self.naming == "gguf":
            name = self.metadata.get("general.architecture")
        else:
            names = (self.hf_config or {}).get("architectures")
            name = names[0] if isinstance(names, list) and names else None
        return name if isinstance(name, str) else ""

    @property
    def vocab_size(self) -> int | None:
        """Entries of the vocabulary, which is how many rows the embedding and the LM head have. None: not known."""
        if self.naming == "hf":
            config = self.hf_config or {}
            nested = config.get("text_config")
            size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
        else:
            tokens = self.metadata.get("tokenizer.ggml.tokens")
            size = getattr(tokens, "count", None) or self.metadata.get(f"{self.architecture}.vocab_size")
        return size if type(size) is int else None

    def info(self, tensor: str | TensorInfo) -> TensorInfo:
        """The tensor of that name. FormatError if the model has none."""
        if isinstance(tensor, TensorInfo):
            return tensor
        info = self.tensors.get(tensor)
        if info is None:
            raise FormatError(self.path, 0, tensor, "the model has no such tensor")
        return info

    def fd(self, tensor: str | TensorInfo) -> int:
        """The file descriptor to pread the tensor from."""
        return self.info(tensor).file.fd

    def read(self, tensor: str | TensorInfo, start: int = 0, nbytes: int | None = None) -> bytes:
        """The tensor's bytes [start, start + nbytes), or all from `start` on. ValueError outside the tensor."""
        info = self.info(tensor)
        nbytes = info.nbytes - start if nbytes is None else nbytes
        self._check_range(info, start, nbytes)
        return info.file.read(info.offset + start, nbytes, info.name)

    def readinto(self, tensor: str | TensorInfo, buffer, start: int = 0) -> None:
        """Fills a writable buffer with the tensor's bytes from `start` on."""
        info = self.info(tensor)
        self._check_range(info, start, memoryview(buffer).nbytes)
        info.file.readinto(info.offset + start, buffer, info.name)

    @staticmethod
    def _check_range(info: TensorInfo, start: int, nbytes: int) -> None:
        if start < 0 or nbytes < 0 or start + nbytes > info.nbytes:
            raise ValueError(f"{info.name}: bytes [{start}, {start + nbytes}) of {info.nbytes}")

    @property
    def nbytes(self) -> int:
        """Size of all the model's files."""
        return sum(file.size for file in self.files)

    def check_unchanged(self) -> None:
        """FormatError if a file was written to since it was opened. Call it when everything has been read."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> "ModelSource":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_model(path: str | os.PathLike) -> ModelSource:
    """Opens a GGUF file, a `.zse` file, a safetensors file, or a directory with config.json and safetensors.

    Files are told apart by their first bytes, not by their name. FormatError for a file that is damaged or not a
    model; UnsupportedError for a tensor type or version that is not known.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        from zse.formats.directory import open_directory
        return open_directory(path)
    file = ModelFile(path)
    start = file.read(0, min(16, file.size))
    if start[:4] == b"GGUF" or start[:4] == b"FUGG":
        from zse.formats.gguf import open_gguf
        return open_gguf(file)
    if start[1:4] == b"ZSE":
        from zse.formats.zse import open_zse
        return open_zse(file)
    if start[8:9] == b"{":
        from zse.formats.directory import open_single
        return open_single(file)
    file.close()
    raise UnsupportedError("model file", path, SUPPORTED_FILES)
