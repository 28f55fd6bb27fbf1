"""Templates that would take all time or memory: one line at once. All others render as jinja2 has it."""

import re
import time

import pytest
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl_jax.tokens import template_limits
from rl_jax.tokens.template_engine import _Generation, _raise, _strftime, _tojson, compile_template
from rl_jax.tokens.template_limits import TemplateLimitError
from rl_jax.types import Message
from tests.tokens.families import FAMILIES, TEMPLATES, renderer_of
from tests.tokens.test_templates import CALC, CHAT, of_text

TALK = [{"role": "user", "content": "What is 2 + 2?"}]


def grown(change, start="'x'", then=""):
    """A value that is changed 60 times, each time by what it was."""
    loop = "{% for i in range(60) %}{% set ns.s = " + change + " %}{% endfor %}"
    return "{% set ns = namespace(s=" + start + ") %}" + loop + then


def twins(then):
    """Two equal values of 2**60 parts, each made of 60."""
    loop = "{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
    return "{% set ns = namespace(s=[1], t=[1]) %}" + loop + then


def often(body, before=""):
    return (
        before
        + "{% for i in range(99999) %}{% for j in range(99999) %}"
        + body
        + "{% endfor %}" * 2
    )


STEPS, SIZE = "runs more than the 1", "makes or reads more than the 8"
WIDE = "more than 10000; take the template that the model was published with, or one that does less"
HOSTILE = [
    # loops and calls
    (often(""), STEPS),
    (often("{% if i %}{% endif %}" * 20), STEPS),
    ("{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}", STEPS),
    ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "more than 100 deep"),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", STEPS),
    ("{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}"
     "{{ g() }}", "more than 100 deep"),
    ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "more than 100 deep"),
    ("{% block x %}{{ self.x() }}{% endblock %}", "more than 100 deep"),
    (often("{{ range(99999) | select('eq', -1) | first }}"), STEPS),
    (often("{{ range(99999) | map('string') | map('upper') | list }}"), STEPS),
    ("{{ range(99999) | map(attribute='" + "a." * 9999 + "a', default='') | list }}", STEPS),
    # what is written
    ("{% for i in range(9999) %}" + "x" * 5000 + "{% endfor %}", SIZE),
    (often("{{ s }}", "{% set s = 'x' * 9999 %}"), SIZE + "047744 characters that one rendering of these messages may"),
    # operators
    ("{{ 'x' * 10**9 }}", SIZE), ("{{ 10**9 * 'x' }}", SIZE), ("{% set x = [1] * 10**9 %}", SIZE),
    ("{{ 10 ** (10 ** 8) }}", "a number of 400000000 bits with the operator **, more than 4096"),
    (grown("ns.s * ns.s", "3"), "bits with the operator *, more than 4096"),
    ("{{ 0x" + "f" * 2000 + " }}", "has a number of 8000 bits, more than 4096"),
    ("{{ ('f' * 99999) | int(0, 16) }}", "bits with the filter int"),
    ("{{ '%999999999d' % 1 }}", WIDE), ("{{ '%.999999999f' % 1 }}", WIDE), ("{{ '%*d' % (10**9, 1) }}", WIDE),
    ("{{ '%(a(b))999999999d' % {'a(b)': 1} }}", WIDE), ("{{ '%999999999d' | format(1) }}", WIDE),
    ("{{ '%999999999d' is odd }}", "odd is asked of str, which is no number"),
    ("{{ ('%(a)s' * 9999) % {'a': 'x' * 9999} }}", SIZE),
    ("{{ 'x' in 'y' * 10**7 }}", SIZE),
    # calls that make more than they are given
    ("{{ '{:999999999d}'.format(1) }}", WIDE), ("{{ '{:{w}d}'.format(1, w=10**9) }}", WIDE),
    ("{{ '{a:999999999d}'.format_map({'a': 1}) }}", WIDE), ("{{ ('{:999999999d}' | attr('format'))(1) }}", WIDE),
    ("{{ ('{0}' * 9999).format('x' * 9999) }}", SIZE),
    ("{{ 'x'.ljust(10**9) }}", WIDE), ("{{ 'x' | center(10**9) }}", WIDE), ("{{ 'x'.zfill(10**9) }}", WIDE),
    ("{{ ('x' | safe).center(width=10**9) }}", WIDE), ("{{ 'x\ny' | indent(10**9) }}", WIDE),
    ("{{ [1] | tojson(indent=10**9) }}", WIDE), ("{{ 5 | round(-10**9) }}", WIDE),
    ("{{ '\t'.expandtabs(10**9) }}", "calls str.expandtabs, which is not offered to templates"),
    ("{{ (1).to_bytes(10**9, 'big') }}", "calls int.to_bytes, which is not offered to templates"),
    ("{{ ('x' * 9999).join(range(9999) | map('string')) }}", SIZE), ("{{ range(9999) | join('x' * 9999) }}", SIZE),
    ("{{ ([[1] * 100] * 100) | sum(start=[]) }}", "sum adds numbers"),
    ("{{ lipsum(10**7) }}", "'lipsum' is undefined"), ("{{ [1] | batch(10**9, 0) }}", "No filter named 'batch'"),
    ("{{ strftime_now('%99999999Y') }}", "strftime_now takes a form of a date"),
    # what doubles
    (grown("ns.s + ns.s"), SIZE), (grown("ns.s ~ ns.s"), SIZE), (grown("[ns.s, ns.s] | join"), SIZE),
    (grown("ns.s.replace('x', ns.s)", "'xx'"), SIZE), (grown("ns.s | replace('x', ns.s)", "'xx'"), SIZE),
    (grown("'%s%s' % (ns.s, ns.s)"), SIZE), (grown("'{0}{0}'.format(ns.s)"), SIZE),
    (grown("ns.s + ns.s", "[1]"), SIZE),
    ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
     "{% set ns.s = x %}{% endfor %}", SIZE),
    (grown("[ns.s, ns.s]", then="{{ ns.s }}"), SIZE), (grown("[ns.s, ns.s]", then="{{ ns.s | tojson }}"), SIZE),
    (grown("namespace(a=ns.s, b=ns.s)", then="{{ ns.s }}"), SIZE),
    (twins("{{ ns.s == ns.t }}"), SIZE), (twins("{{ ns.s == ns.t == ns.s }}"), SIZE),
    (twins("{{ [ns.s] | select('eq', ns.t) | list }}"), SIZE), (twins("{{ ns.s in [ns.t] }}"), SIZE),
    (twins("{{ [ns.s].index(ns.t) }}"), SIZE),
    (twins("{% for i in [1, 2] %}{{ loop.changed(ns.s if i == 1 else ns.t) }}{% endfor %}"), SIZE),
    # what reads much again and again
    (often("{% set x = 'a' in s %}", "{% set s = 'x' * 99999 %}"), SIZE),
    (often("{% set x = s == t %}", "{% set s = 'x' * 99999 + 'a' %}{% set t = 'x' * 99999 + 'b' %}"), SIZE),
    (often("{% set x = 'a' in r %}", "{% set r = range(99999) | list %}"), SIZE),
    (often("{% set x = r[:] %}", "{% set r = range(99999) | list %}"), SIZE),
    (often("{% set x = s.find('a') %}", "{% set s = 'x' * 99999 %}"), SIZE),
    # keys whose hash goes through 2**60 parts
    *((grown("(ns.s, ns.s)", "(1,)", "{{ " + use + " }}"), "uses a tuple as a key") for use in (
        "{ns.s: 1}", "{}[ns.s]", "{}.get(ns.s)", "ns.s in {}", "dict([(ns.s, 1)])")),
    (grown("(ns.s, ns.s)", "(1,)", "{{ [ns.s] | unique | list }}"), SIZE),
    ("{{ [(1, 2)] | unique | list }}", "uses a tuple as a key"),
    ("{{ ((1, 2), 3) in {}.items() }}{{ [(1, 2)] | unique(attribute=0) | list }}", "unique by an attribute, which is"),
    # charges that a template would take back; what only Python's compiler finds
    ("{{ [5] | map(' step', -10**9) | list }}", "steps are counted in whole numbers"),
    ("{% for i in [1] %}" * 25 + "{% endfor %}" * 25, "is no chat template (SyntaxError: too many"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is no chat template (RecursionError"),
    ("{{ raise_exception('x' * 10**6) }}", "refuses the messages: xxx"),
]  # fmt: skip


@pytest.mark.parametrize(
    "text, told",
    [
        pytest.param(text, told, id=str(i), marks=[pytest.mark.slow] if told is STEPS else [])
        for i, (text, told) in enumerate(HOSTILE)
    ],
)
def test_a_hostile_template_ends_at_once_in_one_line(text, told):
    start = time.process_time()
    with pytest.raises(ValueError) as caught:
        compile_template(text, "the chat template of x")(None, messages=TALK, tools=None)
    assert time.process_time() - start < 1
    message = str(caught.value)
    assert message.startswith("the chat template of x ") and told in message
    assert "\n" not in message and len(message) < 700


def test_iterators_of_iterators_do_not_end_python():
    chain = "{% set ns = namespace(g=[1]) %}{% for i in range(30000) %}{% set ns.g = ns.g | map('int') %}{% endfor %}"
    assert compile_template(chain + "{{ ns.g | first }}", "x")(None, messages=TALK * 100) == "1"


@pytest.mark.slow
def test_a_limit_is_told_whatever_way_the_messages_are_put(tmp_path):
    """A renderer tries other ways with what a template refuses; what is beyond a limit ends it, in each part of it."""
    too_much = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateLimitError, match=r"the chat template of /.* runs more than the"):
        of_text(tmp_path / "a", "{% if tools %}" + too_much + "{% endif %}" + CHAT)
    renderer = of_text(
        tmp_path / "b", "{% if messages | length > 4 %}" + too_much + "{% endif %}" + CHAT
    )
    talk = [Message("user", "a"), Message("tool", "b"), Message("system", "c")] * 2
    for render in (renderer.first, lambda said: renderer.next(said, closed=True)):
        start = time.process_time()
        with pytest.raises(TemplateLimitError, match="runs more than the"):
            render(talk)
        assert time.process_time() - start < 1


