"""Model directories in the Hugging Face layout: config.json, *.safetensors, tokenizer.json, chat template.

Data only: code (*.py, what `auto_map` names) and pickles (*.bin, *.pt, ...) that lie beside the weights are not read. A
directory whose weights are pickles is refused.
"""

import os
from functools import partial

from zse.errors import FormatError
from zse.formats import quantized, sentence, vocabulary
from zse.formats.file import INCOMPLETE, ModelFile, read_object, read_whole
from zse.formats.safetensors import filled, read_header
from zse.formats.source import INTERLEAVED_ROPE, ModelSource, TensorInfo, TokenizerSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_TOKENIZER_BYTES = 1 << 28
MAX_TEMPLATE_BYTES = 1 << 20
MAX_SHARDS = 1024
SENTENCE_FILES = {
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
}  # zse.formats.sentence's


# config.json's `model_type` of models whose own files name no architecture → its name.
ARCHITECTURES = {"deepseek_vl_v2": "DeepseekVLV2ForCausalLM"}
# Chat templates of models whose files have none, as their authors' code writes a conversation.
TEMPLATES = {
    # DeepSeek-VL2 at ef9f91e2, processing_deepseek_vl_v2.py: format_messages_v2 ("deepseek" of conversation.py): contents are stripped,
    # a system message has nothing around it, an answer ends with the end of text; images as in the examples.
    "DeepseekVLV2ForCausalLM": """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set ns = namespace(text='') -%}
{%- if message['content'] is string -%}
{%- set ns.text = message['content'] -%}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{%- set ns.text = ns.text + '<image>\\n' -%}
{%- else -%}{%- set ns.text = ns.text + part['text'] -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}{{- '<|User|>: ' + ns.text | trim + '\\n\\n' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|Assistant|>:' + ns.text | trim + eos_token -}}
{%- elif message['role'] == 'system' -%}{{- ns.text | trim -}}
{%- else -%}{{- raise_exception('DeepSeek-VL2 has messages of system, user and assistant') -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>:' -}}{%- endif -%}
"""
}


def open_directory(path: str) -> ModelSource:
    """Opens a directory with config.json and safetensors (single, sharded with an index, or several files)."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise FormatError(path, 0, "directory", f"cannot be read: {error.strerror}") from None
    if "config.json" not in names:
        raise FormatError(path, 0, "config.json", "is missing; a model directory has config.json and *.safetensors")
    config_path = os.path.join(path, "config.json")
    config = read_object(config_path, "config.json")
    if "language_config" in config:  # DeepSeek-VL2's name of it
        config = {"text_config": config["language_config"]} | config
    if not config.get("architectures") and str(config.get("model_type")) in ARCHITECTURES:
        config = config | {"architectures": [ARCHITECTURES[str(config["model_type"])]]}
    scheme = config.get("quantization_config") or config.get("compression_config") or _modelopt(path, names)
    if not isinstance(scheme, dict | None):
        raise FormatError(config_path, 0, "quantization_config", "is not an object")
    method = None if scheme is None else quantized.read_method(path, scheme)
    generation = _optional_object(path, names, "generation_config.json")
    tokenizer, template = _tokenizer(path, names)
    if template is None:
        template = next((TEMPLATES[name] for name in _texts(config.get("architectures")) if name in TEMPLATES), None)
    dense_files: list[str] = []
    if SENTENCE_FILES.intersection(names) and (found := sentence.settings(path, names)) is not None:
        beside, dense_files = found
        config = config | {"sentence_transformers": beside}
    processor = _image_processor(path, names) if "vision_config" in config else None
    files: list[ModelFile] = []
    try:
        tensors, metadata = _open_tensors(path, names, files)
        for number, name in enumerate(dense_files):
            tensors |= _open_dense(name, number, files)
        if method is not None:
            tensors = quantized.combine(path, tensors, method)
    except Exception:
        for file in files:
            file.close()
        raise
    return ModelSource(
        "safetensors",
        path,
        "hf",
        files,
        tensors,
        metadata=metadata,
        hf_config=config,
        generation_config=generation,
        tokenizer=tokenizer,
        chat_template=template,
        interleaved_rope=any(name in INTERLEAVED_ROPE["hf"] for name in _texts(config.get("architectures"))),
        image_processor=processor,
    )


def _image_processor(path: str, names: list[str]) -> dict | None:
    """preprocessor_config.json, or its part of transformers 5's processor_config.json, which is DeepSeek-VL2's whole."""
    found = _optional_object(path, names, "preprocessor_config.json")
    if found is None:
        whole = _optional_object(path, names, "processor_config.json") or {}
        found = whole.get("image_processor", whole if "candidate_resolutions" in whole else None)
    return found if isinstance(found, dict) else None


def _texts(value) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def open_single(file: ModelFile) -> ModelSource:
    """Opens a safetensors file. A model.safetensors with a config.json beside it is that whole directory."""
    folder = os.path.dirname(file.path) or "."
    if os.path.basename(file.path) == SINGLE and os.path.exists(os.path.join(folder, "config.json")):
        file.close()
        return open_directory(folder)
    tensors, metadata = read_header(file)
    return ModelSource("safetensors", file.path, "hf", [file], filled(tensors), metadata=metadata)


def _modelopt(path: str, names: list[str]) -> dict | None:
    """What ModelOpt's older exports say in a file of their own."""
    found = (_optional_object(path, names, "hf_quant_config.json") or {}).get("quantization")
    if not isinstance(found, dict) or not found.get("quant_algo"):
        return None
    return {"quant_method": "modelopt"} | found


