"""Count phrases and names that readers cannot grep or understand alone, in pages, messages, docstrings, comments and
code; and the sentences that tests compare with, instead of the kind and the place of a problem.

`python tests/wording.py` prints the count of each rule, `python tests/wording.py --show RULE` where it stands.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
#: What a text is: of a page, a message or another text of code, a docstring, its first line, a comment, or the name of
#: a function, a parameter or a variable; or of what a test compares with.
Kind = Literal["page", "string", "docstring", "first line", "comment", "name", "assertion"]
PROSE: frozenset[Kind] = frozenset({"page", "string", "docstring", "comment"})


@dataclass(frozen=True)
class Rule:
    """What is counted, in which kinds of text.

    Attributes:
        advice: what to write instead.
        pattern: a regular expression.
        kinds: of the texts that are searched.
    """

    advice: str
    pattern: str
    kinds: frozenset[Kind] = PROSE


RULES = {
    "opening": Rule(
        "a function's docstring starts with a verb, another one with a noun",
        r"^(What|Why|Of|As|Around|By|From|With|Without|Where|At|In|Some|That|Those|Nothing|Within the block)\b",
        frozenset({"first line"}),
    ),
    "none": Rule("write `or None if X`", r"(^|[;.,(:] )None: ", frozenset({"docstring", "comment"})),
    "so many": Rule("name the parameter", r"\bso many\b"),
    "is no": Rule(
        "write `is not a X`", r"(?<![Tt]here )\b(is|are|was|were) no (?!longer|more\b|other|need|way\b|one\b)"
    ),
    "of its own": Rule("write `its own X` or `a separate X`", r"\bof (its|their|your) own\b"),
    "of": Rule(
        "put the noun first",
        r"(^|[.;:] )Of (what|which|these|those|them|each|several|consecutive|an?|the|one|two|such|all)\b",
    ),
    "also": Rule(
        "put `also` before the verb, or write `even`, `including`",
        r", also (when|where|while|if|of|for|in|after|as|by|with|from|to|on|without|at)\b",
    ),
    "says": Rule(
        "programs print, report, return, raise, estimate",
        r"\b(is|are|was|were|be|been) (said|told)\b(?! apart)|\b(says?|said|tells?|told) (so|it|once|twice)\b",
    ),
    "idiom": Rule(
        "say it plainly",
        r"\b(for people|in words|to be had|all the same|as (it|they) stands?|go(es)? together|goes? with|such a one"
        r"|another one|once more|anew|what is there|that (is|are) there|(nobody|somebody|anybody))\b",
    ),
    "what is": Rule(
        "name the thing",
        r"\b[Ww]hat (is|was|are|were|has been) (not )?"
        r"(\w+ed|\w+en|drawn|found|said|told|made|put|read|known|kept|left|lost|sent|built|held|cut)\b",
    ),
    "which": Rule("write two short sentences", r"\b(with|by|of|from) which\b"),
    "weights": Rule(
        "count parameters", r"\b(M|million|billion) weights\b|\bof them trained\b|\b(trained|every) weight\b"
    ),
    "number": Rule("write 5% and 10,000", r"\d %|\b\d{1,2} 000\b", frozenset({"page", "string"})),
    "term": Rule(
        "demo model, images, prompts, the Hub",
        r"\b(embedded|packaged) model\b|\b[Pp]ictures?\b|\b[Tt]exts\b|\bthe hub\b",
    ),
    "name": Rule(
        "variables are nouns of the domain, functions are verbs",
        r"^_?(found|one|told|said|given|kept|wanted|shown|known|asked|theirs|ours|mine|there|what|why|most|least|same"
        r"|begun|some|whole|again|taken|of|at|apart|alone|under)$|^_?(why|what|how|whose|of|not)_|_of$",
        frozenset({"name"}),
    ),
    "sentence": Rule(
        "compare kind and place by tests/refusals.py; tests/test_sentences.py has the sentences",
        r"\b[a-z]+(?:,? [a-z]+){2}\b.*",
        frozenset({"assertion"}),
    ),
}
#: Files whose tests are about sentences.
SENTENCES = ("test_sentences.py", "test_wording.py")


def texts(root: Path) -> Iterator[tuple[Path, int, Kind, str]]:
    """Yield file, line, kind and text of everything that the rules read; the reference of options is generated."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/**/*.md"))]
    for path in [*pages, *sorted(root.glob("examples/**/*.md"))]:
        if path.name != "configuration.md":
            yield from ((path, 0, "page", text) for text in _paragraphs(path.read_text(encoding="utf-8")))
    for path in sorted((root / "finetrainers").rglob("*.py")):
        yield from ((path, line, kind, text) for line, kind, text in _code(path.read_text(encoding="utf-8")))
    for path in sorted((root / "tests").rglob("*.py")):
        if path.name not in SENTENCES:
            yield from ((path, line, "assertion", text) for line, text in _compared(path.read_text(encoding="utf-8")))


def _paragraphs(page: str) -> Iterator[str]:
    prose = re.sub(r"`[^`]*`", "`x`", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S))
    yield from (" ".join(block.split()) for block in re.split(r"\n\s*\n", prose))


def _code(source: str) -> Iterator[tuple[int, Kind, str]]:
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        documented = is_function or isinstance(node, (ast.Module, ast.ClassDef))
        if documented and (docstring := ast.get_docstring(node)) is not None:
            docstrings.add(node.body[0].value)
            yield node.body[0].lineno, "docstring", docstring
            yield node.body[0].lineno, "first line", docstring.splitlines()[0]
        if is_function:
            yield node.lineno, "name", node.name
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from ((parameter.lineno, "name", parameter.arg) for parameter in parameters)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, "name", node.id
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
        if is_text and len(node.value) >= 12 and " " in node.value:
            yield node.lineno, "string", node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string.lstrip("#: ")


def _compared(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings in assertions, in the arguments `match` and in the cases of a test."""
    for node in ast.walk(ast.parse(source)):
        compared: list[ast.expr] = []
        if isinstance(node, ast.Assert):
            compared = [node.test]
        elif isinstance(node, ast.keyword) and node.arg == "match":
            compared = [node.value]
        elif isinstance(node, ast.FunctionDef):
            compared = node.decorator_list
        strings = (part for value in compared for part in ast.walk(value) if isinstance(part, ast.Constant))
        yield from ((part.lineno, part.value) for part in strings if isinstance(part.value, str))


def count(root: Path = ROOT, show: str | None = None) -> Counter[str]:
    """Return how often each rule is broken; print the places of the rule named by `show`."""
    counts: Counter[str] = Counter(dict.fromkeys(RULES, 0))
    patterns = {name: re.compile(rule.pattern, re.M) for name, rule in RULES.items()}
    for path, line, kind, text in texts(root):
        for name, rule in RULES.items():
            if kind in rule.kinds and (hits := len(patterns[name].findall(text))):
                counts[name] += hits
                if name == show:
                    print(f"{path.relative_to(root)}:{line}: {text[:140]!r} ({rule.advice})")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", choices=RULES, help="print the places of a rule")
    for rule_name, number in count(show=parser.parse_args().show).items():
        print(f"{number:5} {rule_name}")