# --- within the limits -----------------------------------------------------------------------------------------------


def plain(text):
    """The template as jinja2's sandbox renders it, without limits."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update({"raise_exception": _raise, "strftime_now": _strftime})
    return environment.from_string(text)


EXPRESSIONS = r"""
x.a.b ;; x['a']['b'] ;; x.a.nothing is defined ;; s[1:3] ;; s[::-1] ;; r[-2:] ;; r[0] ;; -n ;; n + 1 ;; n - 1 ;; n * 3
n / 2 ;; n // 2 ;; n ** 2 ;; n % 2 ;; 2.5 * 2 ;; s + '!' ;; r + r ;; s * 2 ;; 3 * r ;; s * -1 ;; s ~ n ~ r ~ none
'%s=%5.2f' % (s, n) ;; '%d%%' % n ;; '%(a)s' % x ;; '{}{:>4}'.format(s, n) ;; '{a[b]:{w}}'.format(a=x.a, w=5)
'{a}'.format_map(x) ;; s == 'Abc' ;; s != r ;; n < 3 ;; 1 < n <= 2 ;; 'b' in s ;; 2 in r ;; 9 not in r ;; 'a' in x
r == [2, 3, 5] ;; r < [9] ;; ('a', 1) in {'a': 1}.items() ;; 1 in {'a': 1}.values() ;; 'a' in {'a': 1}.keys()
2 in (r | map('int')) ;; n is odd ;; n is even ;; n is divisibleby(2) ;; s is string ;; x is mapping ;; none is none
s is lower ;; n is eq(2) ;; n is gt(1) ;; s is in(['Abc']) ;; r | length ;; s | upper ;; s | lower ;; s | title
s | trim ;; s | replace('b', 'BB') ;; s | default('z') ;; nothing | default('z') ;; r | first ;; r | last
r | join('-') ;; r | map('string') | join ;; [x, x] | map(attribute='a.b') | list ;; r | select('odd') | list
[x, x] | selectattr('a.b', 'equalto', 'y') | list ;; r | reject('odd') | list ;; [x] | rejectattr('a') | list
r | reverse | list ;; s | reverse ;; r | sum ;; r | max ;; r | min ;; r | sort(reverse=true)
[1, 1, 2] | unique | list ;; x | items | list ;; x | dictsort
x | tojson ;; r | tojson(indent=2) ;; x | tojson(separators=(',', ':'))
s | center(9) ;; 'a\nb' | indent(2) ;; 'a\nb' | indent('> ', true) ;; 2.567 | round(2) ;; 2.5 | round(0, 'ceil')
'3' | int ;; 'z' | int(7) ;; '2.5' | float ;; (-n) | abs ;; s | capitalize ;; 'a<b' | e ;; n | string ;; r | list
s | list ;; 'a b' | wordcount ;; 'a b c d' | truncate(5, true, '') ;; 'a b&c' | urlencode
'%s!' | format(s) ;; s.upper() ;; s.split('b')
'a,b,c'.split(',', 1) ;; s.startswith('A') ;; s.endswith(('c', 'd')) ;; s.replace('b', 'xx')
','.join(['a', 'b']) ;; ','.join(r | map('string')) ;; s.ljust(5) ~ '|' ;; s.zfill(6) ;; s.partition('b')
' a '.strip() ;; x.keys() | list ;; x.items() | list ;; x.get('a').b ;; x.get('z', 'q') ;; r.index(3) ;; r.count(9)
'a\nb'.splitlines() ;; dict(a=1, b=2) ;; dict([['a', 1]]) ;; dict(x, z=1).z ;; namespace(a=1).a ;; range(3) | list
range(1, 9, 3) | list ;; [s, r] | tojson ;; {'a': s, n: r} ;; (s, n) ;; s if n == 2 else r ;; not s ;; s and n
('<' | e) ~ '<' ;; ('<' | e) + '<' ;; ('<b>{}' | safe).format('<') ;; ('<b>' | safe).join(['<', 'x'])
('<%s>' | safe) % '<' ;; n.bit_length() ;; (2.0).is_integer() ;; cycler(1, 2).next() ;; strftime_now('%d %b %Y')
[1, [2, {'a': (3,)}]] == [1, [2, {'a': (3,)}]] ;; s | attr('upper') is callable ;; x | attr('nothing') is defined
"""
BLOCKS = [
    "{% for m in r %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ m }},{% endfor %}",
    "{% for m in r if m > 2 %}{{ loop.index0 }}{{ loop.previtem }}{{ m }}{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}none{% endfor %}",
    "{% for m in r %}{% if m == 3 %}{% continue %}{% endif %}{% if m == 5 %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "{% for m in [1, [2, [3]]] recursive %}{{ m if m is number else loop(m) }}({{ loop.depth }}){% endfor %}",
    "{% for k, v in x.items() %}{{ k }}{{ v }}{% endfor %}{% for c in s %}{{ loop.cycle(1, 2) }}{{ c }}{% endfor %}",
    "{% macro f(a, b='z') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 2, 3, c=4) }}",
    "{% macro f() %}<{{ caller('q') }}>{% endmacro %}{% call(v) f() %}{{ v }}{{ s }}{% endcall %}",
    "{% set ns = namespace(i=0) %}{% for m in r %}{% set ns.i = ns.i + m %}{% endfor %}{{ ns.i }}",
    "{% set t %} {{ s }}\n{{ n }}{% endset %}{{ t | trim }}{% filter upper %}{{ s }}q{% endfilter %}",
    "{% block x %}{{ s }}{% endblock %}{{ self.x() }}{% with q = 2 %}{{ q }}{% endwith %}",
    "{% for m in r %}{% block y scoped %}{{ m }}{% endblock %}{% endfor %}{% generation %}{{ s }}{% endgeneration %}",
    "{% autoescape true %}{{ '<' }}{{ s }}<{{ '<' | safe }}{{ '<' ~ '>' }}{% endautoescape %}",
    "  {%- if s %}\n  a  \n{%- elif n %}b{% else %}c{% endif -%}  \n x",
    "{% set l = [] %}{% for m in r %}{% if loop.changed(m > 2) %}{{ m }}{% endif %}{% endfor %}{{ l }}",
]  # fmt: skip
VALUES = {"s": "Abc", "n": 2, "r": [2, 3, 5], "x": {"a": {"b": "y"}}}


def test_what_is_within_the_limits_renders_as_in_the_sandbox():
    texts = re.split(r" ;; |\n", EXPRESSIONS.strip())
    assert len(texts) > 130
    for text in [*("{{ " + text + " }}" for text in texts), *BLOCKS]:
        want = plain(text).render(**VALUES)
        assert compile_template(text, text)(None, **VALUES) == want, text


TOOL_CALL = {
    "id": "a" * 9,
    "type": "function",
    "function": {"name": "calc", "arguments": {"a": "z" * 32_000}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_thousand_long_messages_render_with_much_to_spare(name, monkeypatch):
    text = (TEMPLATES / f"{name}.jinja").read_text()
    turn = [
        {"role": "user", "content": "u" * 32_000},
        {
            "role": "assistant",
            "content": "<think>\n" + "b" * 16_000 + "</think>\n\n" + "a" * 16_000,
        },
    ]
    if FAMILIES[name].tools:
        turn[1:1] = [
            {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
            {"role": "tool", "content": "t" * 32_000, "tool_call_id": "a" * 9, "name": "calc"},
        ]
    talk = (turn * 1000)[:1000]
    given = {
        "messages": talk,
        "tools": [CALC],
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    want = plain(text).render(**given)
    for name_of in ("BASE_STEPS", "STEPS_PER_VALUE", "BASE_SIZE", "SIZE_PER_VALUE", "SIZE_FACTOR"):
        monkeypatch.setattr(template_limits, name_of, getattr(template_limits, name_of) // 4)
    assert compile_template(text, name)(None, **given) == want


@pytest.mark.slow
def test_a_limit_grows_with_what_is_rendered():
    """A loop in a loop over the messages is slow, but no attack."""
    text = (
        "{% for m in messages %}{% for n in messages[:loop.index] %}{{ n.role if n is sameas m }}"
        + "{% endfor %}" * 2
    )
    render = compile_template(text, "x")
    assert render(None, messages=[dict(TALK[0]) for _ in range(700)]) == "user" * 700
    with pytest.raises(TemplateLimitError, match="runs more than the"):
        compile_template("{% set messages = range(700) | list %}" + text, "x")(None, messages=TALK)


def test_two_renderings_have_a_budget_each():
    renderer = renderer_of("qwen3")
    text = "{% for i in range(90000) %}{% endfor %}done"  # two of them would be one too many
    render = compile_template(text, "x")
    assert {render(None, messages=TALK) for _ in range(8)} == {"done"}
    talk = [Message("user", "x" * 100_000)]
    assert {len(renderer.first(talk)) for _ in range(3)} == {len(renderer.first(talk))}
