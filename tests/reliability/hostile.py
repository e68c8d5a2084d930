"""Schemas, grammars and chat templates that cost whoever compiles or renders them as much as they can."""

NESTED: dict = {"type": "string"}
for _ in range(12):
    NESTED = {"anyOf": [{"type": "array", "items": NESTED}, {"type": "object", "properties": {"a": NESTED}}]}
TREE = {"type": "object", "properties": {name: {"$ref": "#/$defs/n"} for name in "abcdefgh"}}

SCHEMAS = {
    "a pattern that repeats 10⁹ times": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "a pattern of 3,000 optional letters": {"type": "string", "pattern": "^(a?){3000}a{3000}$"},
    "stars in stars": {"type": "string", "pattern": "^(((a*)*)*)*b$"},
    "a string of 10⁹ letters": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9},
    "an array of 10⁹ items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "a large multipleOf": {"type": "integer", "multipleOf": 9999991, "minimum": 0, "maximum": 10**18},
    "an enum of 3,000 words": {"enum": [f"word {number}" for number in range(3000)]},
    "800 optional properties": {"type": "object", "properties": {f"p{number}": {} for number in range(800)}},
    "anyOf of 4,096 leaves": NESTED,
    "a reference to itself": {"$ref": "#"},
    "a ring of references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a tree without end": {"$defs": {"n": {**TREE, "required": list("abcdefgh")}}, "$ref": "#/$defs/n"},
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "a pattern that is none": {"type": "string", "pattern": "^(a"},
}

GRAMMARS = {
    "GBNF: left recursion": 'root ::= root "a" | "a"',
    "GBNF: left recursion through an empty rule": 'root ::= empty root "a" | "a"\nempty ::= "x"*',
    "GBNF: 10⁶ repetitions": 'root ::= "x"{1000000}',
    "GBNF: repetitions of repetitions": 'root ::= ((("x"{1,1000}){1,1000}){1,1000}){1,1000}',
    "GBNF: stars of what may be empty": 'root ::= (("a"*)*)* "b"',
    "GBNF: 10,000 parentheses": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "GBNF: a rule that is not there": "root ::= nothing",
    "GBNF: 12 ambiguous rules": "\n".join(
        [f"r{number} ::= r{number + 1} r{number + 1} | r{number + 1}" for number in range(12)]
        + ['r12 ::= "a"*', "root ::= r0"]
    ),
    "GBNF: 5,000 alternatives": "root ::= " + " | ".join(f'"w{number} "* "a"' for number in range(5000)),
    "GBNF: no grammar": "root ::= (((",
}

_DOUBLE = "{%set n=namespace(a=[1],b=[1])%}{%for i in range(40)%}{%set n.a=[n.a,n.a]%}{%set n.b=[n.b,n.b]%}{%endfor%}"
TEMPLATES = {
    "two trees of 2⁴⁰ nodes, compared": _DOUBLE + "{{n.a==n.b}}",
    "one as JSON": _DOUBLE + "{{n.a|tojson}}",
    "one as text": _DOUBLE + "{{n.a}}",
    "a list of 10¹⁰": "{{[[0]*100000]*100000}}",
    "60 lists of 4 M": "{%for i in range(60)%}{%set x=[0]*1000000*4%}{{x|length}}{%endfor%}",
    "60 texts of 4 M": "{%set s='a'*4000000%}{%for i in range(60)%}{{s.upper()|length}}{%endfor%}",
    "a text that doubles 40 times": "{%set n=namespace(s='a')%}{%for i in range(40)%}{%set n.s=n.s~n.s%}{%endfor%}{{n.s|length}}",
    "loops of 10⁹": "{%for i in range(1000)%}{%for j in range(1000)%}{%for k in range(1000)%}{%endfor%}{%endfor%}{%endfor%}x",
    "a macro that calls itself": "{%macro f(x)%}{{f(x)}}{%endmacro%}{{f(1)}}",
    "attributes of a class": "{{''.__class__.__mro__}}",
}
