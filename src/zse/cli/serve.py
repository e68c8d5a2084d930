"""zse serve: models behind an OpenAI-compatible HTTP API."""

import functools
import gc
import os

from zse import env, lazy
from zse.cli import settings
from zse.cli.options import (
    DOCUMENT_OPTIONS,
    ENGINE_OPTIONS,
    IMAGE_OPTIONS,
    SERVING_OPTIONS,
    locate,
    quota,
    rank_of,
    values_of,
    words_of,
)
from zse.cli.parser import CONFIG, FLAG, SIZE_OR_0, SWITCH, Amount, Many, Parser, add, arg, option
from zse.engine import node, worker
from zse.engine import process as engine_process
from zse.engine.metrics import since_exec_clock
from zse.errors import ConfigError
from zse.formats import converted, hub, store
from zse.http import bind
from zse.models import registry
from zse.scheduler import options as scheduling
from zse.server import auth, copies, cross_origin, images, library, retrieval, served, tracing
from zse.server import keys as key_files
from zse.server import main as server
from zse.server import models as text_models

EPILOG = """examples:
  zse serve                                  the default model on http://127.0.0.1:8000
  zse serve gemma3-270m --port 9000
  zse serve qwen3-4b                         of its files the one that fits; all names: zse ls --available
  zse serve qwen3-8b --quantize int4         the original weights, quantized while they are loaded
  zse serve ./model.gguf --max-context 4096 --threads 8
  zse serve qwen.zse llama.zse --idle-timeout 300     the first at once, the other when a request names it
  ZSE_API_KEY=secret zse serve --host 0.0.0.0

The API: POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/rerank, /v1/score,
/api/chat; GET /v1/models, /health/live, /health/ready, /version, /openapi.json, /metrics; a page at /. Of several models
each has an engine process of its own while it is loaded; one that is needed and does not fit in memory takes the place of
the one that has been idle for longest.
Ctrl-C lets running requests finish (--drain-timeout), a second one stops at once."""

# The names of zse.server.tools.parsers and .reasoning, whose import would delay the engine's start.
_TOOL_PARSERS = (
    "apertus command_r deepseek dsml firefunction functionary functionary_v3 gemma gemma4 gigachat glm4 granite harmony hermes "
    "kimi_k2 kimi_k3 lfm2 llama3_json minicpm minimax_m2 mistral nemotron pythonic qwen3_coder seed_oss solar_open tool_calls none"
).split()
ADAPTER_SLOTS = 16  # where there are adapters and nobody says
_REASONING_PARSERS = tuple("think mistral seed command_r gemma4 apertus solar_open kimi_k3 harmony none".split())