def _open_tensors(path: str, names: list[str], files: list[ModelFile]) -> tuple[dict[str, TensorInfo], dict]:
    """Tensors and metadata of all shards; appends every opened file to `files`, also when it raises."""
    weight_map = None
    if INDEX in names:
        weight_map = _weight_map(os.path.join(path, INDEX))
        shards = sorted(set(weight_map.values()))
        if SINGLE in names and not any(shard in names for shard in shards):
            weight_map = None  # the index of shards that became the one file, which transformers reads, too
    if weight_map is None:
        shards = [SINGLE]
        if SINGLE not in names:
            shards = [name for name in names if name.endswith(".safetensors") and not sentence.is_module(name)]
    if not shards:
        for name in names:
            if name.lower().endswith(PICKLES):
                reason = "is a pickle, which can run code when it is read; only *.safetensors weights are"
                raise FormatError(os.path.join(path, name), 0, "file", reason)
        raise FormatError(path, 0, SINGLE, "is missing; a model directory has config.json and *.safetensors")
    if len(shards) > MAX_SHARDS:
        raise FormatError(path, 0, INDEX, f"{len(shards)} files; at most {MAX_SHARDS} are read")
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        if shard not in names:
            raise FormatError(os.path.join(path, shard), 0, "file", f"is missing: {INDEX} names it{INCOMPLETE}")
        file = ModelFile(os.path.join(path, shard))
        files.append(file)
        found, extra = read_header(file)
        metadata.update(extra)
        for name, info in found.items():
            if name in tensors:
                raise file.wrong(info.offset, name, f"stands also in {tensors[name].file.path}")
            tensors[name] = info
    for name, shard in (weight_map or {}).items():
        if name not in tensors or os.path.basename(tensors[name].file.path) != shard:
            raise FormatError(os.path.join(path, INDEX), 0, name, f"is not in {shard}, where the index puts it")
    return filled(tensors), metadata


def _open_dense(path: str, number: int, files: list[ModelFile]) -> dict[str, TensorInfo]:
    """Weight and bias of a Dense module, by names of their own."""
    file = ModelFile(path)
    files.append(file)
    parts = filled(read_header(file)[0])
    return {
        sentence.dense_name(number, part): info._replace(name=sentence.dense_name(number, part))
        for part in ("weight", "bias")
        if (info := parts.get(f"linear.{part}")) is not None
    }


def _weight_map(path: str) -> dict[str, str]:
    weight_map = read_object(path, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(path, 0, "weight_map", "is not an object of tensor names and files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or os.path.basename(shard) != shard:
            raise FormatError(path, 0, name, f"{str(shard)[:80]!r} is not the name of a *.safetensors file beside it")
    return weight_map


def _optional_object(path: str, names: list[str], name: str) -> dict | None:
    return read_object(os.path.join(path, name), name) if name in names else None


def _tokenizer(path: str, names: list[str]) -> tuple[TokenizerSource | None, str | None]:
    config = _optional_object(path, names, "tokenizer_config.json")
    template = None
    if "chat_template.jinja" in names:
        template_path = os.path.join(path, "chat_template.jinja")
        try:
            template = read_whole(template_path, "chat template", MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise FormatError(template_path, 0, "chat template", "is not UTF-8") from None
    elif config:
        template = _default_template(config.get("chat_template"))
    if "tokenizer.json" in names:
        read_json = partial(read_whole, os.path.join(path, "tokenizer.json"), "tokenizer", MAX_TOKENIZER_BYTES)
    elif "vocab.txt" in names:
        read_json = partial(_read_vocabulary, os.path.join(path, "vocab.txt"), config)
    else:
        return None, template
    special_tokens = _optional_object(path, names, "special_tokens_map.json")
    return TokenizerSource("hf", read_json=read_json, config=config, special_tokens=special_tokens), template


def _read_vocabulary(path: str, config: dict | None) -> bytes:
    return vocabulary.tokenizer_json(read_whole(path, "vocab.txt", MAX_TOKENIZER_BYTES), config, path)


def _default_template(template: object) -> str | None:
    """tokenizer_config.json has one template, or a list of {"name", "template"} of which "default" counts."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
