"""zse serve: a model behind an OpenAI-compatible HTTP API."""

import os

HELP = "serve a model over an OpenAI-compatible HTTP API"
EPILOG = """examples:
  zse serve                                  the default model on http://127.0.0.1:8000
  zse serve gemma3-270m --port 9000
  zse serve ./model.gguf --max-context 4096 --threads 8
  ZSE_API_KEY=secret zse serve --host 0.0.0.0

The API: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, /health/live, /health/ready, /version.
Ctrl-C lets running requests finish (--drain-timeout), a second one stops at once."""


def add_arguments(parser) -> None:
    from zse.cli.options import add_engine_options
    from zse.cli.parser import number

    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="a name from `zse ls`, a catalog name or a path (default: smollm2, fetched if missing)")
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=number(int, 0, 65535), default=8000,
                        help="port (default: 8000; 0 takes a free one)")
    parser.add_argument("--model-name", metavar="NAME", help="what the API calls the model (default: its short name)")
    add_engine_options(parser)
    parser.add_argument("--max-rows", "--max-concurrency", type=number(int, 1, 1024), metavar="N",
                        help="requests that run at once (default: 8, on a GPU 64)")
    parser.add_argument("--max-queue", type=number(int, 0, 65536), default=256, metavar="N",
                        help="requests that may wait; more are answered 503 (default: 256)")
    parser.add_argument("--max-queue-tokens", type=number(int, 1), default=262144, metavar="TOKENS",
                        help="prompt tokens that may wait (default: 262144)")
    parser.add_argument("--max-body-bytes", type=number(int, 1024), default=2 << 20, metavar="BYTES",
                        help="largest request body (default: 2 MiB)")
    parser.add_argument("--api-key", metavar="KEY",
                        help="the key that clients must send (default: ZSE_API_KEY); needed unless --host is loopback")
    parser.add_argument("--api-key-file", metavar="FILE", help="read the key from a file")
    parser.add_argument("--allowed-host", action="append", default=[], metavar="NAME",
                        help="a Host name to answer to besides localhost and IP addresses; may be repeated")
    parser.add_argument("--drain-timeout", type=number(float, 0), default=30.0, metavar="SECONDS",
                        help="time for running requests at shutdown (default: 30)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=None,
                        help="(default: ZSE_LOG, info)")


def run(args) -> int:
    # The order is the start-up time: check, listen, spawn the engine; only then the imports of the server.
    from zse.engine.metrics import since_exec_clock

    since_exec = since_exec_clock()
    from zse.engine.process import spawn
    from zse.errors import ConfigError
    from zse.server import bind

    key = _api_key(args)
    if key is None and not bind.is_loopback(args.host):
        raise ConfigError(f"--host {args.host} can be reached from other machines: set ZSE_API_KEY, --api-key or "
                          "--api-key-file, or bind to 127.0.0.1")
    path, names = _model(args)
    sock = bind.listen(args.host, args.port)
    phases = {"socket": round(1000 * since_exec())}
    if args.log_level:
        os.environ["ZSE_LOG"] = args.log_level
    arguments = _engine_arguments(args, path)
    process = spawn(arguments)
    phases["engine spawned"] = round(1000 * since_exec())
    try:
        from zse.log import setup
        from zse.server.main import Limits, ServeOptions, serve

        setup(args.log_level)
        options = ServeOptions(
            model=path, model_names=names, host=args.host, max_choices=(args.max_rows or 8) + args.max_queue, max_queue=args.max_queue,
            max_queue_tokens=args.max_queue_tokens, drain_s=args.drain_timeout, api_key=key,
            allowed_hosts=_allowed_hosts(args, key), limits=Limits(body_bytes=args.max_body_bytes), phases_ms=phases,
            since_exec=since_exec)
        return serve(options, sock, process, lambda: spawn(arguments))
    finally:
        process.kill()


def _model(args) -> tuple[str, tuple[str, ...]]:
    """Path of the model, fetched if need be, and the names that requests may use."""
    from zse.errors import ModelNotFoundError
    from zse.formats import store

    name = args.model or "smollm2"
    try:
        path = store.resolve(name)
    except ModelNotFoundError:
        from zse.cli.terminal import ProgressBar, notice

        with ProgressBar(name) as bar:
            path = store.ensure(name, progress=bar, notice=notice)
    short = name
    if store.is_path(name):
        short = os.path.basename(os.path.abspath(name))
        for suffix in (".gguf", ".zse"):
            short = short.removesuffix(suffix)
    return os.fspath(path), (args.model_name,) if args.model_name else (short,)


def _engine_arguments(args, path: str) -> list[str]:
    # 64: the most of zse.engine.config.MAX_ROWS, whose import would delay the engine's start.
    most_rows = args.max_rows or 64
    values = {"device": args.device, "max-rows": args.max_rows, "activations": args.activations,
              "kv-dtype": args.kv_dtype, "threads": args.threads, "max-context": args.max_context,
              "max-memory": args.max_memory, "max-waiting": max(1, args.max_queue + most_rows)}
    arguments = ["--model", path]
    for name, value in values.items():
        if value is not None:
            arguments += ["--" + name, str(value)]
    return arguments


def _api_key(args) -> str | None:
    """The key of --api-key, --api-key-file or ZSE_API_KEY, in this order."""
    from zse import env
    from zse.errors import ConfigError

    key = args.api_key
    if args.api_key_file is not None:
        if key is not None:
            raise ConfigError("give one of --api-key and --api-key-file")
        try:
            with open(args.api_key_file, encoding="utf-8") as file:
                key = file.read(4097).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(f"--api-key-file {args.api_key_file}: {reason}") from None
    if key is None:
        key = env.get("ZSE_API_KEY") or None
    if key is not None and not (key and len(key) <= 4096 and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("the API key must be 1 to 4096 printable ASCII characters without spaces")
    return key


def _allowed_hosts(args, key: str | None) -> frozenset[str] | None:
    """Host names to answer to. With a key any will do: a page that rebinds DNS does not know the key."""
    if key is not None and not args.allowed_host:
        return None
    return frozenset({"localhost", args.host.lower(), *(name.lower() for name in args.allowed_host)})