ARGUMENTS = (
    arg(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a name from `zse ls`, a catalog name or a path (default: smollm2, fetched if missing); "
        "the first is loaded at once, others when a request names them",
    ),
    option("--host", "HOST", "address to listen on (default: 127.0.0.1, this machine only)", "127.0.0.1"),
    option("--port", Amount(int, 0, 65535, shown="PORT"), "port (default: 8000; 0 takes a free one)", 8000),
    option("--model-name", "NAME", "what the API calls the (first) model (default: its short name)"),
    option(
        "--any-model-name",
        FLAG,
        "requests may give any name: one that no model has means the first model, for clients whose names are fixed",
    ),
    option(
        "--spare-engines",
        Amount(int, 0, 16),
        "engine processes kept ready without a model, so that the next load is quick; each holds "
        "a GPU context (default: 1 when several models are served, else 0)",
    ),
    option(
        "--idle-timeout",
        Amount(float, above=0, shown="SECONDS"),
        "unload a model that has had no request for so long; the next loads it (default: never)",
    ),
    option(
        "--keep-in-memory",
        SIZE_OR_0,
        "lock the files of models that were unloaded in memory, the last ones up to this size, so that the next load need "
        "not read the disk; 0: nothing (default: what the system's page cache keeps, of which a parked engine of a GPU makes "
        "ready a quarter of the memory that is available)",
    ),
    option("--max-loaded", Amount(int, 1), "models that may be loaded at once (default: what memory holds)"),
    option(
        "--adapter",
        Many("[MODEL:]NAME=FOLDER"),
        "a LoRA adapter of a model (default: the first), a folder as PEFT writes it; requests name it MODEL:NAME; may be repeated",
    ),
    ENGINE_OPTIONS,
    SERVING_OPTIONS,
    option(
        "--cache-converted",
        SWITCH,
        "keep a copy of what is packed or quantized while it is loaded in the store, made beside the first requests; the "
        "next start copies it (`zse ls` lists it, `zse rm` deletes it; one of a model that has changed is not used; default: on a "
        "CPU of GGUF files that this server has unloaded, for their next load, up to 8 GiB of copies)",
    ),
    option(
        "--max-rows --max-concurrency",
        Amount(int, 1, 1024),
        "requests that run at once (default: 64, on a GPU 256 where memory allows)",
    ),
    option(
        "--max-queue",
        Amount(int, 0, 65536),
        "requests that may wait; more are answered 503 (default: what is begun within --queue-timeout, from 16 to 4,096)",
    ),
    option(
        "--max-queue-tokens",
        Amount(int, 1, shown="TOKENS"),
        "prompt tokens that may wait (default: what is begun within --queue-timeout, from 16,384 to 4,194,304)",
    ),
    option(
        "--queue-timeout",
        Amount(float, 0.1, 86400.0, shown="SECONDS"),
        "how long a request may be expected to wait, by the rate at which requests begin",
        30.0,
    ),
    option(
        "--max-wait",
        Amount(float, 0.1, 86400.0, shown="SECONDS"),
        "a request that has not begun after so long is answered 503 after all",
        600.0,
    ),
    option(
        "--max-body-bytes",
        Amount(int, 1024, shown="BYTES"),
        "largest request body; images in it, and chats with images, may make it 16 times as large (default: 2 MiB)",
        2 << 20,
    ),
    option(
        "--generation-config",
        ("auto", "none"),
        "sampling where a request names none: auto, what the model's authors recommend (`zse show`), else OpenAI's "
        "defaults; none, always those",
        "auto",
    ),
    option(
        "--tool-parser", tuple(_TOOL_PARSERS), "the format of the models' tool calls (default: by the chat template)"
    ),
    option(
        "--reasoning-parser",
        _REASONING_PARSERS,
        "the marks around the models' reasoning (default: by the chat template)",
    ),
    option(
        "--api-key", "KEY", "the key that clients must send (default: ZSE_API_KEY); needed unless --host is loopback"
    ),
    option(
        "--api-key-file",
        "FILE",
        "read the keys of several tenants from a file, NAME KEY [WEIGHT] [rpm=N] [tpm=N] "
        "[concurrency=N] [admin] [models=NAME,…] [routes=PATH,…] [expires=DATE] a line: WEIGHT is of the "
        "tenant's share of queue and engine (default: 1), then its quota, then what this key may do "
        "(admin: GET /metrics) and when it ends",
    ),
    option(
        "--database",
        "PATH|none",
        "a SQLite file with the keys of `zse keys`, made if missing; where it has no key and no other is given, the start "
        "makes one for the administrator and prints it (default: server.db in ZSE_HOME, if it is there)",
    ),
    option(
        "--session-ttl",
        Amount(float, 1, 366 * 86400, shown="SECONDS"),
        "how long the conversation of a session_id is kept in the database after its last request, at most (default: 86400, a day)",
        86400.0,
    ),
    quota(
        "--file-quota", 4, "of the files that a tenant uploads and its batches make, which are kept beside the database"
    ),
    *DOCUMENT_OPTIONS,
    *IMAGE_OPTIONS,
    option(
        "--mcp",
        "FILE",
        "let the page and the Responses API use the tools of the MCP servers in this file, the JSON of other clients "
        '({"mcpServers": {NAME: {"command": …} or {"url": …}}}) with allow, deny, timeout_s and max_result_bytes; read again on SIGHUP '
        "(default: none)",
    ),
    quota("--adapter-quota", 16, "of the adapters that administrators upload, which are kept in ZSE_HOME/adapters"),
    option(
        "--allowed-host", Many("NAME"), "a Host name to answer to besides localhost and IP addresses; may be repeated"
    ),
    option(
        "--cors-origin",
        Many("ORIGIN"),
        "an origin, such as https://app.example, whose pages may use the API from a browser, or *; may be repeated",
    ),
    option("--drain-timeout", Amount(float, 0, shown="SECONDS"), "time for running requests at shutdown", 30.0),
    option(
        "--on-engine-failure",
        ("exit", "wait"),
        "when the engine of every model has been started again five times in ten minutes and dies once more: exit "
        "with code 1, or wait: /health/live stays 200, /health/ready is 503, and it is tried every minute "
        "(default: exit)",
        "exit",
    ),
    option("--log-level", ("debug", "info", "warning", "error"), "(default: ZSE_LOG, info)", None),
    option("--log-format", ("text", "json"), "lines of the log, json: an object each (default: ZSE_LOG_FORMAT, text)"),
    option(
        "--otlp-traces-endpoint",
        "URL",
        "send a trace of each request to this collector of OpenTelemetry, such as http://localhost:4318; needs the extra otel",
    ),
    CONFIG,
)
# What SIGHUP changes in a server that runs; the engines' options, names and addresses wait for a restart.
CHANGEABLE = """spare_engines idle_timeout max_loaded max_queue max_queue_tokens queue_timeout max_wait max_body_bytes any_model_name tool_parser
    reasoning_parser session_ttl file_quota adapter_quota api_key api_key_file tenant_weights allowed_host cors_origin drain_timeout log_level log_format""".split()


