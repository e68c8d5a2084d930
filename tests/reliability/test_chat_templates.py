"""A chat template is a stranger's program: whatever it does, a render ends soon after its time and within its memory.

ZSE_TEST_TEMPLATES: how many random programs and mutants of templates are rendered (default 400). ZSE_TEST_TEMPLATE_FOLDER: whose
*.jinja are mutated besides those of the tests. A failure prints its seed and the program."""

import gc
import os
import random
import re
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from test_chat_template import IDIOMS

from zse.errors import RequestError
from zse.tokenizer.template_fast import compile_fast
from zse.tokenizer.template_jinja import FILTERS, TESTS, JinjaTemplate

NUM_PROGRAMS = int(os.environ.get("ZSE_TEST_TEMPLATES", "200"))
MOST_SECONDS = 0.6  # of the thread's CPU: 0.1 that a render without messages has, and the longest single operation
MOST_KIB = 400 << 10
MOST_ADDRESSES = 2 << 30
COMPILERS = [compile_fast, JinjaTemplate]

# Two values that share everything below them: 2 ** 40 numbers for whoever goes through one.
DAG = (
    "{%set n=namespace(a=[1],b=[1])%}{%for i in range(40)%}{%set n.a=[n.a,n.a]%}{%set n.b=[n.b,n.b]%}{%endfor%}"
    "{%set t=namespace(a=(1,))%}{%for i in range(40)%}{%set t.a=(t.a,t.a)%}{%endfor%}"
)
LONG = "'a'*1000000*4"
HOSTILE = [
    *(
        DAG + "{{" + text + "}}"
        for text in """n.a == n.b
n.a != n.b
n.a < n.b
n.a|tojson
n.a|tojson(indent=9)
n.a
n.a ~ 'x'
n.a in [n.b]
[n.b].index(n.a)
[n.b].count(n.a)
[n.a]|join
'x'.join([n.a])
n.a|string
n.a|upper
n.a|trim
n.a|replace('a', 'b')
n|string
{'a': n.a}.values()|string
{'a': n.a}.items()
n.a is eq(n.b)
[n.a, n.b]|sort
[n.a, n.b]|min
[n.a, n.b]|unique|list
[n.a]|select('equalto', n.b)|list
[n.a]|map('string')|list
{t.a: 1}
{}[t.a]
{}.get(t.a)
t.a in {}
dict([(t.a, 1)])
loop.changed(n.a)""".splitlines()
    ),
    "{{[[0]*100000]*100000}}",
    "{%set n=namespace(a=[])%}{%for i in range(60)%}{%set n.a=[n.a,[0]*1000000*4]%}{%endfor%}",
    "{%set n=namespace(a=[])%}{%for i in range(60)%}{%set n.a=[n.a,[0]*1000000*2]%}{%endfor%}",
    "{%for i in range(600)%}{%set x=(" + LONG + ").upper()%}{%endfor%}",
    "{%set n=namespace(a=0)%}{%for i in range(600)%}{%set n.a=[n.a,('ab '*1000000).split()]%}{%endfor%}",
    "{{(" + LONG + ").strip('b'*1000000*3~'a')}}",
    "{{(" + LONG + ")|trim('b'*1000000*3~'a')}}",
    "{{1.5|round(1000000*1000000)}}",
    *(
        "{%set x=('a'*4000000)." + text + "%}"
        for text in """rfind('ab'~'a'*2000000)
rindex('ab'~'a'*2000000)
rsplit('ab'~'a'*2000000)
rsplit(sep='ab'~'a'*2000000, maxsplit=1)
rpartition('ab'~'a'*2000000)""".splitlines()
    ),
    # The clock was looked at where the steps left were a multiple of 64, which steps of two pass by.
    *("{{ [1, 'x', none] }}" + "{{ 1 }}" * n + "{%for z in range(100000)%}{{ {'k': 1} }}{%endfor%}" for n in range(4)),
    "{%macro m()%}" + "x" * 60000 + "{%endmacro%}{%for i in range(90000)%}{%set y=m()%}{%endfor%}",
    "{%macro m(s)%}{%for i in range(90000)%}{{s}}{%endfor%}{%endmacro%}{%set y=m(" + LONG + ")%}",
    "{%set y%}{%for i in range(90000)%}" + "x" * 60000 + "{%endfor%}{%endset%}",
    "{%filter upper%}{%for i in range(90000)%}" + "x" * 60000 + "{%endfor%}{%endfilter%}",
    "{{ range(100000)" + "|select" * 90 + "|list|length }}",
    "{{ range(100000)" + "|map('string')" * 90 + "|list|length }}",
    "{{ ([[0]*1000]*100000)|sum(start=[]) }}",
    "{{ ('['~'[],'*1000000~'1]')|from_json|length }}{{ 1 // 0 }}",
    "{{ ('1'*1000000*4)|int(base=16) * 3 }}",
    "{%set n=namespace(a=1)%}{%set n.a=n%}{{n}}",
    "{%set n=namespace(a=1)%}{%for i in range(90)%}{%set m=namespace(a=n.a,b=n.a)%}{%set n.a=m%}{%endfor%}{{n.a}}",
    "{{ ([0]*1000000)|tojson(indent='                ',separators=('a'*1000000*4,'b')) }}",
    "{{ ('a,'*1000000*2).split(',')|sort|length }}{{ 1 // 0 }}",
    "{{ ('a '*1000000*2)|title|length }}",
    "{% for i in range(100000) %}{% for k in (" + LONG + ") %}{% break %}{% endfor %}{% endfor %}",
]


