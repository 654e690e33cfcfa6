"""Equations on the site: ``math`` fences, in the few words of TeX below, become MathML when the site is built.

Browsers show MathML by themselves, so no page needs a script or a font for it; GitHub shows the same fences too.
"""

from __future__ import annotations

import html
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|[A-Za-z]|\S")
LETTERS = {
    "Delta": "Δ",
    "Phi": "Φ",
    "lambda": "λ",
    "gamma": "γ",
    "varepsilon": "ε",
    "partial": "∂",
    "ell": "ℓ",
}
SIGNS = {
    "odot": "⊙",
    "top": "⊤",
    "in": "∈",
    "times": "×",
    "cdot": "⋅",
    "sim": "∼",
    "leq": "≤",
    "geq": "≥",
    "sum": "∑",
    "colon": ":",
    "lVert": "‖",
    "rVert": "‖",
    "lvert": "|",
    "rvert": "|",
    "{": "{",
    "}": "}",
    "to": "→",
}
SPACES = {"quad": "1em", "qquad": "2em", ",": "0.17em", ";": "0.28em"}
BOLD = {
    **{chr(65 + i): chr(0x1D400 + i) for i in range(26)},
    **{chr(97 + i): chr(0x1D41A + i) for i in range(26)},
    **{str(i): chr(0x1D7CE + i) for i in range(10)},
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let ``math`` fences be equations."""
    fence = {"name": "math", "class": "math", "format": fenced}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def fenced(source: str, *_: Any, **__: Any) -> str:
    """What a fence becomes; each line is an equation of its own."""
    return "".join(
        f'<div class="equation"><math display="block">{mathml(line)}</math></div>'
        for line in source.splitlines()
        if line.strip()
    )


def mathml(source: str) -> str:
    r"""An equation as MathML; a word that is not known is an error.

    >>> mathml(r"\mathbf{W}_t")
    '<msub><mi>𝐖</mi><mi>t</mi></msub>'
    >>> mathml(r"T > 1 / d")
    '<mi>T</mi><mo stretchy="false">&gt;</mo><mn>1</mn><mo stretchy="false">/</mo><mi>d</mi>'
    """
    reader = _Reader(source)
    try:
        found = reader.row()
    except (IndexError, ValueError) as error:
        raise ValueError(f"the equation {source!r} cannot be read: {error}") from error
    if reader.tokens:
        raise ValueError(f"the equation {source!r} has a brace too many")
    return found


class _Reader:
    """Tokens of one equation, read once from the left."""

    def __init__(self, source: str) -> None:
        # text is cut out first: its blanks count
        self.texts = re.findall(r"\\text\{([^}]*)\}", source)
        self.tokens = TOKEN.findall(re.sub(r"\\text\{[^}]*\}", r"\\text", source))

    def row(self) -> str:
        """All up to the end, or to a closing brace."""
        parts = []
        while self.tokens and self.tokens[0] != "}":
            parts.append(self.scripted())
        return "".join(parts)

    def scripted(self) -> str:
        """One thing with what stands below and above it."""
        base, below, above = self.one(), "", ""
        while self.tokens and self.tokens[0] in "_^":
            if self.tokens.pop(0) == "_":
                below = self.one()
            else:
                above = self.one()
        if below and above:
            return f"<msubsup>{base}{below}{above}</msubsup>"
        if below or above:
            kind = "msub" if below else "msup"
            return f"<{kind}>{base}{below or above}</{kind}>"
        return base

    def one(self) -> str:
        """A group, a command, or a single sign."""
        token = self.tokens.pop(0)
        if token == "{":
            inner = self.row()
            self.tokens.pop(0)
            return f"<mrow>{inner}</mrow>"
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        return f'<mo stretchy="false">{html.escape(token.replace("-", "−"))}</mo>'

    def command(self, name: str) -> str:
        """What stands for a word of TeX."""
        if name == "text":
            return f"<mtext>{html.escape(self.texts.pop(0))}</mtext>"
        if name == "frac":
            return f"<mfrac>{self.one()}{self.one()}</mfrac>"
        if name == "mathbf":
            return f"<mi>{''.join(BOLD[letter] for letter in self.group())}</mi>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"></mspace>'
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name[1:] in ("vert", "Vert"):  # as high as what they enclose, on both sides
            form = "prefix" if name[0] == "l" else "postfix"
            return f'<mo form="{form}" fence="true" stretchy="true">{SIGNS[name]}</mo>'
        if name in SIGNS:
            return f"<mo>{SIGNS[name]}</mo>"
        raise ValueError(f"\\{name} is not known; add it to tools/equations.py")

    def group(self) -> str:
        """The letters between braces."""
        end = self.tokens.index("}")
        letters, self.tokens = self.tokens[1:end], self.tokens[end + 1 :]
        return "".join(letters)