def run(args) -> int:
    # The order is the start-up time: check, listen, spawn the engine; only then the modules of the server are imported.
    since_exec = since_exec_clock()
    gc.disable()  # a start makes many objects and no garbage: 8 ms; the server turns it on again when it is ready
    args.database_path = _database(args)
    keys = None if args.node_rank else _checked_keys(args, args.host)
    traces = args.otlp_traces_endpoint and tracing.checked(args.otlp_traces_endpoint)
    models = _models(args)
    if args.nnodes > 1:
        _check_nodes(args, models)
    adapters = _adapters(args, [names for _, names in models])
    if args.node_rank:
        lazy.import_lean("msgspec")
        return node.serve_node(_engine_arguments(args, models[0][0], adapters[0]))
    sock = bind.listen(args.host, args.port)
    phases = {"socket": round(1000 * since_exec())}
    if args.log_level:
        os.environ["ZSE_LOG"] = args.log_level
    arguments = [_engine_arguments(args, path, own) for (path, _), own in zip(models, adapters, strict=True)]
    process = engine_process.fork(
        arguments[0], since_exec, lambda words, clock: worker.main(words, clock=clock), close=(sock.fileno(),)
    )
    phases["engine spawned"] = round(1000 * since_exec())
    try:
        lazy.import_lean("msgspec")
        lazy.import_lean("asyncio")
        from zse.log import setup  # brings logging, which the engine that was forked does without

        setup(args.log_level, args.log_format)
        options = server.ServeOptions(
            models=tuple(
                served.ModelSpec(names, path, tuple(words), own)
                for (path, names), words, own in zip(models, arguments, adapters, strict=True)
            ),
            host=args.host,
            traces=traces,
            database=args.database_path,
            documents=_documents(args),
            document_quota=args.document_quota,
            ann_from=retrieval.checked_ann(args.ann_from) if args.ann_from else 0,
            ocr=retrieval.ocr_command(args.ocr_command) if args.ocr_command else None,
            mcp=args.mcp and os.path.abspath(args.mcp),
            images=lambda: images.decoder(args.max_image_bytes, args.max_image_pixels, args.max_images),
            # The same after a restart: what is cached on disk is salted with it.
            cache_secret=auth.kept_secret(args.cache_disk) if args.cache_disk else None,
            cache_folder=args.cache_disk,
            exits_on_failure=args.on_engine_failure == "exit",
            library=functools.partial(_library, args),
            phases_ms=phases,
            since_exec=since_exec,
            when_ready=(lambda: _copies(args).begin([path for path, _ in models])) if args.cache_converted else None,
            copies=None if args.cache_converted is False else lambda: _copies(args),
            keep_in_memory=args.keep_in_memory,
            reload=functools.partial(_reload, [args]) if args.config_path is not None else None,
            **_changeable(args, keys, len(models)),
        )
        return server.serve(
            options,
            sock,
            process,
            engine_process.spawn,
            lambda: engine_process.spawn(_park_arguments(args)),
            functools.partial(text_models.load, generation_config=args.generation_config),
        )
    finally:
        process.kill()