def render(compile, source: str, **variables) -> tuple[object, float, int]:
    """(the text, or the RequestError; None where another interpreter has to do it; seconds of CPU; KiB that memory grew)."""
    try:
        template = compile(source)
    except ValueError as error:
        return error, 0.0, 0
    if template is None:
        return None, 0.0, 0
    gc.freeze()  # what other tests left (transformers: half a second to look through) is not this template's time
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        result = template.render({"messages": [], "tools": None, **variables})
    except RequestError as error:
        result = error
    seconds = time.thread_time() - start
    gc.unfreeze()
    return result, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.timed(alone=False)
@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("compile", COMPILERS)
def test_no_operation_escapes_the_bounds(compile, source):
    result, seconds, kib = render(compile, source)
    assert result is None or isinstance(result, (RequestError, ValueError)), "a hostile template rendered"
    assert seconds < MOST_SECONDS and kib < MOST_KIB


def program(draw: random.Random) -> str:
    """A random template that grows values and does to them whatever templates can do."""
    names = ["n.a", "n.b", "n.s", "t.a", "messages", "n"]

    def value(depth: int) -> str:
        if depth == 0:
            return draw.choice(
                [*names, "'ab '", "''", "7", "0", "1.5", "[]", "{}", "(1,)", "true", "none", "'1'*100000"]
            )
        inner, other = value(depth - 1), value(draw.randrange(depth))
        match draw.randrange(10):
            case 0 | 1 | 2:
                argument = draw.choice(["", "", f"({other})", f"(attribute={other})", f"({other}, {value(0)})"])
                return f"({inner}|{draw.choice(sorted(FILTERS))}{argument})"
            case 3:
                name = draw.choice(sorted(name for name in TESTS if name.isidentifier()))
                return f"({inner} is {name}{draw.choice(['', f'({other})'])})"
            case 4:
                return f"({inner} {draw.choice('+ - * % ~ == != < in'.split())} {other})"
            case 5:
                return f"[{inner}, {other}]"
            case 6:
                return draw.choice([f"({inner}, {other})", f"{{{other}: {inner}}}", f"dict(a={inner})"])
            case 7:
                call = draw.choice(
                    "upper split strip replace join count index get items values lstrip find title".split()
                )
                return f"({inner}).{call}({draw.choice(['', other, f'{other}, {value(0)}'])})"
            case 8:
                return f"({inner})[{draw.choice([other, '0', '::-1', '1:', ':-1'])}]"
            case _:
                return f"({inner} if {other} else {value(0)})"

    parts = [
        "{%set n=namespace(a=[1],b=[1],s='ab')%}{%set t=namespace(a=(1,))%}{%macro m(x)%}{{x}}"
        + draw.choice(["", "{{m(x)}}", "{{x}}{{x}}", "{%for y in x%}{{y}}{%endfor%}"])
        + "{%endmacro%}"
    ]
    for _ in range(draw.randrange(1, 5)):
        target = draw.choice(["n.a", "n.b", "n.s", "t.a"])
        grown = draw.choice(["[{0},{0}]", "({0},{0})", "{0}~{0}", "{0}+{0}", "{0}*9", "[{0}]+[{0}]", "m({0})"]).format(
            target
        )
        step = f"{{%set {target}={draw.choice([grown, grown, value(2)])}%}}"
        parts.append(f"{{%for i in range({draw.choice([3, 30, 1000])})%}}{step}{{%endfor%}}")
        parts.append(draw.choice(["{{%s}}", "{%%set z=%s%%}", "{%%if %s%%}x{%%endif%%}", "{{m(%s)}}"]) % value(3))
    return "".join(parts)


