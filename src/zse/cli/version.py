"""zse version: this program and what it was built with."""

HELP = "print the version and build details"


def add_arguments(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--short", action="store_true", help="only the version number")


def run(args) -> int:
    import zse

    if args.short:
        print(f"zse {zse.__version__}")
        return 0
    import json
    import os
    import platform
    import sys

    facts = {
        "zse": zse.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "package": os.path.dirname(os.path.abspath(zse.__file__)),
        "executable": sys.executable,
    }
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        for key, value in facts.items():
            print(f"{key:<12}{value}")
    return 0