def _check_nodes(args, models: list) -> None:
    """ConfigError for what other hosts cannot follow: they wait for one model."""
    refused = {
        "several models": len(models) > 1,
        "--idle-timeout": args.idle_timeout,
        "--spare-engines": args.spare_engines,
    }
    for what, is_given in refused.items():
        if is_given:
            raise ConfigError(
                f"{what} is not possible with --nnodes {args.nnodes}: all hosts have one model, from the start on"
            )


def _checked_keys(args, host: str):
    """The keys of a server that listens on `host`, beside those of a database. Raises ConfigError."""
    keys = _api_keys(args)
    if not keys and args.database_path is None and not bind.is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines: set ZSE_API_KEY, --api-key, "
            "--api-key-file or --database, or bind to 127.0.0.1"
        )
    return keys


def _changeable(args, keys, num_models: int) -> dict:
    """The fields of ServeOptions that CHANGEABLE are for."""
    return {
        "spare_engines": args.spare_engines if args.spare_engines is not None else int(num_models > 1),
        "idle_timeout_s": args.idle_timeout,
        "max_loaded": args.max_loaded,
        "max_queue": args.max_queue,
        "max_queue_tokens": args.max_queue_tokens,
        "queue_timeout_s": args.queue_timeout,
        "max_wait_s": args.max_wait,
        "drain_s": args.drain_timeout,
        "keys": keys,
        "key_file": args.api_key_file,
        "tenant_weights": scheduling.parse_weights(args.tenant_weights or ""),
        "allowed_hosts": _allowed_hosts(args, bool(keys or args.database_path)),
        "cors_origins": frozenset(args.cors_origin)
        and cross_origin.read_origins(args.cors_origin, bool(keys or args.database_path)),
        "any_model_name": args.any_model_name,
        "session_ttl_s": args.session_ttl,
        "file_quota": args.file_quota,
        "adapter_quota": args.adapter_quota,
        "tool_parser": args.tool_parser,
        "reasoning_parser": args.reasoning_parser,
        "limits": server.Limits(body_bytes=args.max_body_bytes),
        "log_level": args.log_level or args.environment.get("ZSE_LOG") or env.SWITCHES["ZSE_LOG"][0],
        "log_format": args.log_format or env.get("ZSE_LOG_FORMAT"),
    }


def _reload(last: list) -> tuple[dict, list[str]]:
    """The configuration once more: what of ServeOptions can change, and a line for each option that differs. last: [the
    arguments that count so far], which become the new ones. Raises ConfigError and changes nothing then."""
    before = last[0]
    parser = Parser(prog="zse serve")
    add(parser, ARGUMENTS)
    args = settings.parse("serve", parser, before.command_line[1:], environment=before.environment)
    args.command_line, args.database_path = before.command_line, before.database_path
    changeable = _changeable(args, _checked_keys(args, before.host), len(before.models))
    lines: list[str] = []
    seen: set[str] = set()
    for name, action in settings.options(parser).items():
        dest = action.dest
        old, new = getattr(before, dest), getattr(args, dest)
        if old == new or dest in seen:
            continue
        seen.add(dest)
        values = ("default" if value is None else value for value in (old, new))
        told = "" if dest in settings.SECRETS else " {} -> {}".format(*values)
        if dest in CHANGEABLE:
            lines.append(f"took --{name}{told}")
        else:
            lines.append(f"--{name}{told} waits for a restart")
            setattr(args, dest, old)
    last[0] = args
    return changeable, lines


def _models(args) -> list[tuple[str, tuple[str, ...]]]:
    """(path, names that requests may use) of each model, fetched if need be."""
    found = [_model(name, args) for name in args.models or ["smollm2"]]
    if args.model_name:
        found[0] = found[0][0], (args.model_name,)
    names = [names[0] for _, names in found]
    for text in (*names, *(path for path, _ in found)):
        if not text.isprintable() and text != text.encode("utf-8", "replace").decode():  # which JSON cannot have
            raise ConfigError(
                f"{ascii(text)}: the name and the path of a model that is served must be UTF-8; rename it"
            )
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the models are called {name}: rename a file, or serve them apart")
    return found