def mutant(draw: random.Random, sources: list[str]) -> str:
    """A template that is used, with random programs between its tags, its expressions wrapped, its names and numbers exchanged."""
    parts = re.split(r"(\{[{%#].*?[}%#]\})", draw.choice(sources), flags=re.S)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(parts))
        match draw.randrange(6):
            case 0:
                parts.insert(at, program(draw))
            case 1:
                name = draw.choice(sorted(FILTERS))
                parts[at] = re.sub(r"^\{\{-?(.*?)-?\}\}$", rf"{{{{ (\1)|{name} }}}}", parts[at], flags=re.S)
            case 2:
                end = draw.randrange(at, len(parts))
                inside = "".join(parts[at : end + 1])
                parts[at : end + 1] = [f"{{%for zz in range({draw.choice([3, 1000, 100000])})%}}{inside}{{%endfor%}}"]
            case 3:
                parts[at] = re.sub(r"\d+", str(draw.choice([0, 99, 100_000, 10**6])), parts[at])
            case 4:
                old, new = draw.choice(["message", "messages", "content", "tools"]), draw.choice(["n.a", "n.s", "t.a"])
                parts[at] = re.sub(rf"\b{old}\b", new, parts[at])
                parts.insert(0, DAG)
            case _:
                parts.insert(at, draw.choice(parts))
    return "".join(parts)


def template_sources() -> list[str]:
    folder = os.environ.get("ZSE_TEST_TEMPLATE_FOLDER")
    return IDIOMS + [path.read_text() for path in (sorted(Path(folder).glob("*.jinja")) if folder else ())]


def run_programs(kind: str, seed: str, count: int) -> None:
    """In a process of its own: writes the number of each program before it is rendered. kind: "random" or "mutants"."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    warnings.simplefilter("ignore", SyntaxWarning)  # Python's, about constants that are indexed
    rendered, sources = 0, template_sources()
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        source = program(draw) if kind == "random" else mutant(draw, sources)
        print(number, source, flush=True)
        for compile in COMPILERS:
            most = 0
            for _ in range(3):  # what is slow is slow three times; a neighbour on the machine takes caches for a while
                result, seconds, kib = render(compile, source, messages=[{"role": "user", "content": "hello " * 9}] * 3)
                most = max(most, kib)
                if seconds < MOST_SECONDS + 0.1:
                    break
            rendered += isinstance(result, (str, RequestError))
            assert seconds < MOST_SECONDS + 0.1 and most < MOST_KIB, f"{compile.__name__}: {seconds:.2f} s, {most} KiB"
    least = count // 2 if kind == "random" else count // 3  # of a mutant's tags some do not end
    assert rendered > least, "most programs are refused at load: they test nothing"


@pytest.mark.timed(alone=False)
@pytest.mark.parametrize("kind", ["random", "mutants"])
def test_random_programs_end_in_time_and_memory(kind):
    seed = os.environ.get("ZSE_TEST_SEED", str(time.time_ns() % 10**9))
    count = NUM_PROGRAMS if kind == "random" or NUM_PROGRAMS > 400 else NUM_PROGRAMS // 4
    command = [sys.executable, __file__, kind, seed, str(count)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60 + NUM_PROGRAMS / 4)
        failed = done.stderr[-800:] if done.returncode else ""
        output = done.stdout
    except subprocess.TimeoutExpired as error:
        failed, output = "it hangs", (error.stdout or b"").decode()
    assert not failed, f"ZSE_TEST_SEED={seed}, last program: {output.splitlines()[-1:]}: {failed}"


if __name__ == "__main__":
    run_programs(sys.argv[1], sys.argv[2], int(sys.argv[3]))
