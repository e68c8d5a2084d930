"""`zse serve` with the fake engine, as a process of its own: serve_fake.py [--engine "OPTIONS"] [serve options]."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import fake_text  # noqa: E402

import zse.engine.process as process  # noqa: E402
import zse.server.main as server_main  # noqa: E402
from zse.cli import serve, settings  # noqa: E402
from zse.cli.parser import Parser, add, arg  # noqa: E402
from zse.errors import ZSEError  # noqa: E402

FAKE_ENGINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_engine.py")


def main() -> int:
    parser = Parser()
    parser.add_argument("--engine", default="")
    add(parser, serve.ARGUMENTS)
    serve.ARGUMENTS = (*serve.ARGUMENTS, arg("--engine", default=""))  # of a reload, too
    try:
        args = settings.parse("serve", parser, sys.argv[1:])
    except ZSEError as error:
        sys.stderr.write(f"zse: error: {error}\n")
        return error.exit_code
    args.command_line = ["serve", *sys.argv[1:]]
    extra = args.engine.split()
    real_spawn, real_serve = process.spawn, server_main.serve
    process.spawn = lambda arguments: real_spawn([*arguments, *extra], (FAKE_ENGINE,))
    process.fork = lambda arguments, clock, main, close: process.spawn(arguments)
    server_main.serve = lambda *given: real_serve(*given[:-1], fake_text.load)
    serve._models = lambda args: [(name, (name,)) for name in args.models or [args.model_name or "fake"]]
    try:
        return serve.run(args)
    except ZSEError as error:
        sys.stderr.write(f"zse: error: {error}\n")
        return error.exit_code


sys.exit(main())