def _model(name: str, args) -> tuple[str, tuple[str, ...]]:
    short = name
    if store.is_path(name):
        short = os.path.basename(os.path.abspath(name))
        for suffix in (".gguf", ".zse"):
            short = short.removesuffix(suffix)
    return locate(name, args.quantize, args.device), (short,)


def _park_arguments(args) -> list[str]:
    """What a parked engine must know before it has a model."""
    names = ("device", "threads", "tensor_parallel_size", "pipeline_parallel_size")
    return ["--park", *words_of({name: getattr(args, name) for name in names})]


def _adapters(args, models: list[tuple[str, ...]]) -> list[tuple[tuple[str, str], ...]]:
    """(name, folder) of the adapters of each model. Raises ConfigError, FormatError or UnsupportedError."""
    found: list[dict[str, str]] = [{} for _ in models]
    for text in args.adapter:
        name, _, folder = text.partition("=")
        model, _, name = name.rpartition(":")
        which = next((number for number, names in enumerate(models) if not model or model in names), None)
        if which is None or not folder or not key_files.NAME.fullmatch(name):
            raise ConfigError(
                f"--adapter {text}: is not [MODEL:]NAME=FOLDER with a model that is served and a name of letters, digits, . _ -"
            )
        if found[which].setdefault(name, os.path.abspath(folder)) != os.path.abspath(folder):
            raise ConfigError(f"--adapter {text}: there is another adapter of this name")
    return [tuple(own.items()) for own in found]


def _engine_arguments(args, path: str, adapters: tuple[tuple[str, str], ...] = ()) -> list[str]:
    # 256: the most of zse.engine.config.MAX_ROWS, whose import would delay the engine's start. 4,096: of QueueBounds.
    waiting = max(1, (4096 if args.max_queue is None else args.max_queue) + (args.max_rows or 256))
    values = {"model": path, "max_rows": args.max_rows, "max_waiting": waiting}
    values |= values_of(args, ENGINE_OPTIONS) | values_of(args, SERVING_OPTIONS)
    if args.cache_converted:
        kept = converted.find(path, args.quantize, converted.family_of(args.device))
        values |= {"model": kept, "quantize": None} if kept is not None else {}
    if args.draft_model is not None:
        values["draft_model"] = store.locate(args.draft_model)
    if args.mmproj is not None:
        values["mmproj"] = store.locate(args.mmproj)
    if adapters:
        values["adapter_slots"] = ADAPTER_SLOTS if args.adapter_slots is None else args.adapter_slots
        values["adapter_rank"] = args.adapter_rank or rank_of([folder for _, folder in adapters])
    return words_of(values)


def _copies(args):
    return copies.ConvertedCopies(args.quantize, args.device, is_asked=bool(args.cache_converted))


def _library(args):
    fetch = functools.partial(hub.pull, device=args.device, check=registry.name_of)
    return library.Library(functools.partial(_engine_arguments, args), fetch)


def _api_keys(args):
    """The keys of --api-key, --api-key-file or ZSE_API_KEY, in this order."""
    if args.api_key_file is not None:
        if args.api_key is not None:
            raise ConfigError("give one of --api-key and --api-key-file")
        return key_files.read_file(args.api_key_file)
    key = args.api_key if args.api_key is not None else env.get("ZSE_API_KEY") or None
    if key is None:
        return ()
    return key_files.single(key)


def _database(args) -> str | None:
    """The path of the database, None without one."""
    if args.database is not None:
        return None if args.database == "none" else os.path.abspath(os.path.expanduser(args.database))
    default = store.database_path()
    return default if os.path.exists(default) else None


def _documents(args) -> str | None:
    """The path of the documents, None without any."""
    if args.documents is not None:
        return None if args.documents == "none" else os.path.abspath(os.path.expanduser(args.documents))
    return os.path.join(os.path.dirname(args.database_path or store.database_path()), "documents.db")


def _allowed_hosts(args, has_key: bool) -> frozenset[str] | None:
    """Host names to answer to. With a key any will do: a page that rebinds DNS does not know the key."""
    for name in args.allowed_host:
        if auth.split_host(name) != (name.lower().rstrip("."), ""):
            raise ConfigError(f"--allowed-host: '{name}' is no host name; write it alone, such as app.example")
    if has_key and not args.allowed_host:
        return None
    return frozenset({"localhost", args.host.lower(), *(name.lower() for name in args.allowed_host)})
