"""`zse serve` with the fake engine, as a process of its own: serve_fake.py [--engine "OPTIONS"] [serve options]."""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import fake_text  # noqa: E402

import zse.engine.process as process  # noqa: E402
import zse.server.models as models  # noqa: E402
from zse.cli import serve  # noqa: E402
from zse.errors import ZSEError  # noqa: E402

FAKE_ENGINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_engine.py")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="")
    serve.add_arguments(parser)
    args = parser.parse_args()
    extra = args.engine.split()
    real_spawn = process.spawn
    process.spawn = lambda arguments, *_: real_spawn([*arguments, *extra], (FAKE_ENGINE,))
    models.load.__code__ = fake_text.load.__code__  # the default argument of serve() keeps the function
    models.load.__globals__["TextModel"] = fake_text.TextModel
    serve._model = lambda args: ("fake", (args.model_name or "fake",))
    try:
        return serve.run(args)
    except ZSEError as error:
        sys.stderr.write(f"zse: error: {error}\n")
        return error.exit_code


sys.exit(main())
